"""The ids of the environments: ``import dynamiccl.envs.registration``, or
``gymnasium.make("dynamiccl.envs.registration:dynamiccl/Sim-v0")``, which imports this by itself.

Not done by ``import dynamiccl``: every process of a job that is tuned imports that, and may have no gymnasium.
"""

import gymnasium as gym

gym.register("dynamiccl/Sim-v0", "dynamiccl.envs.sim_env:SimEnv")
gym.register("dynamiccl/Replay-v0", "dynamiccl.envs.replay_env:ReplayEnv")
gym.register("dynamiccl/Live-v0", "dynamiccl.envs.live_env:LiveEnv", nondeterministic=True)
