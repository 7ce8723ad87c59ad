"""A job whose truth is written in the test, and a search over it that a policy decides."""

import math
from dataclasses import replace

import numpy as np
from dynamiccl.agent.policies.rule import ExpectedImprovement
from dynamiccl.envs.search.interfaces import LEAVE, Job, Measured, arms_of
from dynamiccl.envs.search.search import Search
from dynamiccl.envs.search_env import Reward
from dynamiccl.traces.fingerprint import N_FEATURES
from dynamiccl.traces.spaces import N_CONFIGS

#: Configs that may be chosen in each of the two slots.
OPEN = [0, 8, 16, 18, 20]


class Told:
    """A job of two slots; ``saving(configs)`` is its truth, ``noise`` the spread of one step."""

    calls = 0.0  # a step, of each slot, that a table can hold at few of

    def __init__(self, saving, noise=0.004, seed=0):
        self.saving, self.noise, self.rng = saving, noise, np.random.default_rng(seed)
        self.running, self.windows = np.zeros(2, int), []
        self.scale = 1.0

    def begin(self):
        mask = np.zeros((2, N_CONFIGS), bool)
        mask[:, OPEN] = True
        features = np.zeros((2, N_FEATURES), np.float32)
        share, us, calls = np.full(2, 0.3), np.full(2, 100.0), np.full(2, self.calls)
        job = Job(features, mask, share, us, np.full((2, N_CONFIGS), -1), calls)
        return job, self.measure_steps(np.zeros(2, int), 8, 3, math.inf)

    def measure(self, plan):
        self.windows.append(plan)
        return self.measure_steps(plan.configs, plan.n_steps, plan.discard, plan.limit_ms)

    def measure_steps(self, configs, n, discard, limit):
        step = 100.0 * self.scale * (1 - self.saving(configs))
        steps = step * np.exp(self.noise * self.rng.standard_normal(n))
        if step > limit:
            steps = steps[:1]
        self.running = configs.copy()
        billed = len(steps) + discard
        return Measured(steps, np.full(2, np.nan), np.ones(2, bool), billed, billed * step)


class Straggling(Told):
    """With a config of ``which`` in the first slot, one step in ``every`` takes three times as long."""

    def __init__(self, saving, which=(20,), every=100, **more):
        super().__init__(saving, **more)
        self.which, self.every, self.luck = which, every, np.random.default_rng(more.get("seed", 0) + 1000)

    def measure_steps(self, configs, n, discard, limit):
        seen = super().measure_steps(configs, n, discard, limit)
        hit = (self.luck.random(len(seen.step_ms)) < 1 / self.every) & (configs[0] in self.which)
        steps = seen.step_ms * np.where(hit, 3.0, 1.0)
        return Measured(
            steps,
            seen.call_us,
            seen.obeyed,
            seen.billed,
            seen.billed_ms + float((steps - seen.step_ms).sum()),
        )


class Turning(Told):
    """Its tables take turns at every step. ``long``: counted steps of the next measurement that take three times as
    long, whichever table runs."""

    long = ()

    def begin(self):
        job, default = super().begin()
        return replace(job, takes_turns=True), default

    def measure(self, plan):
        if not plan.turns:
            return super().measure(plan)
        self.windows.append(plan)
        arms = arms_of(plan.n_steps, plan.turns)
        tables = np.where(arms[:, None] == 1, plan.configs, plan.others)
        ms = 100.0 * self.scale * (1 - np.array([self.saving(table) for table in tables]))
        ms *= np.exp(self.noise * self.rng.standard_normal(len(arms)))
        ms[list(self.long)] *= 3.0
        self.long = ()
        billed = plan.n_steps + plan.discard
        return Measured(
            ms, np.full(2, np.nan), np.ones(2, bool), billed, billed * float(ms.mean()), arms=arms
        )


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


def good(configs):
    return 0.10 * (configs[0] == 20) + 0.05 * (configs[1] == 18)
