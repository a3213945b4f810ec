"""The base class of a connection, with everything that its links need: the peer's rights, budget, limits and output.

The rest of a connection is in `gateway.amqp.connection`, which imports the links.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import msgspec

from flowcontrol.budget import ConnectionBudget
from gateway.kafka.cluster.topic_info import TopicInfo
from gateway.kafka.contracts import Owner, Result
from gateway.kafka.publish.sender_partitions import Places, RememberedSender
from gateway.limits.rate_pauses import CreditPause
from gateway.net.connected_client import ConnectedClient
from gateway.runtime.audited import audit, where_of
from gateway.security.rights.authorization import Grant
from gateway.views.pauses import SLOW_READER, Pause, pauses
from mapping.amqp.addresses import AddressError, TargetAddress, parse_target
from mapping.amqp.incoming import AmqpDestination, gateway_headers
from protocols.amqp.connection import Connection
from protocols.amqp.engine import Engine
from protocols.amqp.links import Link
from protocols.amqp.outcomes import UNAUTHORIZED_ACCESS, Error

WRITE_NOW: Final = 64 * 1024  # bytes sent in one turn of the loop before a write: limits the engine's buffer


class Peer(ConnectedClient, Owner):
    """The client at the other end of the links; a `contracts.Owner`."""

    protocol = "amqp"

    def __init__(
        self,
        connection: Connection,
        budget: ConnectionBudget,
        places: Places,
        wall_clock: Callable[[], int],
        *,
        in_order: bool,
    ) -> None:
        """`places` assigns partitions to all senders; `wall_clock` returns epoch milliseconds.

        `in_order`: all links of the peer are one sender, else each link is one.
        """
        super().__init__()
        self.budget: ConnectionBudget = budget  # kept by the publisher
        self.crediting: CreditPause | None = None  # the rate limit of messages from the peer; None: unlimited
        self.grant: Grant  # the peer's rights; set with its open
        self.quiescing = False  # the gateway is stopping, and no more credit is granted
        self.now_ms = wall_clock
        self._connection = connection
        self._places = places
        self._in_order = in_order
        self._sender: RememberedSender | None = None  # of all links, if they are one sender; created with the first
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._written = 0

    @property
    def engine(self) -> Engine:
        """The AMQP layer."""
        return self._connection.engine

    @property
    def paused(self) -> Pause | None:
        """The reason why `can_send` is False."""
        if not self.pump.writable:
            return pauses.since(SLOW_READER, self.pump)
        reason = None if self.sending is None else self.sending.reason
        return None if reason is None else pauses.since(reason, self.sending)

    def sender(self, link: Link) -> RememberedSender:
        """Return the sender for `link`, whose records without a key share a partition (docs/adr/0098).

        A client that connects again with its container-id, and attaches a link of the same name, has the same sender.
        """
        assert self.identity is not None
        if not self._in_order:
            return self._places.sender(self.identity.name, self.client_id, link.name)
        if self._sender is None:
            self._sender = self._places.sender(self.identity.name, self.client_id)
        return self._sender

    def sender_ended(self, sender: RememberedSender) -> None:
        """Release the sender of a link that has ended; one of all links stays for the next one."""
        if sender is not self._sender:
            sender.leave()

    def leave_sender(self) -> None:
        """Release the sender of all links; the connection has ended."""
        if self._sender is not None:
            self._sender.leave()

    def target(self, address: str | None) -> TargetAddress:
        """Parse a target address, and add the tenant's prefix to its topic (`mapping.tenants`). Raises AddressError."""
        target, names = parse_target(address), self.grant.names
        whole = names.topic(target.topic)
        if not names.has(whole):
            raise AddressError(UNAUTHORIZED_ACCESS, f"no right to publish to {target.topic}")
        return target if whole == target.topic else msgspec.structs.replace(target, topic=whole)

    def destination(self, address: str, parsed: TargetAddress, info: TopicInfo) -> AmqpDestination:
        """Return the destination for messages that are sent to `address`."""
        assert self.identity is not None
        return AmqpDestination(
            topic=parsed.topic,
            address_bytes=address.encode(),
            partition=parsed.partition,
            key=parsed.key,
            user=self.identity.name,
            headers=gateway_headers(self.client_id),
        )

    def wrote(self, size: int) -> None:
        """Schedule the write of `size` sent bytes for the end of this turn, or write now if a lot was sent in it."""
        self._written += size
        if self._written >= WRITE_NOW:
            self._written = 0
            self.pump.flush()
        elif not self.pump.flushing:
            self.pump.flush_soon()

    def flush_soon(self) -> None:
        """Write at the end of this turn of the loop, unless the socket is closed."""
        self.pump.flush_soon()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task that is cancelled when the connection ends."""
        task = self.pump.spawn(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    def audit_denied(self, what: str, on: str, reason: str) -> None:
        """Write an audit line about a missing right."""
        if audit.enabled and self.identity is not None:
            audit.denied(where_of("amqp", self.pump, self.client_id), self.identity.name, what, on, reason)

    @abc.abstractmethod
    def detach(self, link: Link, error: Error) -> None:
        """Detach a link with an error."""

    @abc.abstractmethod
    def broken(self, error: Exception, tokens: Sequence[Any]) -> None:
        """End the connection after a bug in `settle`; see `gateway.kafka.contracts.Owner`."""

    @abc.abstractmethod
    def settle(self, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        """Settle messages after Kafka's answer; see `gateway.kafka.contracts.Owner`."""
