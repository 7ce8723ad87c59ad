"""RecurrentPPO on dynamiccl/Sim-v0. Then: dynamiccl bench --policy model.zip --jobs 40"""

import sys

import dynamiccl  # noqa: F401  (registers the environments)
import torch
from dynamiccl.agent.policies.choosing import make_chooser
from dynamiccl.agent.train.against import WholeJobs
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.callbacks import CheckpointCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

torch.set_num_threads(1)  # the network is small: threads would wait for each other
turns = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
env = make_vec_env("dynamiccl/Sim-v0", n_envs=8, seed=0, wrapper_class=WholeJobs)
earned, error = evaluate_policy(make_chooser("expected-improvement"), env, 16)
print(f"the rule earns {earned:.2f} an episode (16 jobs, deviation {error:.2f}); compare ep_rew_mean with it")
small = {"lstm_hidden_size": 64}
# A reward counts in full whenever it comes: it is the time of one job. So the discount gamma is 1.
model = RecurrentPPO(
    "MlpLstmPolicy",
    env,
    n_steps=64,
    n_epochs=4,
    gamma=1.0,
    policy_kwargs=small,
    seed=0,
    device="cpu",
    verbose=1,
)
model.learn(turns, callback=CheckpointCallback(10_000 // 8, "checkpoints"))
model.save("model")
