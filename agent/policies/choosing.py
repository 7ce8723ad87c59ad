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
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from .own_folder import forget, load, modules_beside

if TYPE_CHECKING:  # none of them before a policy is made: a job that is to be started does not wait for numpy
    from ...envs.search.interfaces import Policy

#: The rule, and the LSTM, which adds what it learned to the rule's scores.
RULE, LSTM = "expected-improvement", "lstm"
#: What decides where nothing else is asked for. On simulated jobs the two are as good, see agent/README.md.
DEFAULT = LSTM
#: Ending of a file of trained weights, which is a policy too.
WEIGHTS = ".npz"
#: Ending of a file that ``model.save()`` of stable-baselines3 leaves.
MODEL = ".zip"
#: A folder's own module with a class ``Policy``.
OWN_FILE, OWN_NAME = "policy.py", "Policy"
#: What code of others may raise: a script that is imported as a module may end Python.
RAISED = (Exception, SystemExit)
#: Settings that PPO and its kin save with a model. A2C has neither, TRPO only the second.
_CLIPPED = frozenset({"clip_range", "target_kl"})
#: Who left a model: a class that its policy's class descends from, those of _CLIPPED that it saved, package, algorithm.
#: The first row that fits: a recurrent policy is an ActorCriticPolicy too.
_ALGORITHMS = (
    ("RecurrentActorCriticPolicy", _CLIPPED, "sb3_contrib", "RecurrentPPO"),
    ("MaskableActorCriticPolicy", _CLIPPED, "sb3_contrib", "MaskablePPO"),
    ("ActorCriticPolicy", _CLIPPED, "stable_baselines3", "PPO"),
    ("ActorCriticPolicy", frozenset[str](), "stable_baselines3", "A2C"),
)
#: What these save and a model that only decides does not need. It may be code of another Python, which this one cannot
#: load: stable-baselines3 takes these in its place.
_OF_TRAINING = {"learning_rate": 0.0, "lr_schedule": 0.0, "clip_range": 0.0, "clip_range_vf": None}
#: Packages of the extra ``train``. The command line tells how to install one that is missing.
_PACKAGES = ("stable_baselines3", "sb3_contrib", "torch")
#: The folder of this package.
_PACKAGE = Path(__file__).resolve().parents[2]
#: Those of ``classical.CLASSICAL``.
CLASSICAL = ("default", "random", "coordinate-descent", "sweep", "nvidia-price")
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
            ``Policy``. Modules are found where Python looks and in the current folder, also those of a model's classes;
            policy.py finds those beside it first.
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
        return _load_file(found) if found.name == OWN_FILE else make_chooser(str(found), seed, rounds)
    return _load_own(name)


def _in_folder(folder: Path) -> Path:
    """The file with the policy of a folder. Raises ValueError unless there is exactly one."""
    found = [path for path in sorted(folder.iterdir()) if path.suffix in (WEIGHTS, MODEL)]
    if (folder / OWN_FILE).is_file():
        found.append(folder / OWN_FILE)
    if len(found) != 1:
        many = "no policy" if not found else f"{len(found)} policies"
        raise ValueError(f"{folder} holds {many}: put one FILE{WEIGHTS}, FILE{MODEL} or {OWN_FILE} into it")
    return found[0]


def _look_here() -> None:
    """Let Python import modules of the current folder: a command does not look there, as ``python`` does.

    There last: a job's folder may have a ``queue.py``, which must not replace Python's in the tuner of this job.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _load_model(name: str) -> Policy:
    """A model of stable-baselines3 or sb3-contrib. Raises ValueError; ImportError if one of _PACKAGES is missing."""
    check_is_there(name)
    forget()
    package, algorithm = _algorithm(_saved(name), name)
    try:
        model = getattr(importlib.import_module(package), algorithm).load(
            name, device="cpu", custom_objects={**_OF_TRAINING}
        )
    except RAISED as error:  # the model's own classes may raise anything
        raise ValueError(
            f"{algorithm} cannot load {name} ({type(error).__name__}: {error}): "
            "give MODULE:NAME of a class that loads it"
        ) from error
    return _checked(model, name)


def _saved(name: str) -> dict[str, Any]:
    """What a model was saved with, its class of policy included. Raises as :func:`_load_model`."""
    from stable_baselines3.common.save_util import load_from_zip_file

    _look_here()
    try:
        data, *_ = load_from_zip_file(name, device="cpu", custom_objects={**_OF_TRAINING})
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.partition(".")[0] in _PACKAGES:
            raise
        raise ValueError(f"{name} has a class of the module {_not_found(error, missing)}") from error
    except RAISED as error:  # a file of another program may raise anything
        raise ValueError(
            f"{name} is no model of stable-baselines3 ({type(error).__name__}: {error})"
        ) from error
    if not isinstance((data or {}).get("policy_class"), type):
        raise ValueError(
            f"{name} has no policy class that Python can load: keep the class in the module that it had in training"
        )
    return dict(data or {})


def _not_found(error: ModuleNotFoundError, missing: str) -> str:
    """Which module of a model was not found and the cure: the one of the class, or one that this one imports."""
    frames = [frame.f_globals for frame, _ in traceback.walk_tb(error.__traceback__) if _is_module(frame)]
    if frames:
        return (
            f"{frames[0]['__name__']}, which needs {missing}. Python does not find it: install this package"
        )
    return (
        f"{missing}, which Python does not find: install the package that has it, "
        f"or run the command in the folder of {missing}.py"
    )


def _is_module(frame: FrameType) -> bool:
    return frame.f_code.co_name == "<module>"


def _algorithm(saved: dict[str, Any], name: str) -> tuple[str, str]:
    """Package and name of the algorithm that left a model, by what was saved. Raises ValueError."""
    made_by = saved["policy_class"]
    ancestors = [one.__name__ for one in made_by.__mro__]
    settings = _CLIPPED & saved.keys()
    for ancestor, told, package, algorithm in _ALGORITHMS:
        if ancestor in ancestors and told == settings:
            return package, algorithm
    known = ", ".join(algorithm for *_, algorithm in _ALGORITHMS)
    raise ValueError(
        f"{name} is a model of none of {known} (its policy class is {made_by.__name__}): "
        "give MODULE:NAME of a class that loads it"
    )


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


def _checked(model: Any, name: str) -> Policy:
    """The model, if it was trained on the observations and actions of ``dynamiccl/Sim-v0``. Raises ValueError."""
    from ...envs.search.interfaces import action_space
    from ...envs.search.observation import observation_space

    if model.observation_space != observation_space() or model.action_space != action_space():
        raise ValueError(f"{name} was not trained on dynamiccl/Sim-v0 of this release: its spaces differ")
    is_masked = "action_masks" in inspect.signature(model.predict).parameters
    return _Masked(model) if is_masked else model


def _import_own(module: str) -> ModuleType:
    """The user's module. The current folder's comes first if a package of the same name is installed.

    Raises ImportError, and what the module raises.
    """
    forget()
    _look_here()
    first = module.partition(".")[0]
    found, known = PathFinder.find_spec(first, [os.getcwd()]), sys.modules.get(first)
    if found is not None and found.loader is not None and known is None:
        sys.modules[first] = importlib.util.module_from_spec(found)
        try:
            found.loader.exec_module(sys.modules[first])
        except BaseException:
            del sys.modules[first]
            raise
    elif found is not None and found.origin is not None and not _is_of(known, found.origin):
        raise ImportError(f"Python has another module {first} than {found.origin}: give it another name")
    return importlib.import_module(module)


def _is_of(module: ModuleType | None, file: str) -> bool:
    loaded = getattr(module, "__file__", None)
    return loaded is not None and os.path.realpath(loaded) == os.path.realpath(file)


def _load_own(name: str) -> Policy:
    """The user's own policy, MODULE:NAME. Raises ValueError."""
    module, colon, attribute = name.partition(":")
    known = f"known: {', '.join(POLICIES)}, FILE.npz, FILE.zip of stable-baselines3, MODULE:NAME, or a folder"
    if not colon:
        raise ValueError(f"no policy {name!r}; {known}")
    try:
        return _made(getattr(_import_own(module), attribute), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot load policy {name!r} ({_raised(error)}); {known}") from error
    except RAISED as error:  # the user's code may raise anything
        raise ValueError(f"cannot load policy {name!r}: {_raised(error)}") from error


def _load_file(file: Path) -> Policy:
    """The class ``Policy`` in a file of the user, who may have modules beside it. Raises ValueError."""
    with modules_beside(file):
        try:
            return _made(getattr(load(file), OWN_NAME), str(file))
        except RAISED as error:  # the user's code may raise anything
            raise ValueError(f"cannot load class {OWN_NAME} of {file} ({_raised(error)})") from error


def _made(found: Any, name: str) -> Policy:
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
