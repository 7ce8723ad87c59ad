"""Two groups of a job may have calls of one collective and size class: what is told of one is not told of the other."""

from dynamiccl.agent.report.why import _names
from dynamiccl.traces.queries.costs import RuleKey
from dynamiccl.traces.records import Slot


def test_a_row_names_the_group_that_it_is_of():
    """Before: rows were found by collective and size class, so both groups had the figures of the last one."""
    small, large = Slot(8, 1, "all_gather", 20), Slot(16, 2, "all_gather", 20)
    row = {"slot": str(small), "n_ranks": 8, "n_nodes": 1}
    assert _names(row, small) and not _names(row, large)


def test_a_rule_of_a_table_fits_the_calls_of_its_group():
    rule = RuleKey("all_gather", 2**19 + 1, 2**20, 8, 1, "ring/ll/8")
    cost = {"func": "all_gather", "n_bytes": 2**20, "n_ranks": 8, "n_nodes": 1}
    assert rule.fits(cost) and not rule.fits({**cost, "n_ranks": 16, "n_nodes": 2})
    assert rule._replace(n_ranks=0, n_nodes=0).fits({**cost, "n_ranks": 16})
