"""The flow of a connection for operators: what is granted, in flight and paused, and why.

The protocols' connections create these structs on request (`gateway.observe.flow`); nothing is stored for them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Final, Literal, Protocol, TypeVar

import msgspec

from flowcontrol.budget import Budget
from gateway.views.pauses import Pause

NAME: Final = 128  # characters shown of a client's name
WINDOWS: Final = 10  # windows shown per connection: those with the most in flight
LOOKED_AT: Final = 5_000  # windows inspected per connection

Item = TypeVar("Item")


class FlowWindow(msgspec.Struct, frozen=True, omit_defaults=True):
    """How much may be in flight: on an AMQP link, in a direction of MQTT, or on a WebSocket's subscription."""

    name: str  # of the link or subscription
    to_kafka: bool  # True: the client sends; False: it receives
    topic: str  # the Kafka topic; "" if there are several
    granted: int  # messages that may be in flight in total
    outstanding: int  # unused credit: of these, not sent yet
    unsettled: int  # sent, without an outcome
    paused: Pause | None = None  # why the next message waits
    window: int = 0  # the adaptive window's current size; 0: same as `granted`


class BudgetFlow(msgspec.Struct, frozen=True):
    """A budget: bytes and records that are in flight to Kafka, and their limits.

    For the budget `outgoing`: bytes in flight to clients, and the receivers that hold them.
    """

    name: str
    bytes: int
    bytes_limit: int
    records: int
    records_limit: int
    open: bool


class ConnectionFlow(msgspec.Struct, kw_only=True):
    """The flow of one connection (wire format)."""

    protocol: Literal["mqtt", "amqp", "http"]
    client: str = ""  # client id or container id; "" if there is none
    peer: str  # its address
    principal: str  # the authenticated name
    subject: str  # its name in `gateway.views.pauses`
    bytes: int = 0  # in flight to Kafka
    bytes_limit: int = 0  # limit of `bytes`
    records: int = 0  # in flight to Kafka
    unwritten: int  # bytes in the socket's write buffer
    windows: list[FlowWindow]  # those with the most in flight
    windows_total: int  # number of all windows
    paused: list[Pause] = []  # current pauses; set by `gateway.observe`


class Flowing(Protocol):
    """A connection that can report its flow, such as a pump's handler."""

    @property
    def subject(self) -> str:
        """Protocol, client name and address: the connection's name in `gateway.views.pauses`."""
        ...

    @property
    def load(self) -> int:
        """Bytes in flight to Kafka. Must be fast: it selects the connections whose `flow` is called."""
        ...

    def flow(self) -> ConnectionFlow | None:
        """Return the connection's flow; None before the login."""
        ...


def shown(name: str) -> str:
    """Shorten a client's name for display."""
    return name if len(name) <= NAME else f"{name[: NAME - 1]}…"


def subject(protocol: str, client: str, peer: str) -> str:
    """Return a connection's name in `gateway.views.pauses`."""
    return f"{protocol} {shown(client)} {peer}" if client else f"{protocol} {peer}"


def budget_flow(name: str, budget: Budget) -> BudgetFlow:
    """Return the current state of a budget."""
    return BudgetFlow(name, budget.bytes, budget.bytes_limit, budget.records, budget.records_limit, budget.gate.is_open)


def fullest(items: Iterable[Item], on_the_way: Callable[[Item], int]) -> list[Item]:
    """Return the items with the most in flight, of the first `LOOKED_AT`."""
    return heapq.nlargest(WINDOWS, itertools.islice(items, LOOKED_AT), on_the_way)
