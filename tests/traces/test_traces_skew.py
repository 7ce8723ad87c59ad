"""The time of a collective: from the last rank's start where all ranks are known, and never by clocks that disagree."""

import numpy as np
import pandas as pd
import pytest
from dynamiccl.traces.assemble import EVENT_COLUMNS, complete
from dynamiccl.traces.queries.skew import OWN, RANKS, durations, label

CLOCK = 1_763_719_000_000_000_123  # beyond what a float64 holds exactly


def events(*calls, n_ranks=3, func="all_gather", **more):
    """One row per (seq, rank, start, end) in ns after CLOCK; None: not sampled."""
    rows = [
        {
            **{
                "seq": seq,
                "comm_id": 7,
                "rank": rank,
                "n_ranks": n_ranks,
                "n_nodes": 1,
                "func": func,
                "n_bytes": 1024,
            },
            **{
                "dtype": "int8",
                "algo": "ring",
                "proto": "ll",
                "n_channels": 2,
                "table_generation": 0,
                "step": 3,
            },
            **{"enqueue_ns": seq, "pid": rank, **more},
            **{
                "start_ns": None if start is None else CLOCK + start,
                "end_ns": None if start is None else CLOCK + end,
            },
        }
        for seq, rank, start, end in calls
    ]
    frame = pd.DataFrame({n: pd.Series([r[n] for r in rows], dtype=object) for n in rows[0]})
    return complete(frame.assign(captured=False, asked_bytes=0), EVENT_COLUMNS)


def told(frame):
    found = durations(frame)
    return found["us"].tolist(), found["timed_by"].tolist()


LATE = [(1, 0, 0, 9_000), (1, 1, 2_000, 9_001), (1, 2, 6_000, 9_003)]


def test_waiting_for_the_last_rank_does_not_count():
    assert told(events(*LATE)) == ([3.003] * 3, [RANKS] * 3)


def test_a_rank_that_is_not_known_or_not_sampled_leaves_each_its_own_start():
    assert told(events(*LATE[:2])) == ([9.0, 7.001], [OWN] * 2)
    us, by = told(events(*LATE[:2], (1, 2, None, None)))
    assert us[:2] == [9.0, 7.001] and np.isnan(us[2]) and by == [OWN] * 3
    assert told(events(*LATE, n_ranks=16)) == ([9.0, 7.001, 3.003], [OWN] * 3)
    assert told(events(*LATE, n_ranks=0))[1] == [OWN] * 3  # a communicator that was never announced


def test_clocks_that_disagree_are_seen_and_not_compared():
    """Nobody is through with an all_gather before everybody has begun."""
    apart = [(1, 0, 0, 5_000), (1, 1, 90_000, 95_000), (1, 2, 1_000, 5_500)]
    assert told(events(*apart)) == ([5.0, 5.0, 4.5], [OWN] * 3)


def test_a_collective_that_need_not_wait_for_all_keeps_its_own_times():
    assert told(events(*LATE, func="broadcast"))[1] == [OWN] * 3


def test_calls_are_kept_apart():
    """The same number in another step is another call; twice the same rank in one call is no call at all."""
    two = pd.concat([events(*LATE), events(*[(s, r, a + 50, b + 60) for s, r, a, b in LATE], step=4)])
    assert durations(two.reset_index(drop=True))["us"].tolist() == [3.003] * 3 + [3.013] * 3
    assert set(told(pd.concat([events(*LATE), events(*LATE)], ignore_index=True))[1]) == {OWN}


def test_nothing_sampled_and_nothing_at_all():
    found = durations(events((1, 0, None, None)))
    assert found["us"].isna().all() and durations(events(*LATE).iloc[:0]).empty


def test_labels():
    assert label(pd.Series([RANKS] * 3)) == RANKS and label(pd.Series([], dtype=object)) == OWN
    assert label(pd.Series([OWN])) == OWN and label(pd.Series([OWN, RANKS])) == "all ranks 50%"


@pytest.mark.parametrize("delay_us", [0, 500, 5000])
def test_what_a_slot_costs_does_not_depend_on_how_late_a_rank_is(delay_us):
    from dynamiccl.traces.queries.costs import slot_costs

    rng = np.random.default_rng(0)
    calls = []
    for seq in range(40):
        late = int(rng.uniform(0, delay_us) * 1000)
        calls += [(seq, 0, 0, late + 100_000), (seq, 1, late, late + 100_000)]
    (cost,) = slot_costs(events(*calls, n_ranks=2), {0}, set()).to_dict("records")
    assert cost["default_us"] == pytest.approx(100.0) and cost["timed_by"] == RANKS
