"""Answering attaches: finding a link's topic, consumer group or node, and accepting or refusing the link.

Tasks answer attaches, because the topic, the group or the position may have to be looked up in Kafka. Meanwhile the
connection's other links work on, and the peer may detach or disconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from typing import Final

import msgspec

from flowcontrol.offsets import read_ledger
from gateway.amqp.answers import refusal
from gateway.amqp.filters import Filters, both
from gateway.amqp.links.incoming import IncomingLink
from gateway.amqp.links.outgoing import OutgoingLink
from gateway.amqp.links.peer import Peer
from gateway.amqp.links.relay import RelayLink
from gateway.amqp.nodes import Node
from gateway.amqp.services import AmqpServices
from gateway.amqp.sources import LinkSource, filters_of_node, resumed, source_of, subscription_of, supported
from gateway.amqp.transactions import CAPABILITIES as COORDINATOR_CAPABILITIES
from gateway.amqp.transactions import COMMAND_BYTES, Coordinator, Transaction
from gateway.kafka.contracts import Refused
from gateway.kafka.read.start_positions import AtOffset, AtOffsets, BeyondEnd, StartPosition
from gateway.views.pauses import CONNECTION_BUDGET, SHARE, pauses
from mapping.amqp.addresses import AddressError, TargetAddress
from mapping.outcomes import Outcome
from mapping.record import Received, is_topic_name
from protocols.amqp.connection import Connection
from protocols.amqp.links import Link, TerminusKind
from protocols.amqp.outcomes import (
    INVALID_FIELD,
    NOT_FOUND,
    NOT_IMPLEMENTED,
    PRECONDITION_FAILED,
    UNAUTHORIZED_ACCESS,
    Error,
)
from protocols.amqp.transactions import LOCAL_TRANSACTIONS

TARGET_CAPABILITIES: Final = ("queue", "topic", "temporary-queue", "temporary-topic")
"""To a sender they are all the same: its messages are stored."""
MAX_ATTACHES: Final = 256
"""Attaches of one connection that are answered concurrently: tasks that share their round trips to Kafka."""
NO_SENDERS: Final[dict[IncomingLink, None]] = {}  # shared by all connections without senders, to save memory
NO_RECEIVERS: Final[dict[OutgoingLink, None]] = {}
MAX_JOINS: Final = 16  # concurrent joins of consumer groups per connection: each starts a Kafka consumer


class AttachingPeer(Peer):
    """A connection with its links and its pending attaches."""

    def __init__(self, services: AmqpServices, connection: Connection) -> None:
        super().__init__(
            connection,
            services.publisher.budgets.connection(),
            services.places,
            services.wall_clock,
            in_order=services.config.ordered_by == "connection",
        )
        self.services = services  # shared by all connections
        self.transactions: dict[bytes, Transaction] = {}  # not discharged yet, by txn-id
        self.nodes: dict[Link, Node] = {}  # dynamic nodes by the link that created them
        self._incoming: dict[IncomingLink, None] = NO_SENDERS
        self._outgoing: dict[OutgoingLink, None] = NO_RECEIVERS
        self._attaches: AttachQueue | None = None  # created with the first attach

    def answer(self, link: Link) -> None:
        """Answer an attach in a task."""
        if self._attaches is None:
            self._attaches = AttachQueue()
        if self._attaches.add(link):
            self.start(self._attaches.answer(self))

    def add_sender(self, incoming: IncomingLink) -> None:
        """Register a link on which the peer sends; it is accepted next."""
        incoming.link.context = incoming
        if self._incoming is NO_SENDERS:
            self._incoming = {}
            self.budget.gate.subscribe(self._own_gate_changed)
        self._incoming[incoming] = None
        self.services.gates.senders += 1

    def _own_gate_changed(self, is_open: bool) -> None:
        """Start or end a pause of the whole connection; the effect on credit is in each link's share."""
        if is_open:
            pauses.end_all(self, CONNECTION_BUDGET, SHARE)
        else:
            reason = CONNECTION_BUDGET if self.budget.waits_for is None else SHARE
            pauses.begin(reason, self, self.subject)

    def add_receiver(self, outgoing: OutgoingLink) -> None:
        """Register a link on which the peer receives; it is accepted next."""
        outgoing.link.context = outgoing
        if self._outgoing is NO_RECEIVERS:
            self._outgoing = {}
        self._outgoing[outgoing] = None

    def refuse(self, link: Link, error: Error) -> None:
        """Refuse an attach, if the peer is still connected and has not detached."""
        self.services.counts.refused_links += 1
        if error.condition == UNAUTHORIZED_ACCESS:
            terminus = link.target if link.incoming else link.source
            what = "publish" if link.incoming else "subscribe"
            self.audit_denied(what, terminus.address or "", error.description)
        if not self.is_detached(link):
            self.engine.refuse_link(
                link, msgspec.structs.replace(error, description=self.grant.names.text(error.description))
            )

    def is_detached(self, link: Link) -> bool:
        """Whether the peer has detached or disconnected while its attach was being answered."""
        return not link.attached or self.left


class AttachQueue:
    """The unanswered attaches of one connection; one read may bring thousands."""

    __slots__ = ("_answering", "_joining", "_queued")

    def __init__(self) -> None:
        self._queued: OrderedDict[Link, None] = OrderedDict()
        self._answering = 0  # running `answer` tasks
        self._joining: asyncio.Semaphore | None = None

    @property
    def joining(self) -> asyncio.Semaphore:
        """The semaphore to hold while joining a consumer group."""
        if self._joining is None:
            self._joining = asyncio.Semaphore(MAX_JOINS)
        return self._joining

    def add(self, link: Link) -> bool:
        """Queue an attach; return whether to start one more task with `answer`."""
        self._queued[link] = None
        if self._answering >= MAX_ATTACHES:
            return False
        self._answering += 1
        return True

    def forget(self, link: Link) -> None:
        """Remove a link that has ended: a peer may attach and detach without end while Kafka does not answer."""
        self._queued.pop(link, None)

    async def answer(self, peer: AttachingPeer) -> None:
        """Answer queued attaches until none is left."""
        try:
            while self._queued and not peer.pump.closed:
                await peer.services.attaching.rest()
                if not self._queued:
                    break
                link, _ = self._queued.popitem(last=False)
                if peer.is_detached(link):
                    continue
                try:
                    await Attach(peer, link, self).answer()
                except Exception as error:  # a bug here closes only this connection, as in the pump
                    peer.pump.fail(error)
                if not peer.pump.closed:
                    peer.pump.flush()
        finally:
            self._answering -= 1


class Attach:
    """Answers one attach of a peer."""

    __slots__ = ("_link", "_peer", "_queue", "_services")

    def __init__(self, peer: AttachingPeer, link: Link, queue: AttachQueue) -> None:
        self._peer = peer
        self._services = peer.services
        self._link = link
        self._queue = queue

    async def answer(self) -> None:
        """Accept or refuse the link once its topic is known."""
        peer, link = self._peer, self._link
        try:
            terminus = link.target if link.incoming else link.source
            if terminus.kind is TerminusKind.COORDINATOR:
                self._make_coordinator()
            elif terminus.dynamic:
                await self._make_node(terminus.capabilities)
            elif link.incoming:
                await self._make_sender()
            else:
                await self._make_receiver()
        except AddressError as error:
            peer.refuse(link, error.error)
        except BeyondEnd as beyond:
            peer.refuse(link, Error(PRECONDITION_FAILED, str(beyond)))
        except Refused as refused:
            peer.refuse(link, refusal(refused))

    def _make_coordinator(self) -> None:
        link = self._link
        wanted = link.target.capabilities
        if wanted and not set(wanted) & set(COORDINATOR_CAPABILITIES):
            raise AddressError(NOT_IMPLEMENTED, f"only {LOCAL_TRANSACTIONS} are supported")
        link.context = Coordinator(self._services.coordinators, self._peer, link, self._peer.transactions)
        self._peer.engine.accept_link(link, max_message_bytes=COMMAND_BYTES, capabilities=COORDINATOR_CAPABILITIES)
        link.context.top_up()

    async def _make_sender(self) -> None:
        """Let the peer send to a topic, or to each message's own address (anonymous relay)."""
        peer, link, services = self._peer, self._link, self._services
        publish = peer.grant.publish
        limit = services.config.max_message_bytes
        capabilities = supported(link.target.capabilities, *TARGET_CAPABILITIES)
        if link.target.kind is TerminusKind.TARGET and not link.target.address:
            self._accept_sender(RelayLink(services.ingress, peer, link, allowed=publish), limit, capabilities)
            return
        address = peer.target(link.target.address)
        if not publish.some(address.topic):
            raise AddressError(UNAUTHORIZED_ACCESS, f"no right to publish to {address.topic}")
        info = await services.publisher.topic(address.topic, principal=peer.principal, partition=address.partition)
        if address.partition is not None and address.partition >= info.partitions:
            raise Refused(Outcome.UNKNOWN_TOPIC, f"{address.topic} has {info.partitions} partitions")
        if peer.is_detached(link):
            return
        destination = peer.destination(link.target.address or "", address, info)
        allowed = None if publish.uniform(address.topic) else publish
        incoming = IncomingLink(services.ingress, peer, link, destination, allowed=allowed)
        self._accept_sender(incoming, min(limit, info.max_message_bytes), capabilities)

    def _accept_sender(
        self, incoming: IncomingLink, limit: int, capabilities: tuple[str, ...], dynamic: str | None = None
    ) -> None:
        peer, link = self._peer, self._link
        peer.add_sender(incoming)
        peer.engine.accept_link(link, max_message_bytes=limit, capabilities=capabilities, dynamic=dynamic)
        incoming.top_up()

    async def _make_node(self, capabilities: tuple[str, ...]) -> None:
        """Create a dynamic node (temporary queue or topic) that lives as long as this link, which sends or receives."""
        peer, link, services = self._peer, self._link, self._services
        filters = Filters() if link.incoming else filters_of_node(link, peer.client_id, peer.now_ms())
        node, info = await services.nodes(peer.grant.names).create(peer, capabilities)
        if peer.is_detached(link):
            node.delete()
            return
        peer.nodes[link] = node
        if not link.incoming:
            self._accept_node(node, filters, node.address)
            return
        address = TargetAddress(info.name, None, node.key)
        destination = peer.destination(node.address, address, info)
        incoming = IncomingLink(services.ingress, peer, link, destination, allowed=peer.grant.publish)
        limit = min(services.config.max_message_bytes, info.max_message_bytes)
        self._accept_sender(incoming, limit, node.source(capabilities).capabilities, node.address)

    def _accept_node(self, node: Node, filters: Filters, dynamic: str | None = None) -> None:
        """Let the link receive from a dynamic node of its connection."""
        peer, link = self._peer, self._link
        source = msgspec.structs.replace(
            node.source(link.source.capabilities), condition=filters.condition, filters=filters.applied
        )
        outgoing = OutgoingLink(self._services.egress, peer, link, source)
        outgoing.joined(node.join(outgoing))
        self._accept_receiver(outgoing, source, dynamic=dynamic)

    async def _make_receiver(self) -> None:
        """Let the peer receive from a topic, with or without a consumer group, or from a dynamic node."""
        peer, link, services = self._peer, self._link, self._services
        node = services.nodes(peer.grant.names).find(link.source.address)
        if node is not None:
            if node.owner is not peer:
                raise AddressError(UNAUTHORIZED_ACCESS, "a temporary node belongs to the connection that created it")
            self._accept_node(node, filters_of_node(link, peer.client_id, peer.now_ms()))
            return
        durable = None
        if link.source.kind is TerminusKind.NONE:
            source = await self._resume()
            durable = peer.grant.names.own(source.topic)
        else:
            source = source_of(link, peer.client_id, peer.now_ms(), services.address_types)
            source = source.with_tenant(peer.grant.names)
        if source.group is not None:
            await services.subscriptions.wait_deleted(source.group)
        if not peer.grant.subscribe.whole_topic(source.topic):
            raise AddressError(UNAUTHORIZED_ACCESS, f"no right to receive from {source.topic}")
        info = await services.publisher.topic(source.topic, principal=peer.principal)
        if isinstance(source.start, AtOffset) and source.partition is None and info.partitions > 1:
            raise AddressError(INVALID_FIELD, f"{source.topic} has {info.partitions} partitions: an offset needs one")
        if source.group is not None:
            await services.names.admit(peer.grant, source.group, source.topic)
        if source.browses is not None:
            source = await self._browse(source, source.browses)
        if peer.is_detached(link):
            return
        outgoing = OutgoingLink(self._services.egress, peer, link, source)
        with contextlib.ExitStack() as failing:
            failing.callback(outgoing.leave)
            if source.exclusive and source.group is not None:
                services.subscriptions.claim(source.group, outgoing.steal)
            if source.subscription and not source.volatile and source.group is not None and durable is None:
                await services.names.select(source.group, source.selection)
            await self._connect(outgoing, source)
            if peer.is_detached(link):
                return
            if outgoing.is_refused_by(peer.grant):  # the rights have changed since the check above
                raise AddressError(UNAUTHORIZED_ACCESS, f"no right to receive from {source.topic}")
            failing.pop_all()
        self._accept_receiver(outgoing, source, durable=durable)

    def _accept_receiver(
        self, outgoing: OutgoingLink, source: LinkSource, *, durable: str | None = None, dynamic: str | None = None
    ) -> None:
        peer, link = self._peer, self._link
        peer.add_receiver(outgoing)
        peer.engine.accept_link(
            link,
            capabilities=source.capabilities,
            filters=source.filters,
            durable=durable,
            dynamic=dynamic,
            kept=source.subscription and not source.volatile,
        )
        peer.pump.flush()
        outgoing.credit_changed(peer.engine.drains(link))  # a flow may already be here

    async def _resume(self) -> LinkSource:
        """Find the durable subscription of an attach that has only a link name: Kafka knows its topic."""
        container_id, names = self._peer.client_id, self._peer.grant.names
        own = subscription_of(self._link, container_id)
        group = names.group(own)
        await self._services.subscriptions.wait_deleted(group)
        there = {partition.topic for partition in await self._services.groups.admin.committed(group)}
        topics = sorted(name for name in there if is_topic_name(name) and names.has(name))
        if not topics:
            raise AddressError(NOT_FOUND, f"there is no subscription {own!r}")
        return resumed(self._link, container_id, names.own(topics[0])).with_tenant(names)

    async def _browse(self, source: LinkSource, queue: str) -> LinkSource:
        """Let a browser start at the queue's committed position and see only records that are not settled there."""
        stored = await self._services.groups.positions(queue, source.topic)
        ledgers = {number: read_ledger(committed.offset, committed.metadata) for number, committed in stored.items()}

        def is_open(record: Received) -> bool:
            ledger = ledgers.get(record.partition)
            return ledger is None or record.offset >= ledger.end or record.offset in ledger.open

        start = AtOffsets({number: committed.offset for number, committed in stored.items()})
        return msgspec.structs.replace(source, start=start, condition=both(is_open, source.condition))

    async def _connect(self, outgoing: OutgoingLink, source: LinkSource) -> None:
        """Connect the link to its reader, which offers no record before the link is accepted."""
        if source.group is None:
            start = StartPosition.END if source.start is None else source.start
            await self._services.live_reader.watch_from(source.topic, outgoing, outgoing, start, source.partition)
        else:
            async with self._queue.joining:
                membership = await self._services.groups.join(
                    source.group,
                    [source.topic],
                    outgoing,
                    offset_reset="latest" if source.at_end else "earliest",
                    wants=source.condition,
                    queue=source.kept_for_others,
                    client=self._peer.share,
                )
            outgoing.joined(membership)
        await self._services.attaching.rest()  # one answer of Kafka may wake hundreds of these tasks
