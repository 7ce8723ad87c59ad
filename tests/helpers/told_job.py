"""A job whose truth is written in the test, and a search over it that a policy decides."""

from dataclasses import replace

import numpy as np
from dynamiccl.agent.policies.rule import ExpectedImprovement
from dynamiccl.envs.search.config import LONG_TURN_STEPS
from dynamiccl.envs.search.interfaces import LEAVE, PROFILE, QUAD, Job, Measured, Plan, arms_of
from dynamiccl.envs.search.search import Search
from dynamiccl.envs.search_env import Reward
from dynamiccl.traces.fingerprint import N_FEATURES
from dynamiccl.traces.spaces import N_CONFIGS

#: Configs that may be chosen in each of the two slots.
OPEN = [0, 8, 16, 18, 20]


class Told:
    """A job of two slots; ``saving(configs)`` is its truth, ``noise`` the spread of one step. ``long``: counted steps
    of the next measurement that take ``times`` as long, whichever table runs."""

    calls = 0.0  # a step, of each slot, that a table can hold at few of
    long = ()
    times = 3.0

    def __init__(self, saving, noise=0.004, seed=0):
        self.saving, self.noise, self.rng = saving, noise, np.random.default_rng(seed)
        self.windows = []
        self.scale = 1.0

    def begin(self):
        mask = np.zeros((2, N_CONFIGS), bool)
        mask[:, OPEN] = True
        features = np.zeros((2, N_FEATURES), np.float32)
        share, us, calls = np.full(2, 0.3), np.full(2, 100.0), np.full(2, self.calls)
        job = Job(features, mask, share, us, np.full((2, N_CONFIGS), -1), calls)
        return job, self.run(Plan(PROFILE, np.zeros(2, int), 8, 3))

    def measure(self, plan):
        self.windows.append(plan)
        return self.run(plan)

    def steps(self, tables):
        """What steps under ``tables`` (n, 2) take, ms."""
        ms = 100.0 * self.scale * (1 - np.array([self.saving(table) for table in tables]))
        return ms * np.exp(self.noise * self.rng.standard_normal(len(tables)))

    def run(self, plan):
        n = plan.discard + plan.n_steps
        arms = arms_of(n, plan.turns) if plan.turns else np.ones(n, int)
        ms = self.steps(np.where(arms[:, None] == 1, plan.configs, plan.others))
        ms[[plan.discard + at for at in self.long]] *= self.times
        self.long = ()
        too_slow = np.flatnonzero((ms > plan.limit_ms) & (arms == 1) & (np.arange(n) >= plan.discard))
        end = int(too_slow[0]) + 1 if too_slow.size else n
        counted = slice(plan.discard, end)
        return Measured(
            ms[counted],
            np.full(2, np.nan),
            np.ones(2, bool),
            end,
            float(ms[:end].sum()),
            arms=arms[counted] if plan.turns else arms[:0],
            turns=plan.turns,
        )


class Straggling(Told):
    """With a config of ``which`` in the first slot, one step in ``every`` takes three times as long."""

    def __init__(self, saving, which=(20,), every=100, **more):
        super().__init__(saving, **more)
        self.which, self.every, self.luck = which, every, np.random.default_rng(more.get("seed", 0) + 1000)

    def steps(self, tables):
        hit = (self.luck.random(len(tables)) < 1 / self.every) & np.isin(tables[:, 0], self.which)
        return super().steps(tables) * np.where(hit, 3.0, 1.0)


class Uneven(Told):
    """A job whose steps are not alike: it takes long turns, and one quad of them at a time."""

    def run(self, plan):
        if plan.turns:
            quad = QUAD * LONG_TURN_STEPS
            plan = replace(plan, turns=LONG_TURN_STEPS, n_steps=quad, discard=quad * (plan.discard > 0))
        return super().run(plan)


def run(told, prior, policy=None, config=None, windows=400):
    job, default = told.begin()
    search = Search(job, default, prior, config)
    policy = policy or ExpectedImprovement()
    reward, rewards = Reward(search), 0.0
    for _ in range(windows):
        if search.is_over:
            break
        plan = search.plan()
        if plan is None:
            search.ask(policy)
        else:
            rewards += reward.of(search.record(plan, told.measure(plan)))
    return search, rewards


def go_on(search, told, windows):
    for _ in range(windows):
        plan = search.plan()
        if plan is None:
            search.decide(0, LEAVE)
        else:
            search.record(plan, told.measure(plan))


def go_until(search, told, until, windows=3000, policy=None):
    """Windows until ``until(search)``; how many optimizer steps that took."""
    policy, begun = policy or ExpectedImprovement(), search.steps
    for _ in range(windows):
        if until(search):
            return search.steps - begun
        plan = search.plan()
        if plan is None:
            search.ask(policy)
        else:
            search.record(plan, told.measure(plan))
    raise AssertionError("it never came")


def good(configs):
    return 0.10 * (configs[0] == 20) + 0.05 * (configs[1] == 18)
