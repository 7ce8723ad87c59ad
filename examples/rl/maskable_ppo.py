"""MaskablePPO on dynamiccl/Sim-v0. Then: dynamiccl bench --policy model.zip --jobs 40"""

import sys

import dynamiccl  # noqa: F401  (registers the environments)
from sb3_contrib import MaskablePPO
from stable_baselines3.common.env_util import make_vec_env

turns = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
env = make_vec_env("dynamiccl/Sim-v0", n_envs=8, seed=0)
# The discount is the default, 0.99; docs/environments.md advises gamma=1.
model = MaskablePPO("MlpPolicy", env, n_steps=64, seed=0, device="cpu", verbose=1)
model.learn(turns)
model.save("model")
