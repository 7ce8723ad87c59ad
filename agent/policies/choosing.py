"""Policies by name for the search over a job."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # none of them before a policy is made: a job that is to be started does not wait for numpy
    from ...envs.search.interfaces import Policy

#: What decides where nothing else is asked for: the best that was measured, see the README.
DEFAULT = "expected-improvement"
#: Ending of a file of trained weights, which is a policy too.
WEIGHTS = ".npz"
#: Those of ``classical.CLASSICAL``.
CLASSICAL = ("default", "random", "coordinate-descent", "sweep")
#: Policies that can be asked for by name.
POLICIES = (DEFAULT, *CLASSICAL, "lstm")


def check_chooser(name: str) -> None:
    """Refuse what :func:`make_chooser` would; what is always there is known by its name. Raises ValueError."""
    if name not in POLICIES:
        make_chooser(name)


def make_chooser(name: str, seed: int = 0, rounds: int | None = None) -> Policy:
    """A policy for :class:`envs.search.search.Search`: one of POLICIES, weights of ``lab train`` (FILE.npz), or
    MODULE:NAME (a class or function called without arguments, or an object), found where Python looks and in the
    current folder. ``rounds``: exploring windows of a search, at most; None: as the policy has it.

    Raises ValueError, with the known names, when there is none such.
    """
    from . import classical
    from .lstm import LstmPolicy
    from .near_tables import NearTables
    from .rule import ExpectedImprovement

    if name == DEFAULT:
        return NearTables(ExpectedImprovement(rounds))
    if name in CLASSICAL:
        return classical.CLASSICAL[name](seed)
    if name == "lstm" or name.endswith(WEIGHTS):
        weights = LstmPolicy.load(None if name == "lstm" else name, seed)
        weights.rule = ExpectedImprovement(rounds)
        return NearTables(weights)
    return _load_own(name)


def _load_own(name: str) -> Policy:
    """The user's own policy, MODULE:NAME. Raises ValueError."""
    module, colon, attribute = name.partition(":")
    known = f"known: {', '.join(POLICIES)}, weights of lab train (FILE.npz), or MODULE:NAME of your own"
    if not colon:
        raise ValueError(f"no policy {name!r}; {known}")
    if os.getcwd() not in sys.path:  # a command does not look where it is called, as ``python`` does
        sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot load policy {name!r} ({error}); {known}") from error
    if isinstance(made, type) or not hasattr(made, "predict"):
        made = made() if callable(made) else made
    if not callable(getattr(made, "predict", None)):
        raise ValueError(f"policy {name!r} has no predict(observation, state, episode_start, deterministic)")
    return made  # type: ignore[no-any-return]
