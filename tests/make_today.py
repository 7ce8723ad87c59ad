"""What the search of a slot at a time costs on suite 3; ``python tests/make_today.py`` makes ``data/today_3.json``.

The tuner, the guard, the policy and the watch are those that ran live (a slot at a time, windows of 20 steps, a default
window beside every trial, a closing comparison of fixed length); only the windows come from simulated jobs. It is kept
as the figure to beat.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from dynamiccl.agent.baselines import make_policy
from dynamiccl.agent.daemon import WATCH_LOSSES, WATCH_STEPS
from dynamiccl.agent.tuner import Settings, Tuner
from dynamiccl.envs import spaces
from dynamiccl.envs.job_suites import JobSuite
from dynamiccl.envs.live import DISCARD, SWITCH_STEPS, Window
from dynamiccl.envs.live_env import DEFAULT, TRIAL, LiveEnv
from dynamiccl.envs.scores import Ledger, summary
from dynamiccl.envs.sim.jobs import SLOTS
from dynamiccl.traces.fingerprint import Fingerprint
from dynamiccl.traces.records import Slot, size_class
from dynamiccl.traces.slots import SlotProfile

FILE = Path(__file__).parent / "data" / "today_3.json"
WATCHED = 3000  # steps after the verdict, from which the rest of the job is told


class NoJob:
    """What the tuner asks of a job beside windows."""

    generation = last_step = 0
    memory_pressure = 0.0

    def publish(self, decisions):
        pass

    confirm = publish


class SimulatedLiveEnv(LiveEnv):
    """The live environment with the windows of one simulated job; all of them go into the ledger."""

    def __init__(self, jobs, ledger, seed):
        super().__init__(NoJob(), window_steps=20)
        self.jobs, self.ledger, self.rng = jobs, ledger, np.random.default_rng(seed)
        self.running = np.zeros((1, SLOTS), int)
        self.place = {}

    def nothing(self):
        return "no slot is large enough"

    def bill(self, configs, n_steps, limit=float("inf")):
        """Run up to ``n_steps`` steps: a step above ``limit`` ms is the last. Returns their times, ms."""
        before = self.jobs.at.copy()
        times = self.jobs.window(configs, n_steps, self.rng)[0][0] / 1e3
        over = np.flatnonzero(times > limit)
        times = times[: over[0] + 1] if len(over) else times
        self.jobs.noise.at = before
        self.ledger.bill([0], configs, [len(times)])
        self.jobs.advance(len(times))
        self.job.last_step += len(times)
        return times

    def profile(self, skip=3):
        window = self.measure(DEFAULT, {}, n_steps=self.profile_steps, discard=skip)
        call_us = self.jobs.step_us(self.running)[1][0]
        for s in range(int(self.jobs.n_slots[0])):
            part = {k: np.asarray(v)[s : s + 1].copy() for k, v in vars(self.jobs.fingerprint).items()}
            f = Fingerprint(**part)
            func = "reduce_scatter" if f.is_reduce_scatter[0] else "all_gather"
            slot = Slot(int(f.n_ranks[0]), int(f.n_nodes[0]), func, size_class(int(f.n_bytes[0])))
            self.place[slot] = s
            share = float(f.share[0])
            if share >= self.min_share:
                n_bytes, calls = int(f.n_bytes[0]), float(f.calls[0])
                self.profiles.append(SlotProfile(slot, n_bytes, calls, float(call_us[s]), "kernel", share, f))
        self.profiles.sort(key=lambda p: -p.share)
        assert window.step_ms > 0
        return self.profiles

    def measure(self, kind, decisions, n_steps=0, discard=DISCARD):
        configs = np.zeros((1, SLOTS), int)
        for slot, decision in decisions.items():
            configs[0, self.place[slot]] = spaces.config_index(spaces.action_of(decision)[None])[0]
        if (configs != self.running).any():
            self.bill(self.running, SWITCH_STEPS)
            self.running = configs
        limit = spaces.GIVE_UP * self.default_ms if kind == TRIAL else float("inf")
        if discard:
            self.bill(configs, discard)
        kept = self.bill(configs, n_steps or self.window_steps, limit)
        window = Window(0, np.arange(len(kept)), kept)
        if kind == DEFAULT:
            self._defaults.append(window.step_ms)
        self.log.append((kind, window))
        return window


def play(suite, row, policy):
    """Scores of one job."""
    jobs = suite.jobs.take([row])
    mask = spaces.action_mask(jobs.fingerprint)
    names = mask[:, : spaces.N_PAIRS, None] & mask[:, None, spaces.N_PAIRS :]
    jobs.mask = names.reshape(1, SLOTS, -1).copy()  # aliases were not folded
    ledger = Ledger(jobs, suite.best_us[[row]])
    env = SimulatedLiveEnv(jobs, ledger, [7, row])
    tuner = Tuner(env, policy, Settings(windows=60, verify=20, window_steps=20))
    outcome = tuner.run()
    decisions = outcome.decisions if outcome.kept else {}
    final = np.zeros((1, SLOTS), int)
    for slot, decision in decisions.items():
        final[0, env.place[slot]] = spaces.config_index(spaces.action_of(decision)[None])[0]
    if outcome.kept:
        ledger.confirm([0])
    ledger.end([0], final)
    losses, begun = 0, env.job.last_step
    while final.any() and env.job.last_step < begun + WATCHED:
        if (env.running != final).any():
            env.bill(env.running, SWITCH_STEPS)
            env.running = final
        env.bill(final, WATCH_STEPS)
        default, tuned = env.measure(DEFAULT, {}), env.measure(TRIAL, decisions)
        losses = losses + 1 if tuned.step_ms > default.step_ms else 0
        if losses >= WATCH_LOSSES:
            final = np.zeros((1, SLOTS), int)
            ledger.end([0], final)
            break
    return ledger.scores()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=100, help="jobs of a suite, evenly over its strata")
    most = parser.parse_args().most
    found = {}
    for name in ("standard", "held-out"):
        suite, policy = JobSuite.load(name, most), make_policy("lstm")
        rows = []
        for row in range(len(suite)):
            rows.append(play(suite, row, policy))
            if row % 20 == 0:
                print(f"{name}: {row} of {len(suite)}", file=sys.stderr, flush=True)
        scores = type(rows[0])(**{k: np.concatenate([vars(r)[k] for r in rows]) for k in vars(rows[0])})
        found[name] = {"picked": suite.picked.tolist()} | {
            k: [None if x != x else x for x in np.round(v.astype(float).ravel(), 4).tolist()]
            for k, v in vars(scores).items()
        }
        print(json.dumps({name: summary(scores)}), file=sys.stderr, flush=True)
        FILE.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
