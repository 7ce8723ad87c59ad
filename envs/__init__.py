"""What is decided about: spaces, rewards and the environments. Importing this registers the environments' ids."""

import gymnasium as gym

gym.register("dynamiccl/Sim-v0", "dynamiccl.envs.sim_env:SimEnv")
gym.register("dynamiccl/Replay-v0", "dynamiccl.envs.replay_env:ReplayEnv")
# Its rewards are measured on a running job.
gym.register("dynamiccl/Live-v0", "dynamiccl.envs.live_env:LiveEnv", nondeterministic=True)
