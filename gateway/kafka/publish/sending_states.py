"""Where the next batch of a partition queue is on its way to Kafka: the states of `partition_queue.PartitionQueue`."""

from __future__ import annotations

import enum
from typing import Final


class Sending(enum.Enum):
    """What a partition queue does with its next batch."""

    __hash__ = object.__hash__  # Enum hashes the name, in Python, at each look-up

    IDLE = enum.auto()  # no record waits, and nothing is in flight
    OFFERED = enum.auto()  # the batch waits for the next request to the partition's leader
    SENT = enum.auto()  # it is in a request of a turn
    ALONE = enum.auto()  # the queue's task sends it, and waits for its answer
    OVER = enum.auto()  # the partition no longer exists, or the gateway stops


class Step(enum.Enum):
    """What happens to the batch."""

    __hash__ = object.__hash__  # Enum hashes the name, in Python, at each look-up

    OFFER = enum.auto()  # the requests of the turn take the queue
    LEAVE = enum.auto()  # something is unusual
    EMPTY = enum.auto()  # what waited was withdrawn
    TAKE = enum.auto()  # the request is made
    STORE = enum.auto()  # Kafka says that the batch is stored
    FINISH = enum.auto()  # the task is done with all that was in flight
    END = enum.auto()  # all batches are taken out


class Act(enum.Enum):
    """What the queue must do at a step."""

    NOTHING = enum.auto()
    SETTLE = enum.auto()  # pass the result on to the records' owners
    START = enum.auto()  # start the task
    CANCEL = enum.auto()  # cancel the task
    FORGET = enum.auto()  # expect nothing from the requests any more


_S, _T, _A = Sending, Step, Act
TABLE: Final[dict[Sending, dict[Step, tuple[Act, Sending]]]] = {
    _S.IDLE: {
        _T.OFFER: (_A.NOTHING, _S.OFFERED),
        _T.LEAVE: (_A.START, _S.ALONE),
        _T.END: (_A.NOTHING, _S.OVER),
    },
    _S.OFFERED: {
        _T.TAKE: (_A.NOTHING, _S.SENT),
        _T.EMPTY: (_A.NOTHING, _S.IDLE),
        _T.LEAVE: (_A.START, _S.ALONE),
        _T.END: (_A.FORGET, _S.OVER),
    },
    _S.SENT: {
        _T.STORE: (_A.SETTLE, _S.IDLE),
        _T.LEAVE: (_A.START, _S.ALONE),
        _T.END: (_A.FORGET, _S.OVER),
    },
    _S.ALONE: {
        _T.FINISH: (_A.NOTHING, _S.IDLE),
        _T.END: (_A.CANCEL, _S.OVER),
    },
    _S.OVER: {  # a request that was in flight is answered later
        _T.STORE: (_A.NOTHING, _S.OVER),
        _T.LEAVE: (_A.NOTHING, _S.OVER),
        _T.END: (_A.NOTHING, _S.OVER),
    },
}
"""What to do and the next state. A step that a state does not have is a bug."""
