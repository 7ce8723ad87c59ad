"""The ids of the environments: ``import dynamiccl`` makes them known to Gymnasium, and does not import it."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_REGISTRY = "gymnasium.envs.registration"


def register_envs() -> None:
    """Make ``gymnasium.make("dynamiccl/Sim-v0")`` and the like known, now or as soon as Gymnasium is imported.

    Gymnasium takes half a second to import, which a command line or a user's program that wants no environment has not.
    """
    if (registry := sys.modules.get(_REGISTRY)) is not None:
        _register(registry)
    else:
        sys.meta_path.insert(0, _OnceImported())


def _register(registry: ModuleType) -> None:
    registry.register("dynamiccl/Sim-v0", "dynamiccl.envs.sim_env:SimEnv")
    registry.register("dynamiccl/Replay-v0", "dynamiccl.envs.replay_env:ReplayEnv")
    registry.register("dynamiccl/Live-v0", "dynamiccl.envs.live_env:LiveEnv", nondeterministic=True)
    registry.register("dynamiccl/SimAgainstRule-v0", "dynamiccl.agent.train.against:sim_against_rule")


class _OnceImported:
    """Stands before Python's finders until Gymnasium's registry is looked for; finds it as they do."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _REGISTRY:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _register(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
