"""A made-up ZeRO-3 run on two of 16 ranks, for the tests of what reads traces: known costs, known decisions.

Its times are stretched, as early releases wrote them: they are read unstretched.
"""

import numpy as np
import pandas as pd
from dynamiccl.agent.daemon.account import row_of
from dynamiccl.traces.assemble import COMM_COLUMNS, EVENT_COLUMNS, OFFER_COLUMNS, STEP_COLUMNS, complete
from dynamiccl.traces.files import Trace
from dynamiccl.traces.records import Decision, Rule, Slot, Table, size_class
from dynamiccl.traces.writer import TraceWriter

COMM = 0xC0FFEE0123456789
CLOCK = 1_763_719_000_000_000_123
MIB = 1 << 20
LAYERS, LAYER_BYTES, ROOT_BYTES = 5, 8 * MIB, 2 * MIB
GATHER = Slot(16, 2, "all_gather", size_class(LAYER_BYTES))
SCATTER = Slot(16, 2, "reduce_scatter", size_class(LAYER_BYTES))
OWN = ("ring", "ll", 8)
FINAL = {GATHER: Decision("ring", "simple", 16), SCATTER: Decision("ring", "ll128", 16)}
#: Median microseconds of one call: (func, n_bytes) -> by (algo, proto, n_channels).
CALL_US = {
    ("all_gather", LAYER_BYTES): {OWN: 112.5, ("ring", "simple", 16): 62.5, ("ring", "ll128", 16): 87.5},
    ("reduce_scatter", LAYER_BYTES): {OWN: 125.0, ("ring", "ll128", 16): 75.0, ("ring", "simple", 8): 150.0},
    ("all_gather", ROOT_BYTES): {OWN: 37.5},
    ("reduce_scatter", ROOT_BYTES): {OWN: 40.0},
}
ORDER = (
    [("all_gather", ROOT_BYTES)]
    + [("all_gather", LAYER_BYTES)] * LAYERS
    + [("all_gather", LAYER_BYTES), ("reduce_scatter", LAYER_BYTES)] * (LAYERS - 1)
    + [("reduce_scatter", LAYER_BYTES), ("reduce_scatter", ROOT_BYTES)]
)
HEADER = {
    "cluster": "h100-2x8",
    "emulated": True,
    "bytes_scale": 64.0,
    "compute_scale": 8.0,
    "stage": 3,
    "nccl": "2.28.9",
}


class Job:
    """Runs steps under a table and keeps what the rings would have told."""

    def __init__(self, seed=0, sampled=0.5):
        self.rng = np.random.default_rng(seed)
        self.sampled = sampled
        self.events, self.steps = [], []
        self.seq = {"all_gather": 0, "reduce_scatter": 0}
        self.index, self.now, self.losses = 0, CLOCK, [5.5]

    def step(self, table):
        """One optimizer step; returns its time in ms."""
        rules = {(r.func, size_class(r.max_bytes)): r.decision for r in table.rules}
        timed = self.rng.random() < self.sampled
        began = self.now
        t = [began + 2_500, began + 2_500 + 375]  # the communication stream of each rank
        for func, n_bytes in ORDER:
            decision = rules.get((func, size_class(n_bytes)), Decision())
            ran = (decision.algo, decision.proto, decision.n_channels) if decision.algo else OWN
            cost = 1000 * CALL_US[func, n_bytes].get(ran, 100.0)
            compute = 18_750 if func == "all_gather" else 37_500
            for rank in (0, 1):
                start = int(t[rank] + compute * self.rng.uniform(0.9, 1.1))
                end = int(start + cost * self.rng.uniform(0.95, 1.05))
                t[rank] = end
                values = (
                    self.seq[func],
                    COMM,
                    rank,
                    16,
                    2,
                    func,
                    n_bytes,
                    "bfloat16",
                    *ran,
                    table.generation,
                )
                when = (start, end) if timed else (None, None)
                self.events.append((*values, start - 6_250, *when, self.index, 1000 + rank))
            t = [max(t)] * 2
            self.seq[func] += 1
        self.now = max(t) + 50_000
        self.losses.append(0.995 * self.losses[-1] + self.rng.normal(0, 0.01))  # what the job itself logs
        duration = self.now - began
        for rank in (0, 1):
            memory = (11 << 30, 80 << 30)
            row = (self.index, rank, self.now, duration, table.generation, *memory, 1000 + rank, timed, 2)
            self.steps.append(row)
        self.index += 1
        return duration / 1e6

    def window(self, table, n=4):
        return float(np.median([self.step(table) for _ in range(n)]))


def write_run(folder, *, search=12, final=8, seed=0, sampled=0.5, stop_early=False):
    """Write the trace of such a run into ``folder``; returns (summary, Trace). ``stop_early``: no final A/B."""
    job, default = Job(seed, sampled), Table(0)
    generation = 0
    with TraceWriter(folder, HEADER) as writer:

        def publish(decisions):
            nonlocal generation
            generation += 1
            table = Table.of(generation, decisions)
            writer.log("table", {"table": table})
            return table

        def log(slot, decision, previous, step_ms, default_ms, verdict, reason, phase):
            saving = 1 - step_ms / default_ms
            entry = {"index": log.n, "slot": slot, "decision": decision, "previous": previous}
            entry |= {
                "table": str(decision).replace("auto", "default"),
                "first_step": job.index - 4,
                "last_step": job.index - 1,
            }
            entry |= {"step_ms": step_ms, "default_ms": default_ms, "saving": saving, "verdict": verdict}
            writer.log("window", {**entry, "reason": reason, "generation": generation, "phase": phase})
            log.n += 1

        log.n = 0
        base = job.window(default, 6)
        log(None, Decision(), Decision(), base, base, "measured", "2 slots found", "profile")
        kept, trials = (
            {},
            [
                (GATHER, Decision("ring", "ll128", 16)),
                (GATHER, Decision("ring", "simple", 16)),
                (SCATTER, Decision("ring", "simple", 8)),
                (SCATTER, Decision("ring", "ll128", 16)),
            ],
        )
        for i in range(search):
            slot, decision = trials[i % len(trials)]
            base = job.window(publish({}), 2)
            step_ms = job.window(publish({**kept, slot: decision}))
            good = FINAL[slot] == decision
            previous = kept.get(slot, Decision())
            kept |= {slot: decision} if good else {}
            reason = "saves step time in 3 of 3 pairs" if good else ""
            verdict = "kept" if good else "rolled back"
            log(slot, decision, previous, step_ms, base, verdict, reason, "search")
        ratios = []
        for _ in range(0 if stop_early else final):
            base = job.window(publish({}))
            step_ms = job.window(publish(kept))
            ratios.append(base / step_ms)
            log("all slots", "auto", "auto", step_ms, base, "measured", "", "verify")
        writer.write(frame(job.events, EVENT_COLUMNS), frame(job.steps, STEP_COLUMNS))
        writer.write_whole("comms", frame([(COMM, 16, 2, "dp", r, 1000 + r) for r in (0, 1)], COMM_COLUMNS))
        writer.write_whole("offers", frame(list(offers()), OFFER_COLUMNS))
    trace = Trace.read(folder)
    if stop_early:
        return {"cluster": "h100-2x8", "emulated": True, "speedup": None, "decisions": []}, trace
    return summary_of(trace, ratios, job), trace


def summary_of(trace, ratios, job):
    windows = trace.windows.query("phase == 'verify'")
    spread = float(np.std(ratios) / len(ratios) ** 0.5)
    decisions = [
        row_of(slot, d) | {"why": f"step time {saved} ms shorter than NCCL's own choice in 3 of 3 pairs"}
        for (slot, d), saved in zip(FINAL.items(), (3.6, 2.0), strict=True)
    ]
    return {
        **{k: HEADER[k] for k in ("cluster", "emulated", "bytes_scale", "compute_scale", "stage")},
        "n_processes": 2,
        "n_ranks": 16,
        "steps": job.index,
        "loss_first": job.losses[1],
        "loss_last": job.losses[-1],
        "default_step_ms": float(windows["default_ms"].median()),
        "tuned_step_ms": float(windows["step_ms"].median()),
        "speedup": float(np.mean(ratios)),
        "speedup_ci95": [float(np.mean(ratios)) - 2 * spread, float(np.mean(ratios)) + 2 * spread],
        "aa_speedup_ci95": [0.994, 1.005],
        "kept": True,
        "compared": "A",
        "in_force": "A",
        "tables": {"A": decisions},
        "windows": len(trace.windows),
        "decisions": decisions,
        "consistency": {"calls_checked": len(trace.events) // 2, "mismatches": 0},
        "trace": str(trace.folder),
        "report": None,
    }


def offers():
    for func, n_bytes in CALL_US:
        costs = np.full((7, 3), -1, np.float32)
        costs[1] = [CALL_US[func, n_bytes][OWN], 140, 160]
        yield COMM, func, n_bytes, "ring", "ll", 1, costs.ravel()


def frame(rows, columns):
    told = pd.DataFrame(rows, columns=list(columns)[: len(rows[0])])
    return complete(told.reindex(columns=list(columns), fill_value=0), columns)


def rule(slot):
    return Rule.of(slot, FINAL[slot])
