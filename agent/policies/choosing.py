"""Policies by name for the search over a job."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # none of them before a policy is made: a job that is to be started does not wait for numpy
    from ...envs.search.interfaces import Policy

#: The rule, and the LSTM, which adds what it learned to the rule's scores.
RULE, LSTM = "expected-improvement", "lstm"
#: What decides where nothing else is asked for. On simulated jobs the two are as good, see docs/evidence.md.
DEFAULT = LSTM
#: Ending of a file of trained weights, which is a policy too.
WEIGHTS = ".npz"
#: Ending of a file that ``model.save()`` of stable-baselines3 leaves.
MODEL = ".zip"
#: A folder's own module with a class ``Policy``.
OWN_FILE, OWN_NAME = "policy.py", "Policy"
#: What code of others may raise: a script that is imported as a module may end Python.
RAISED = (Exception, SystemExit)
#: What algorithms save and a model that only decides does not need. It may be code of another Python, which this one
#: cannot load: stable-baselines3 takes these in its place.
_OF_TRAINING = {"learning_rate": 0.0, "lr_schedule": 0.0, "clip_range": 0.0, "clip_range_vf": None}
#: Packages of the extra ``train``. The command line tells how to install one that is missing.
_PACKAGES = ("stable_baselines3", "sb3_contrib", "torch")
#: The folder of this package.
_PACKAGE = Path(__file__).resolve().parents[2]
#: Those of ``classical.CLASSICAL``.
CLASSICAL = ("default", "random", "coordinate-descent", "sweep", "nvidia-price", "thompson")
#: Policies that can be asked for by name.
POLICIES = (LSTM, RULE, *CLASSICAL)


def check_chooser(name: str) -> None:
    """Refuse what :func:`make_chooser` would; what is always there is known by its name. Raises ValueError."""
    if name not in POLICIES:
        make_chooser(name)


def check_is_there(name: str) -> None:
    """Refuse a file of weights or a model that is not there, before anything slow begins. Raises ValueError."""
    if name.endswith((WEIGHTS, MODEL)) and not Path(name).is_file():
        raise ValueError(f"there is no file {name}")


def make_chooser(name: str, seed: int = 0, rounds: int | None = None) -> Policy:
    """A policy for :class:`envs.search.search.Search`.

    Args:
        name: one of POLICIES; FILE.npz (weights of ``lab train``); FILE.zip (a model of stable-baselines3; loading may
            run code in it, so load only files that you trust); MODULE:NAME (a class or function called without
            arguments, or an object); or a folder that holds one FILE.npz, one FILE.zip, or policy.py with a class
            ``Policy``. Modules are found where Python looks, and then in the current folder, also those of a model's
            classes; those of policy.py in its own folder.
        seed: of policies that draw numbers.
        rounds: exploring windows of a search, at most; None: as the policy has it.

    Raises:
        ValueError: if there is no such policy; the text has the known names.
    """
    from . import classical
    from .lstm import LstmPolicy
    from .near_tables import NearTables
    from .rule import ExpectedImprovement

    if name == RULE:
        return NearTables(ExpectedImprovement(rounds))
    if name in CLASSICAL:
        return classical.CLASSICAL[name](seed)
    if name == LSTM or name.endswith(WEIGHTS):
        weights = LstmPolicy.load(None if name == LSTM else name, seed)
        weights.rule = ExpectedImprovement(rounds)
        return NearTables(weights)
    if name.endswith(MODEL):
        return _load_model(name)
    if Path(name).is_dir():
        found = _in_folder(Path(name))
        if found.name != OWN_FILE:
            return make_chooser(str(found), seed, rounds)
        return _load_own(str(found), found.stem, OWN_NAME, found.parent)
    module, colon, attribute = name.partition(":")
    if not colon:
        known = (
            f"known: {', '.join(POLICIES)}, FILE.npz, FILE.zip of stable-baselines3, MODULE:NAME, or a folder"
        )
        raise ValueError(f"no policy {name!r}; {known}")
    return _load_own(name, module, attribute, Path())


def runs_code(name: str) -> bool:
    """Whether a policy of this name is code of its author: a module, or a model, in which there may be some."""
    if Path(name).is_dir():
        return not any(Path(name).glob(f"*{WEIGHTS}"))
    return name.endswith(MODEL) or (":" in name and not name.endswith(WEIGHTS))


def _in_folder(folder: Path) -> Path:
    """The file with the policy of a folder. Raises ValueError unless there is exactly one."""
    found = [path for path in sorted(folder.iterdir()) if path.suffix in (WEIGHTS, MODEL)]
    if (folder / OWN_FILE).is_file():
        found.append(folder / OWN_FILE)
    if len(found) != 1:
        many = "no policy" if not found else f"{len(found)} policies"
        raise ValueError(f"{folder} holds {many}: put one FILE{WEIGHTS}, FILE{MODEL} or {OWN_FILE} into it")
    return found[0]


def _look_in(folder: Path) -> None:
    """Let Python import modules of a folder: a command does not look in the current one, as ``python`` does.

    There last: a job's folder may have a ``queue.py``, which must not replace Python's in the tuner of this job.
    """
    if str(folder.resolve()) not in sys.path:
        sys.path.append(str(folder.resolve()))


def _load_model(name: str) -> Policy:
    """The policy in a model of stable-baselines3 or sb3-contrib, whatever algorithm trained it.

    Raises ValueError; ImportError if one of _PACKAGES is missing.
    """
    check_is_there(name)
    from stable_baselines3.common.save_util import load_from_zip_file

    _look_in(Path())
    try:
        saved, weights, _ = load_from_zip_file(name, device="cpu", custom_objects={**_OF_TRAINING})
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.partition(".")[0] in _PACKAGES:
            raise
        raise ValueError(
            f"{name} needs the module {missing}, which Python does not find: install the package that has it, or run "
            f"the command in the folder of {missing}.py"
        ) from error
    except RAISED as error:  # a file of another program may raise anything
        raise ValueError(
            f"{name} is no model of stable-baselines3 ({type(error).__name__}: {error})"
        ) from error
    saved = saved or {}
    if not isinstance(saved.get("policy_class"), type):
        raise ValueError(
            f"{name} has no policy class that Python can load: keep the class in the module that it had in training"
        )
    _check_spaces(saved, name)
    try:
        policy = saved["policy_class"](
            saved["observation_space"],
            saved["action_space"],
            lambda _: 0.0,
            **saved.get("policy_kwargs") or {},
        )
        policy.load_state_dict(weights["policy"])
    except RAISED as error:  # the model's own classes may raise anything
        raise ValueError(
            f"the policy of {name} cannot be made ({type(error).__name__}: {error}): "
            "give MODULE:NAME of a class that loads it"
        ) from error
    return _Masked(policy) if "action_masks" in inspect.signature(policy.predict).parameters else policy


def _check_spaces(saved: dict[str, Any], name: str) -> None:
    """Refuse a model that was not trained on the observations and actions of ``dynamiccl/Sim-v0``."""
    from ...envs.search.interfaces import action_space
    from ...envs.search.observation import observation_space

    if saved.get("observation_space") != observation_space() or saved.get("action_space") != action_space():
        raise ValueError(f"{name} was not trained on dynamiccl/Sim-v0 of this release: its spaces differ")


class _Masked:
    """A model of MaskablePPO, which wants the mask beside the observation that tells it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = True
    ) -> tuple[Any, Any]:
        """See ``envs.search.interfaces.Policy``."""
        from ...envs.search.observation import masks_of

        masks = masks_of(observation)
        found, state = self.model.predict(
            observation, state, episode_start, deterministic, action_masks=masks
        )
        return found, state


def _import_from(folder: Path, module: str) -> ModuleType:
    """The user's module, which may lie in ``folder``.

    Raises ImportError, also where Python has another module than the one that lies there, and what the module raises.
    """
    _look_in(folder)
    first = module.partition(".")[0]
    there, meant = PathFinder.find_spec(first, [str(folder.resolve())]), importlib.util.find_spec(first)
    other = meant.origin if meant else None
    if there and there.origin and os.path.realpath(there.origin) != os.path.realpath(other or ""):
        raise ImportError(
            f"Python has another module {first} ({other}) than {there.origin}: give it another name"
        )
    return importlib.import_module(module)


def _load_own(name: str, module: str, attribute: str, folder: Path) -> Policy:
    """The user's own policy. Raises ValueError."""
    try:
        return _made(getattr(_import_from(folder, module), attribute))
    except RAISED as error:  # the user's code may raise anything
        raise ValueError(f"cannot load policy {name!r}: {_raised(error)}") from error


def _made(found: Any) -> Policy:
    """The policy that a class or function makes, or the object itself. Raises TypeError, and what the class raises."""
    if isinstance(found, type) or not hasattr(found, "predict"):
        found = found() if callable(found) else found
    if not callable(getattr(found, "predict", None)):
        raise TypeError("it has no predict(observation, state, episode_start, deterministic)")
    return found  # type: ignore[no-any-return]


def _raised(error: BaseException) -> str:
    """What the user's code raised, and in which line of it."""
    if isinstance(error, SyntaxError):  # says itself in which line
        return f"{type(error).__name__}: {error}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _is_own(file: str) -> bool:
    """Whether this is a file of the user, and not of this package, of Python or of an installed one."""
    others = (_PACKAGE, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve())
    path = Path(file).resolve()
    return path.is_file() and not any(path.is_relative_to(other) for other in others)
