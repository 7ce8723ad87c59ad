"""One recorded episode through the simulated, the recorded and the live backend: the search cannot tell them apart.

The recorded backend is the product's own (``Replay-v0``). The live one is ``live.Job`` itself, which publishes tables
into a run folder and reads records from rings; behind those stands a job that answers from the recording. The simulated
one is ``SimWindows``, whose job answers from the recording too.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from dynamiccl.agent.policies.rule import ExpectedImprovement
from dynamiccl.envs.live import job as live
from dynamiccl.envs.live.confirmed import decided
from dynamiccl.envs.live.windows import LiveWindows
from dynamiccl.envs.live_env import LiveEnv
from dynamiccl.envs.nccl.shm import decode_table
from dynamiccl.envs.replay import decisions as replay
from dynamiccl.envs.replay.job import RecordedJob
from dynamiccl.envs.replay_env import ReplayEnv
from dynamiccl.envs.sim.windows import OneJob, SimWindows
from dynamiccl.envs.sim.workloads import SLOTS
from dynamiccl.envs.sim_env import SimEnv
from dynamiccl.traces.names import DTYPES
from dynamiccl.traces.records import (
    ALGOS,
    COLL,
    COLL_DTYPE,
    COMM,
    COMM_DTYPE,
    FUNCS,
    KERNEL,
    KERNEL_DTYPE,
    OFFER,
    OFFER_DTYPE,
    PROTOS,
    STEP,
    STEP_DTYPE,
    Table,
)
from dynamiccl.traces.spaces import N_CONFIGS
from synthetic_trace import write_run


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("conformance") / "trace", search=24, final=12)[1]


def seed_of(seed):
    """Where in the record an environment that is reset with ``seed`` begins."""
    return int(np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).integers(2**31))


# -- live: rings of a run folder ---------------------------------------------------------------------------------------


class Rank:
    """The ring of one rank: what it holds is put there by :class:`Told`."""

    gaps, tail = (), 0

    def __init__(self, rank, known):
        self.name, self.pid, self.records, self._known = f"ring-{rank}", 1000 + rank, [], known
        self.key, self.process = f"{rank}/ring-{rank}", self.pid

    def start(self):
        return ""

    def known(self):
        return self._known

    def is_alive(self):
        return True

    def head(self):
        return 0

    def waited_ns(self):
        return 0

    def drain(self):
        records, self.records = self.records, []
        rows = np.concatenate(records) if records else np.zeros(0, COLL_DTYPE)
        rows["stamp"] = np.arange(self.tail, self.tail + len(rows)) + 1
        self.tail += len(rows)
        return rows


class Told(live.Job):
    """``live.Job`` over ranks that answer from the recording: steps under the table before until all have switched,
    then those of the window, with their collectives."""

    tries_few = False

    def __init__(self, folder, trace, recorded, seed, monkeypatch):
        self.ranks_here = [Rank(0, known_of(trace)), Rank(1, np.zeros(0, COLL_DTYPE))]
        monkeypatch.setattr(folder, "rings", lambda: self.ranks_here)
        super().__init__(folder)
        self.folder, self.answers, self.generation_in_force, self.ms, self.n = folder, None, 0, 0.0, 0
        self.recorded = RecordedJob(trace, recorded, seed)
        memory = trace.steps.iloc[0]
        self.memory = int(memory["memory_used"]), int(memory["memory_total"])

    def window(self, decisions, n_steps, discard=1, *more):
        self.discarded = discard
        self.answers = self.recorded.window(decisions, n_steps, discard, *more), self.recorded.take_events()
        if decided(decisions) != self.confirmed:  # a window is of what holds
            self.confirm(decisions)
        return super().window(decisions, n_steps, discard, *more)

    def confirm(self, decisions):
        self.recorded.confirm(decisions)
        return super().confirm(decisions)

    def alternate(self, *asked):
        """The recording's turns: these steps go by (``test_live_turns.py`` has those that ``live.Job`` measures)."""
        turns = self.recorded.alternate(*asked)
        none = self.recorded.take_events()
        for step in range(self.n + 1, int(turns.steps[-1]) + 1):
            self.steps(step, self.generation_in_force, turns.current_ms, none)
        self.n, self.ms = int(turns.steps[-1]), turns.current_ms
        self.poll()
        return turns

    def poll(self):
        if self.answers is not None:
            generation = 0  # default steps before the first table need none
            if (published := self.folder.table.read()) is not None:
                generation, table = published
                assert decode_table(table).generation == generation
            (window, events), self.answers = self.answers, None
            until = int(window.steps[0]) - self.discarded - 1
            for step in range(self.n + 1, int(window.steps[-1]) + 1):
                new = step > until
                ms = float(window.durations_ms[0]) if new else self.ms
                self.steps(step, generation if new else self.generation_in_force, ms, events)
            self.n, self.ms, self.generation_in_force = int(window.steps[-1]), ms, generation
        super().poll()

    def steps(self, step, generation, ms, events):
        row = np.zeros(1, STEP_DTYPE)
        row["kind"], row["step"], row["duration_ns"], row["generation"] = STEP, step, ms * 1e6, generation
        row["memory_used"], row["memory_total"] = self.memory
        mine = events[events["step"] == step] if len(events) else events
        for rank, ring in enumerate(self.ranks_here):
            if len(mine):
                ring.records += records_of(mine[mine["rank"] == rank], generation)
            one = row.copy()
            one["rank"] = rank
            ring.records.append(one.view(COLL_DTYPE))


def known_of(trace):
    """The communicators and offers of a recording as the records of a ring."""
    comms, offers = np.zeros(len(trace.comms), COMM_DTYPE), np.zeros(len(trace.offers), OFFER_DTYPE)
    for row, told in zip(comms, trace.comms.to_dict("records"), strict=True):
        row["kind"], row["comm_id"], row["rank"] = COMM, told["comm_id"], told["rank"]
        row["n_ranks"], row["n_nodes"], row["name"] = told["n_ranks"], told["n_nodes"], told["name"].encode()
    for row, told in zip(offers, trace.offers.to_dict("records"), strict=True):
        row["kind"], row["comm_id"], row["func"] = OFFER, told["comm_id"], FUNCS.index(told["func"])
        row["n_bytes"], row["n_pipe_ops"] = told["n_bytes"], told["n_pipe_ops"]
        row["algo"], row["proto"] = ALGOS.index(told["algo"]), PROTOS.index(told["proto"])
        row["cost_us"] = np.reshape(told["cost_us"], row["cost_us"].shape)
    return np.concatenate([comms.view(COLL_DTYPE), offers.view(COLL_DTYPE)])


def records_of(events, generation):
    """One rank's collectives of one step, and their kernels where they were sampled."""
    calls = np.zeros(len(events), COLL_DTYPE)
    calls["kind"], calls["generation"] = COLL, generation
    for name in ("comm_id", "rank", "n_bytes", "n_channels", "step", "enqueue_ns", "asked_bytes"):
        calls[name] = events[name].to_numpy()
    calls["seq"] = np.arange(len(events)) + 1000 * events["step"].to_numpy()
    for name, known in (("func", FUNCS), ("algo", ALGOS), ("proto", PROTOS), ("dtype", DTYPES)):
        calls[name] = [known.index(value) for value in events[name]]
    timed = events["start_ns"].notna().to_numpy()
    kernels = np.zeros(int(timed.sum()), KERNEL_DTYPE)
    for name in ("comm_id", "rank", "func", "seq", "step"):
        kernels[name] = calls[name][timed]
    kernels["kind"] = KERNEL
    for name in ("start_ns", "end_ns"):
        kernels[name] = events[name][timed].to_numpy(np.int64)
    return [calls, kernels.view(COLL_DTYPE)]


# -- simulated: what SimWindows asks of its jobs -----------------------------------------------------------------------


class Jobs:
    """A batch of one that answers from the recording; ``plan`` is the window that is asked for."""

    def __init__(self, trace, recorded, seed):
        self.job, self.reader = RecordedJob(trace, recorded, seed), None
        found = LiveWindows(RecordedJob(trace, recorded, seed))
        self.told, _ = found.begin()
        self.reader, self.last_us, self.plan = found, 0.0, None
        n = len(found.profiles)
        self.width = SLOTS
        self.n_slots, self.mask = np.array([n]), np.zeros((1, SLOTS, N_CONFIGS), bool)
        self.mask[0, :n], self.mask[0, n:, 0] = self.told.mask, True
        places = [*range(n), *[0] * (SLOTS - n)]
        prints = [found.profiles[i].fingerprint for i in places]
        own = np.array([int(p.own_pair[0]) for p in prints])
        share = np.array([float(p.share[0]) for p in prints])
        func = np.array([int(p.func[0]) for p in prints])
        self.fingerprint = SimpleNamespace(
            vector=lambda: np.concatenate([p.vector() for p in prints]), share=share, own_pair=own, func=func
        )
        self.calls = np.zeros((1, SLOTS))
        self.which = np.zeros(1, int)
        self.works = SimpleNamespace(replicated=np.zeros(1, bool))
        self.noise = SimpleNamespace(calls=lambda us, n, rng: np.full((1, SLOTS), np.nan))

    def __len__(self):
        return 1

    def step_us(self, configs, rows=None, few=None):
        return np.array([self.last_us]), np.full((1, SLOTS), np.nan)

    def advance(self, n_steps, rng):
        """The recording says itself when a table is in force."""

    def window(self, configs, counted, rng, few, turns, limit_us):
        plan = self.plan
        if plan.turns:
            return self.in_turns(plan, configs)
        window = self.job.window(
            self.reader.decisions(configs[0, : len(plan.configs)]), plan.n_steps, plan.discard
        )
        self.last_us = 1e3 * float(window.durations_ms[0])
        events, us = self.job.take_events(), np.full((1, SLOTS), np.nan)
        events = events[events["step"].isin(window.steps)] if len(events) else events
        us[0, : len(self.reader.profiles)] = self.reader._calls(events)
        if plan.kind == "profile":
            us[0, : len(self.told.call_us)] = self.told.call_us
        step_us = np.full((1, int(counted[0])), self.last_us)
        too_slow = np.flatnonzero(step_us[0] > limit_us[0])
        step_us[0, too_slow[1:]] = np.nan  # the first one is the last
        return step_us, us

    def in_turns(self, plan, configs):
        self.job.confirm(self.reader.decisions(plan.others))
        decisions = self.reader.decisions(configs[0, : len(plan.configs)])
        found = self.job.alternate(decisions, plan.n_steps, plan.turns, plan.discard, plan.limit_ms)
        self.job.take_events()
        step_us = np.full((1, plan.discard + plan.n_steps), np.nan)
        if plan.discard:
            step_us[0, : plan.discard] = 1e3 * found.others_ms / plan.discard
        step_us[0, plan.discard : plan.discard + len(found.steps)] = 1e3 * found.durations_ms
        self.last_us = 1e3 * found.current_ms
        return step_us, np.full((1, SLOTS), np.nan)


class Simulated(SimWindows):
    def measure(self, rows, plans):
        self.jobs.plan = plans[0]
        return super().measure(rows, plans)


class Sim(SimEnv):
    def __init__(self, trace, recorded):
        super().__init__()
        self.trace, self.recorded = trace, recorded

    def open(self):
        jobs = Jobs(self.trace, self.recorded, int(self.np_random.integers(2**31)))
        return OneJob(Simulated(jobs, self.np_random), self.config.profile_steps)


# -- the episode -------------------------------------------------------------------------------------------------------


def episode(env, policy, seed):
    """[(observation, reward, over, info)] of an episode, and the windows that were measured."""
    observation, info = env.reset(seed=seed)
    windows, measure = [], env.windows.measure

    def noted(plan):
        windows.append((plan, measure(plan)))
        return windows[-1][1]

    env.windows.measure = noted
    story, over = [(observation, 0.0, False, info)], False
    while not over:
        action, _ = policy.predict(observation)
        observation, reward, over, _, info = env.step(action)
        story.append((observation, reward, over, info))
    return story, windows


def test_all_backends_play_one_recorded_episode_alike(trace, folder, monkeypatch):
    monkeypatch.setattr(live, "POLL_S", 0.0)
    recorded = replay.load(trace)
    job = Told(folder, trace, recorded, seed_of(3), monkeypatch)
    played = {
        "recorded": episode(ReplayEnv(trace), ExpectedImprovement(), 3),
        "live": episode(LiveEnv(job), ExpectedImprovement(), 3),
        "simulated": episode(Sim(trace, recorded), ExpectedImprovement(), 3),
    }
    assert job.audit.calls_checked > 100 and job.audit.mismatches == 0
    story, windows = played["recorded"]
    kinds = {plan.kind for plan, _ in windows}
    assert {"search", "table", "trial", "watch"} <= kinds and len(story) > 8 and story[-1][3]["table"].any()
    assert {plan.discard for plan, _ in windows} >= {0, 1}  # windows with a switch and without
    assert any(len(seen.step_ms) < plan.n_steps for plan, seen in windows)  # one was given up
    for name in ("live", "simulated"):
        other, other_windows = played[name]
        assert len(other) == len(story) and len(other_windows) == len(windows)
        for (plan, seen), (other_plan, other_seen) in zip(windows, other_windows, strict=True):
            assert (plan.kind, plan.n_steps, plan.discard, plan.turns, seen.turns) == (
                other_plan.kind,
                other_plan.n_steps,
                other_plan.discard,
                other_plan.turns,
                other_seen.turns,
            )
            assert seen.billed == other_seen.billed and seen.billed_ms == pytest.approx(
                other_seen.billed_ms, rel=1e-6
            )
            assert seen.step_ms == pytest.approx(other_seen.step_ms, rel=1e-6)
            assert seen.call_us == pytest.approx(other_seen.call_us, rel=1e-6, nan_ok=True)
        # The simulated windows are the record's to the last digit. A ring holds whole nanoseconds, of steps of 2 ms and
        # of calls of 50 us: over a hundred turns the belief differs by 3e-6 of the step, which is 6e-4 in the unit of
        # the most finely scaled figure, ``worth``, and a hundredth of a step of a reward that counts 20,000.
        close = 1e-3 if name == "live" else 1e-6
        for (observation, reward, over, info), (o, r, v, i) in zip(story, other, strict=True):
            assert (
                observation == pytest.approx(o, abs=close)
                and r == pytest.approx(reward, rel=5e-5, abs=1e-4)
                and over == v
            )
            assert set(info) == set(i)
            assert (info["action_mask"] == i["action_mask"]).all() and (info["table"] == i["table"]).all()
            assert (info["slot"], info["masked"], info["steps"]) == (i["slot"], i["masked"], i["steps"])
            assert info["lost"] == pytest.approx(i["lost"], rel=5e-6, abs=1e-4)


def test_a_table_for_the_ranks_is_what_was_decided(trace, folder, monkeypatch):
    """The stand-in reads what ``live.Job`` published, and only then answers."""
    monkeypatch.setattr(live, "POLL_S", 0.0)
    job = Told(folder, trace, replay.load(trace), 0, monkeypatch)
    windows = LiveWindows(job)
    told, _ = windows.begin()
    configs = np.array([int(np.flatnonzero(row)[-1]) for row in told.mask])
    decisions = windows.decisions(configs)
    job.window(decisions, 3)
    assert decode_table(folder.table.read()[1]).rules == Table.of(1, decisions).rules
