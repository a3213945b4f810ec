"""What a link needs of its connection; a Protocol, because `gateway.amqp.connection` imports the links."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

from flowcontrol.budget import ConnectionBudget
from gateway.kafka.cluster.topic_info import TopicInfo
from gateway.kafka.contracts import Owner
from gateway.kafka.publish.sender_partitions import Sender
from gateway.net.pump import Pump
from gateway.security.authorization import Grant
from mapping.amqp.addresses import TargetAddress
from mapping.amqp.incoming import Destination
from protocols.amqp.engine import Engine
from protocols.amqp.links import Link
from protocols.amqp.outcomes import Error


class Peer(Owner, Protocol):
    """Who is at the other end of a link."""

    pump: Pump
    budget: ConnectionBudget  # what the connection has in flight; the publisher counts it
    grant: Grant  # what the peer may do
    container_id: str  # its name for itself
    quiescing: bool  # no more credit is granted: the gateway is stopping
    gone: bool  # the socket is gone

    @property
    def engine(self) -> Engine:
        """The AMQP layer."""

    @property
    def alive(self) -> bool:
        """Whether the peer can be told anything."""

    @property
    def principal(self) -> str | None:
        """Its name; None before it has logged in."""

    def now_ms(self) -> int:
        """The wall clock, epoch milliseconds."""

    def sender(self, link: Link) -> Sender:
        """Who sends on `link`: the same whenever the same peer comes back with a link of this name."""

    def destination(self, address: str, parsed: TargetAddress, info: TopicInfo) -> Destination:
        """Where messages go that are sent to `address`."""

    def wrote(self, size: int) -> None:
        """So many bytes were sent: they are written soon, or at once when much has come together."""

    def flush_soon(self) -> None:
        """Write at the end of this iteration of the event loop."""

    def detach(self, link: Link, error: Error) -> None:
        """End a receiver's link from our side."""

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin what ends with the connection at the latest."""
