"""What a connection tells of its flow: what is granted, what is on the way, what is paused and why.

The protocols' connections make these structs when somebody asks (`gateway.observe.flow`); nothing is kept for it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Final, Literal, Protocol, TypeVar

import msgspec

from flowcontrol.budget import Budget
from gateway.pauses import Pause

NAME: Final = 128  # characters of a name that a client has chosen
WINDOWS: Final = 10  # of a connection that are told: those with the most on the way
LOOKED_AT: Final = 5_000  # windows of a connection, at most

Item = TypeVar("Item")


class Window(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one side may have on the way: an AMQP link, a direction of MQTT, a subscription of a WebSocket."""

    name: str  # the link's, the subscription's
    to_kafka: bool  # the client sends; else it receives
    topic: str  # in Kafka; "" where there are several
    granted: int  # how many messages the sender may have on the way altogether
    outstanding: int  # of these, how many it has not sent yet
    unsettled: int  # sent, and without an outcome
    paused: Pause | None = None  # what the next message waits for
    window: int = 0  # how many it may have on the way at most, as found by now; 0: as `granted`


class BudgetFlow(msgspec.Struct, frozen=True):
    """A budget: bytes and records that were submitted to Kafka and are not answered, and their limits.

    Of `outgoing`: bytes on their way to clients, and the receivers that hold them.
    """

    name: str
    bytes: int
    bytes_limit: int
    records: int
    records_limit: int
    open: bool


class ConnectionFlow(msgspec.Struct, kw_only=True):
    """One connection."""

    protocol: Literal["mqtt", "amqp", "http"]
    client: str = ""  # the client id, the container id; "" where there is none
    peer: str  # its address
    principal: str  # who has logged in
    subject: str  # what `gateway.pauses` calls it
    bytes: int = 0  # submitted to Kafka and not answered
    bytes_limit: int = 0  # of these
    records: int = 0  # likewise
    unwritten: int  # bytes that wait in the socket's write buffer
    windows: list[Window]  # those with the most on the way
    windows_total: int  # how many there are
    paused: list[Pause] = []  # why it is paused, and since when; set by who asks


class Flowing(Protocol):
    """A connection that can be asked; the handler of a pump is one."""

    @property
    def subject(self) -> str:
        """The protocol, the client's name and address: what pauses are told of."""
        ...

    @property
    def load(self) -> int:
        """Bytes that were submitted to Kafka and are not answered: quick, for choosing who is asked more."""
        ...

    def flow(self) -> ConnectionFlow | None:
        """Everything; None before the login."""
        ...


def shown(name: str) -> str:
    """A name that a client has chosen, as far as it is shown."""
    return name if len(name) <= NAME else f"{name[: NAME - 1]}…"


def subject(protocol: str, client: str, peer: str) -> str:
    """What a connection is called where pauses are told."""
    return f"{protocol} {shown(client)} {peer}" if client else f"{protocol} {peer}"


def budget_flow(name: str, budget: Budget) -> BudgetFlow:
    """A budget as it is now."""
    return BudgetFlow(name, budget.bytes, budget.bytes_limit, budget.records, budget.records_limit, budget.gate.is_open)


def fullest(items: Iterable[Item], on_the_way: Callable[[Item], int], most: int = WINDOWS) -> list[Item]:
    """Those with the most on the way, among the first `LOOKED_AT`."""
    return heapq.nlargest(most, itertools.islice(items, LOOKED_AT), on_the_way)
