"""Control calls over all ranks: the leader sends a call, every rank runs its handler, and each answers."""

from __future__ import annotations

import pickle
from typing import Any

from torchweave.distributed.worker_group import MessageKind, WorkerGroup
from torchweave.engine.control.errors import Fault, fault_of
from torchweave.engine.control.rank import Rank, RankAnswer, answer


class RankCalls:
    """Runs rank handlers of control calls on all ranks, while no step is in flight.

    Args:
        rank: the leader.
        worker_group: the other ranks; None: there are none.
    """

    def __init__(self, rank: Rank, worker_group: WorkerGroup | None = None) -> None:
        self._rank, self._worker_group = rank, worker_group

    def __call__(self, name: str, arguments: dict[str, Any]) -> list[RankAnswer]:
        """Run the rank handler of `name` with arguments; returns the answers by rank.

        Raises:
            RankFailure: a rank has ended.
        """
        group = self._worker_group
        if group is None:
            return [answer(self._rank, name, arguments)]
        try:
            message = pickle.dumps((name, arguments), 5)
        except Exception as error:
            why = f"The arguments of {name} cannot be sent to the ranks ({error}); give plain data."
            return [RankAnswer(fault=Fault(why, "invalid"))]
        group.send(MessageKind.CALL, message)
        own = answer(self._rank, name, arguments)
        return [own, *(RankAnswer(*pickle.loads(message)) for message in group.answers(MessageKind.ANSWER))]


def answer_message(rank: Rank, message: bytes) -> bytes:
    """Run the call that the leader has sent; returns the message of its answer."""
    result = answer(rank, *pickle.loads(message))
    try:
        return pickle.dumps(tuple(result), 5)
    except Exception as error:  # of a result that cannot be pickled
        return pickle.dumps((None, fault_of(error)), 5)
