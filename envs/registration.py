"""The ids of the environments: ``import dynamiccl`` registers them."""

from gymnasium.envs.registration import register


def register_envs() -> None:
    """Make ``gymnasium.make("dynamiccl/Sim-v0")`` and the like known."""
    register("dynamiccl/Sim-v0", "dynamiccl.envs.sim_env:SimEnv")
    register("dynamiccl/Replay-v0", "dynamiccl.envs.replay_env:ReplayEnv")
    register("dynamiccl/Live-v0", "dynamiccl.envs.live_env:LiveEnv", nondeterministic=True)
