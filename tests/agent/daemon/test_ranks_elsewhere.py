"""A summary says how many ranks of a communicator other hosts record: no tuner compares these."""

from types import SimpleNamespace

from dynamiccl.agent.daemon.summarise import _ranks_elsewhere
from dynamiccl.traces.records import Communicator


def elsewhere(*comms):
    found = {number: Communicator(number, n, 2, "", ranks) for number, (n, ranks) in enumerate(comms)}
    return _ranks_elsewhere(SimpleNamespace(assembler=SimpleNamespace(comms=found)))


def test_ranks_that_are_not_recorded_here():
    assert elsewhere((2, {0: 11})) == 1
    assert elsewhere((2, {0: 11, 1: 12}), (16, {0: 11, 1: 12})) == 14


def test_none_where_all_are_here_or_no_communicator_is_known():
    assert elsewhere((2, {0: 11, 1: 12})) == elsewhere() == 0
