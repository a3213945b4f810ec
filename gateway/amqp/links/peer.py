"""What a link needs of its connection: who is at its other end, and how that is told something.

`gateway.amqp.connection`, which imports the links, has the rest of a connection.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import msgspec

from flowcontrol.budget import ConnectionBudget
from gateway.audit.trail import audit, where_of
from gateway.flow import subject
from gateway.kafka.cluster.topic_info import TopicInfo
from gateway.kafka.contracts import Result
from gateway.kafka.publish.sender_partitions import Places, Sender
from gateway.limits.brakes import CreditPause, SendingPause
from gateway.net.pump import Pump
from gateway.pauses import SLOW_READER, Pause, pauses
from gateway.security.authorization import Grant
from gateway.security.identity import Identity
from mapping.amqp.addresses import AddressError, TargetAddress, parse_target
from mapping.amqp.incoming import Destination, gateway_headers
from protocols.amqp.connection import Connection
from protocols.amqp.engine import Engine
from protocols.amqp.links import Link
from protocols.amqp.outcomes import UNAUTHORIZED_ACCESS, Error

WRITE_NOW: Final = 64 * 1024  # bytes sent in one turn before they are written: bounds what waits inside the engine


class Peer(abc.ABC):
    """Who is at the other end of a link; a `contracts.Owner`."""

    def __init__(
        self, connection: Connection, budget: ConnectionBudget, places: Places, wall_clock: Callable[[], int]
    ) -> None:
        """`places`: of all who send; `wall_clock`: epoch milliseconds."""
        self.pump: Pump
        self.budget = budget  # what the connection has in flight; the publisher counts it
        # What its credit waits for, and what it is sent; None: any amount.
        self.crediting: CreditPause | None = None
        self.sending: SendingPause | None = None
        self.grant: Grant  # what the peer may do; there from its open on
        self.container_id = ""  # its name for itself; "" until its open
        self.quiescing = False  # no more credit is granted: the gateway is stopping
        self.gone = False  # the socket is gone
        self.now_ms = wall_clock
        self._connection = connection
        self._places = places
        self._identity: Identity | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._written = 0

    @property
    def engine(self) -> Engine:
        """The AMQP layer."""
        return self._connection.engine

    @property
    def alive(self) -> bool:
        """Whether the peer can be told anything."""
        return not self.gone and not self._connection.closing

    @property
    def takes_more(self) -> bool:
        """Whether its socket's buffer is below its mark, and it owes nothing to a limit."""
        return self.pump.writable and (self.sending is None or self.sending.is_open)

    @property
    def paused(self) -> Pause | None:
        """Why it does not."""
        if not self.pump.writable:
            return pauses.since(SLOW_READER, self.pump)
        reason = None if self.sending is None else self.sending.reason
        return None if reason is None else pauses.since(reason, self.sending)

    @property
    def subject(self) -> str:
        """What it is called where pauses are told; see `gateway.flow.Flowing`."""
        return subject("amqp", self.container_id, self.pump.peer)

    @property
    def principal(self) -> str | None:
        """Its name; None before it has logged in. See `Publisher.submit`."""
        return None if self._identity is None else self._identity.name

    def sender(self, link: Link) -> Sender:
        """Who sends on `link`: the same whenever the same peer comes back with a link of this name."""
        assert self._identity is not None
        return self._places.sender(self._identity.name, self.container_id, link.name)

    def target(self, address: str | None) -> TargetAddress:
        """Where the peer sends to by an address, with the whole topic (`mapping.tenants`). Raises AddressError."""
        target, names = parse_target(address), self.grant.names
        whole = names.topic(target.topic)
        if not names.has(whole):
            raise AddressError(UNAUTHORIZED_ACCESS, f"no right to publish to {target.topic}")
        return target if whole == target.topic else msgspec.structs.replace(target, topic=whole)

    def destination(self, address: str, parsed: TargetAddress, info: TopicInfo) -> Destination:
        """Where messages go that are sent to `address`."""
        assert self._identity is not None
        return Destination(
            topic=parsed.topic,
            address_bytes=address.encode(),
            partition=parsed.partition,
            key=parsed.key,
            user=self._identity.name,
            headers=gateway_headers(self.container_id),
            before_ms=info.before_ms,
            after_ms=info.after_ms,
            partitions=info.partitions,
        )

    def wrote(self, size: int) -> None:
        """Something was sent: write it with what else is sent in this turn, or at once when that is much."""
        self._written += size
        if self._written >= WRITE_NOW:
            self._written = 0
            self.pump.flush()
        elif not self.pump.flushing:
            self.pump.flush_soon()

    def flush_soon(self) -> None:
        """Write at the end of this turn of the loop."""
        if not self.gone:
            self.pump.flush_soon()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin what ends with the connection at the latest."""
        task = self.pump.spawn(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    def audit_denied(self, what: str, on: str, reason: str) -> None:
        """The peer may not do something that it wanted to."""
        if audit.enabled and self._identity is not None:
            audit.denied(where_of("amqp", self.pump, self.container_id), self._identity.name, what, on, reason)

    @abc.abstractmethod
    def detach(self, link: Link, error: Error) -> None:
        """End a link from our side."""

    @abc.abstractmethod
    def settle(self, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        """Kafka's answer for messages of this connection; see `gateway.kafka.contracts.Owner`."""
