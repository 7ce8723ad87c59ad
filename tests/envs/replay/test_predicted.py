"""Times that a recording predicts: those of one size of communicator say nothing of another's."""

from dataclasses import replace

import pandas as pd
import pytest
from dynamiccl.envs.replay.decisions import load
from dynamiccl.envs.replay.predicted import Times
from synthetic_trace import GATHER, LAYER_BYTES, write_run


def test_communicators_of_two_sizes_are_predicted_each_by_its_own_calls(tmp_path):
    """Tensor parallelism in pairs beside 16 ranks of FSDP: the same bytes, other networks. Before: one median."""
    trace = write_run(tmp_path / "trace", search=4, final=2)[1]
    profiles = load(trace).profiles
    wide = next(p for p in profiles if p.slot == GATHER)
    narrow = replace(wide, slot=replace(GATHER, n_ranks=2, n_nodes=1))
    events = trace.events
    in_pairs = events.assign(n_ranks=2, n_nodes=1, comm_id=1)
    in_pairs["end_ns"] = in_pairs["start_ns"] + (in_pairs["end_ns"] - in_pairs["start_ns"]) // 10
    both = pd.concat([in_pairs, events], ignore_index=True)
    own = ("ring", "ll")
    alone = Times(trace, events, [wide]).us(GATHER, own, LAYER_BYTES, 8)
    times = Times(trace, both, [wide, narrow])
    assert times.us(GATHER, own, LAYER_BYTES, 8) == pytest.approx(alone)
    assert times.us(narrow.slot, own, LAYER_BYTES, 8) < 0.3 * alone
