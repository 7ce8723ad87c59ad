"""What a part of the protocol is sent, made of the words that ``protocol_model.py`` keeps in its worlds."""

from __future__ import annotations

from typing import Any

from dynamiccl.envs.nccl.agreement import protocol
from dynamiccl.envs.nccl.agreement.protocol import CommVote, Decision, Vote
from protocol_scopes import Scope

MARKS = {16: 1}


def thawed(scope: Scope, number: int, request: Any, result: Any) -> Any:
    match request:
        case protocol.Limit():
            return _words(scope, result)
        case protocol.Gather():
            return [
                Vote(rank, number, scope.identity(rank), _words(scope, limits), "", full)
                for rank, limits, full in result
            ]
        case protocol.Settle() | protocol.Await():
            return result and Decision(result[0], dict(result[1]))
    return result


def _words(scope: Scope, limits: Any) -> dict[int, CommVote]:
    votes = {}
    for comm, limit, a_step, offset, plan, has, steps in limits:
        n_ranks = len(scope.members[comm])
        votes[comm] = CommVote(
            n_ranks, 1, limit, scope.pace(comm), MARKS, "", a_step, offset, plan, has, steps
        )
    return votes
