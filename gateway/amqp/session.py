"""One AMQP connection: login, links, and the owner of the records that its peer sends.

Events come from `protocols.amqp`, in order. Only a login holds the events behind it; a link whose topic has to be
looked up is answered by a task of its own, while the connection's other links go on.
"""

from __future__ import annotations

import asyncio
import itertools
import operator
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, Final

import msgspec
import structlog

from flowcontrol.budget import Budget
from gateway.amqp.addresses import AddressError, TargetAddress, parse_target
from gateway.amqp.answers import delivery_state, refusal
from gateway.amqp.filters import Filters
from gateway.amqp.incoming import IncomingLink
from gateway.amqp.login import Login
from gateway.amqp.nodes import Node
from gateway.amqp.outgoing import OutgoingLink
from gateway.amqp.relay import RelayLink
from gateway.amqp.services import PRODUCT, Services
from gateway.amqp.sources import Source, filters_of_node, resumed, source_of, subscription_of
from gateway.amqp.transactions import CAPABILITIES as COORDINATOR_CAPABILITIES
from gateway.amqp.transactions import COMMAND_BYTES, Coordinator, Transaction
from gateway.kafka.contracts import Refused, Result
from gateway.kafka.group import OffsetReset
from gateway.kafka.positions import AtOffset, BeyondEnd, Place
from gateway.kafka.topics import TopicInfo
from gateway.net.pump import Pump
from gateway.security.authorization import Grant
from gateway.security.exchange import Continue, Done, Failed
from gateway.security.expiry import Expiry
from gateway.security.identity import Identity
from mapping.amqp import Destination, gateway_headers
from mapping.outcomes import Outcome
from mapping.record import is_topic_name
from protocols.amqp.connection import Connection
from protocols.amqp.engine import Engine
from protocols.amqp.events import (
    ConnectionOpened,
    CreditChanged,
    DispositionReceived,
    LinkDetached,
    LinkRequested,
    Retired,
    SaslInitReceived,
    SaslResponseReceived,
    SessionEnded,
    TransactionalTransfer,
    TransferAborted,
    TransferOversized,
    TransferReceived,
)
from protocols.amqp.links import SETTLED, Link, Terminus, TerminusKind
from protocols.amqp.outcomes import (
    CONNECTION_FORCED,
    INVALID_FIELD,
    NOT_FOUND,
    NOT_IMPLEMENTED,
    PRECONDITION_FAILED,
    RESOURCE_DELETED,
    UNAUTHORIZED_ACCESS,
    Error,
)
from protocols.amqp.sasl import SaslCode
from protocols.amqp.transactions import LOCAL_TRANSACTIONS, UNKNOWN_ID
from protocols.connection import ConnectionClosed, ConnectionFailed

log = structlog.get_logger(__name__)

WRITE_NOW: Final = 64 * 1024  # bytes sent in one turn before they are written: bounds what waits inside the engine
_LINK_OF: Final = operator.itemgetter(0)  # of a token
CAPABILITIES: Final = ("ANONYMOUS-RELAY", "SHARED-SUBS")  # of a connection
TARGET_CAPABILITIES: Final = ("queue", "topic", "temporary-queue", "temporary-topic")
"""A sender cannot tell them apart: all of them only mean "store it"."""


class AmqpSession:
    """The `Handler` of one connection's pump, and the publisher's `Owner`.

    Attributes:
        services: what all sessions share.
        pump: the socket.
        budget: what this connection has in flight; the publisher counts it.
        quiet: no more credit is granted: the gateway is stopping.
        gone: the socket is gone.
        transactions: that its peer may post to, by txn-id.
    """

    def __init__(self, services: Services, connection: Connection) -> None:
        self.services = services
        self.pump: Pump
        self.budget: Budget = services.publisher.connection_budget()
        self.quiet = False
        self.gone = False
        self.transactions: dict[bytes, Transaction] = {}
        self._connection = connection
        self._identity: Identity | None = None
        self._grant: Grant
        self._container_id = ""
        self._login: Login | None = None  # until its verdict
        self._expiry: Expiry | None = None  # of a token
        # Lists: most connections have one link, and a set takes 216 bytes even when it is empty.
        self._incoming: list[IncomingLink] = []
        self._outgoing: list[OutgoingLink] = []
        self._nodes: dict[Link, Node] = {}  # that this connection's links have made
        self._tasks: list[asyncio.Task[None]] = []
        self._parting = False  # somebody has said goodbye
        self._written = 0
        self._now_ms = 0

    @property
    def _log(self) -> Any:
        """Bound when it is used: an idle connection keeps no logger."""
        return log.bind(protocol="amqp", peer=self.pump.peer, client=self._container_id or None)

    @property
    def engine(self) -> Engine:
        """The AMQP layer."""
        return self._connection.engine

    @property
    def alive(self) -> bool:
        """Whether the peer can be told anything."""
        return not self.gone and not self._connection.closing

    # Handler

    def connected(self, pump: Pump) -> None:
        """The socket is open."""
        self.pump = pump
        services = self.services
        services.sessions.add(self)
        services.counts.connections += 1
        transport = pump.transport
        tls = transport.get_extra_info("ssl_object") if transport is not None else None
        certificate = tls.getpeercert() if tls is not None else None
        authenticator = services.authenticator
        self._login = Login(authenticator, peer=pump.peer, certificate=certificate)
        certified = authenticator.identify_certificate(certificate) is not None
        self._connection.mechanisms = authenticator.offers(certificate=certified)
        self._connection.allow_without_sasl = authenticator.anonymous() is not None

    def handle(self, events: list[Any]) -> Awaitable[None] | None:
        """Act on events; a login is awaited."""
        touched: list[IncomingLink] = []
        now_ms = self._now_ms = self.services.wall_clock()
        waiting: Awaitable[None] | None = None
        position, count = 0, len(events)
        while position < count:
            event = events[position]
            kind = type(event)
            if kind is TransferReceived:
                incoming = event.link.context
                position = incoming.receive_run(events, position, now_ms)
                if not incoming.touched:
                    incoming.touched = True
                    touched.append(incoming)
                continue
            position += 1
            if kind is DispositionReceived:
                event.link.context.disposition(event.delivery, event.state)
            elif kind is SaslInitReceived or kind is SaslResponseReceived:
                waiting = self._log_in(event)  # nothing follows before the outcome
            else:
                self._control(event, touched)
        for incoming in touched:
            incoming.top_up()
        return waiting

    def writable(self) -> None:
        """The socket takes more: receivers may go on."""
        for outgoing in list(self._outgoing):
            outgoing.wake()

    def disconnected(self, reason: str) -> None:
        """The socket is gone."""
        self.gone = True
        if self._expiry is not None:
            self._expiry.set(None)
        self.services.sessions.discard(self)
        for task in self._tasks:
            task.cancel()
        for coordinator in {transaction.coordinator for transaction in self.transactions.values()}:
            coordinator.lost()
        for link in [incoming.link for incoming in self._incoming] + [outgoing.link for outgoing in self._outgoing]:
            self._lost(link, failed=not self._parting)
        if self._container_id:
            self._log.info("connection closed", reason=reason)

    # Owner

    def settle(self, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        """Kafka's answer for messages of this connection; see `gateway.kafka.contracts.Owner`."""
        outcome = result.outcome
        self.services.counts.incoming[outcome] += len(tokens)
        engine_dead = self.gone or self._connection.closing
        engine = None if engine_dead else self.engine
        stored = outcome is Outcome.STORED
        touched: list[IncomingLink] = []
        for incoming, run in itertools.groupby(tokens, key=_LINK_OF):
            deliveries = [delivery for _, delivery in run]
            incoming.window.settle(len(deliveries))
            if not incoming.touched:
                incoming.touched = True
                touched.append(incoming)
            if engine is None:
                continue
            if stored:
                engine.accept_deliveries(incoming.link, deliveries)
                continue
            state = delivery_state(incoming.link, outcome, result.reason)
            for delivery in deliveries:
                if delivery is not None:
                    engine.settle_delivery(incoming.link, delivery, state)
        if engine is None:
            return
        for incoming in touched:
            incoming.top_up()
        self.pump.flush()

    # for links

    def now_ms(self) -> int:
        """The wall clock, epoch milliseconds."""
        return self.services.wall_clock()

    def destination(self, address: str, parsed: TargetAddress, info: TopicInfo) -> Destination:
        """Where messages of this connection go that are sent to `address`."""
        identity = self._identity
        assert identity is not None
        return Destination(
            topic=parsed.topic,
            address_bytes=address.encode(),
            partition=parsed.partition,
            key=parsed.key,
            user=identity.name,
            headers=gateway_headers(self._container_id),
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
        else:
            self.pump.flush_soon()

    def flush_soon(self) -> None:
        """Write at the end of this turn of the loop."""
        if not self.gone:
            self.pump.flush_soon()

    def detach(self, outgoing: OutgoingLink, error: Error) -> None:
        """End a receiver's link from our side."""
        link = outgoing.link
        self._log.info("link detached", link=link.name, error=error)
        if not self.gone and not self._connection.closing:
            if link.accepted:
                self.engine.close_link(link, error)
            else:
                self._refuse(link, error)
            self.pump.flush_soon()
        self._lost(link)

    # the front's words

    def quiesce(self) -> None:
        """Grant no more credit: what is in flight will be answered."""
        self.quiet = True

    def goodbye(self, description: str) -> None:
        """Close the connection; receivers' unsettled records go back to their groups."""
        self._close(Error(CONNECTION_FORCED, description))

    def statistics(self) -> tuple[int, int, int, int, int]:
        """(senders, receivers, credit, unanswered, unsettled) now."""
        return (
            len(self._incoming),
            len(self._outgoing),
            sum(incoming.link.credit for incoming in self._incoming),
            sum(incoming.window.unsettled for incoming in self._incoming),
            sum(outgoing.unsettled for outgoing in self._outgoing),
        )

    def _close(self, error: Error) -> None:
        if not self.gone and not self._connection.closing:
            self._parting = True
            self._connection.close(error)
            self.pump.flush()

    # events

    def _control(self, event: Any, touched: list[IncomingLink]) -> None:
        match event:
            case CreditChanged(link=link, credit=credit, drain=drain):
                if link.context is not None:  # else it is being looked up: the credit is read when it is accepted
                    link.context.credit_changed(credit, drain)
            case TransactionalTransfer(link=link) | TransferOversized(link=link):
                self._take(event)
                touched.append(link.context)
            case Retired(link=link, txn_id=txn_id):
                transaction = self.transactions.get(txn_id)
                if transaction is not None:
                    transaction.retire(link.context, event)
                else:
                    self.detach(link.context, Error(UNKNOWN_ID, "no transaction has this txn-id"))
            case TransferAborted(link=link):
                self.services.counts.aborted += 1
                touched.append(link.context)
            case ConnectionOpened():
                self._opened(event)
            case LinkRequested(link=link):
                if not self._is_lost(link):
                    self.start(self._attach(link))
            case LinkDetached(link=link):
                if event.by_us:
                    self._log.info("link detached", link=link.name, error=event.error)
                self._lost(link, for_good=event.closed and not event.by_us)
            case SessionEnded(links=links):
                for link in links:
                    self._lost(link)
            case ConnectionFailed(reason=reason, code=code):
                self.services.counts.broken += 1
                self._log.info("connection failed", reason=reason, code=code)
            case ConnectionClosed():
                self._parting = True  # the engine has answered; the pump closes the socket
            case _:
                pass  # SessionOpened: the engine has answered, and a session alone means nothing to us

    def _take(self, event: TransactionalTransfer | TransferOversized) -> None:
        """A message for a transaction, or one that is too large, which may be for one too."""
        link, delivery = event.link.context, event.delivery
        transaction = self.transactions.get(event.txn_id) if event.txn_id is not None else None
        if isinstance(event, TransferOversized):
            link.oversized(delivery, event.size, transaction)
        elif transaction is not None:
            link.post(transaction, delivery, event.data, self._now_ms)
        else:
            link.stray(delivery, len(event.data))

    async def _log_in(self, event: SaslInitReceived | SaslResponseReceived) -> None:
        assert self._login is not None
        step = await self._login.step(event)
        if not isinstance(step, Continue):
            self._login = None
        if isinstance(step, Failed):
            self.services.counts.refused_logins += 1
            self._log.debug("login refused", reason=step.reason)
        if self.gone:
            return
        match step:
            case Continue(challenge):
                more = self._connection.sasl_challenge(challenge)
            case Done(identity, last_word, expires_ms):
                self._identity = identity
                if expires_ms is not None:
                    self._expiry = Expiry(self.services.wall_clock, self._expired)
                    self._expiry.set(expires_ms)
                more = self._connection.sasl_outcome(SaslCode.OK, last_word or None)
            case Failed():
                more = self._connection.sasl_outcome(SaslCode.AUTH)
        waiting = self.handle(more)
        if waiting is not None:
            await waiting

    def _expired(self) -> None:
        self._log.info("token expired")
        self._close(Error(UNAUTHORIZED_ACCESS, "the token has expired"))

    def _opened(self, event: ConnectionOpened) -> None:
        identity = self._identity if event.with_sasl else self.services.authenticator.anonymous()
        if identity is None:
            self._connection.close(Error(UNAUTHORIZED_ACCESS, "log in by SASL"))
            return
        self._identity = identity
        self._grant = self.services.access.for_identity(identity)
        self._container_id = event.container_id
        self._connection.open(CAPABILITIES, (("product", PRODUCT),))
        self._log.info("connection opened", principal=identity.name)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin what ends with the connection at the latest."""
        task = self.pump.spawn(work)
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)

    async def _attach(self, link: Link) -> None:
        """Answer one attach, after its topic is known."""
        try:
            terminus = link.target if link.incoming else link.source
            if terminus.kind is TerminusKind.COORDINATOR:
                self._attach_coordinator(link)
            elif terminus.dynamic:
                await self._attach_dynamic(link, terminus)
            elif link.incoming:
                await self._attach_incoming(link)
            else:
                await self._attach_outgoing(link)
        except AddressError as error:
            self._refuse(link, error.error)
        except Refused as refused:
            self._refuse(link, refusal(refused))
        except Exception:
            # Our bug, on one connection: it ends, as in the pump, and the other connections live on.
            self._log.exception("attach failed", link=link.name)
            self.pump.abort()
        if not self.gone:
            self.pump.flush()

    def _attach_coordinator(self, link: Link) -> None:
        wanted = link.target.capabilities
        if wanted and not set(wanted) & set(COORDINATOR_CAPABILITIES):
            raise AddressError(NOT_IMPLEMENTED, f"only {LOCAL_TRANSACTIONS} are offered")
        link.context = Coordinator(self.services.coordinators, self, link)
        self.engine.accept_link(link, max_message_bytes=COMMAND_BYTES, capabilities=COORDINATOR_CAPABILITIES)
        link.context.top_up()

    async def _attach_incoming(self, link: Link) -> None:
        services = self.services
        if link.target.kind is TerminusKind.TARGET and not link.target.address:
            relay = RelayLink(self, link, services.config.link_credit, self._grant.publish)
            limit = services.config.max_message_bytes
            self._accept_incoming(link, relay, limit, self._honest(link.target.capabilities))
            return
        address = parse_target(link.target.address)
        if not self._grant.publish.some(address.topic):
            raise AddressError(UNAUTHORIZED_ACCESS, f"no right to publish to {address.topic}")
        info = await services.publisher.topic(address.topic)
        if address.partition is not None and address.partition >= info.partitions:
            raise Refused(Outcome.UNKNOWN_TOPIC, f"{address.topic} has {info.partitions} partitions")
        if self._is_lost(link):
            return
        destination = self.destination(link.target.address or "", address, info)
        allowed = None if self._grant.publish.uniform(address.topic) else self._grant.publish
        incoming = IncomingLink(self, link, destination, services.config.link_credit, allowed)
        limit = min(services.config.max_message_bytes, info.max_message_bytes)
        self._accept_incoming(link, incoming, limit, self._honest(link.target.capabilities))

    def _accept_incoming(
        self, link: Link, incoming: IncomingLink, limit: int, capabilities: tuple[str, ...], dynamic: str | None = None
    ) -> None:
        link.context = incoming
        self._incoming.append(incoming)
        self.services.senders += 1
        self.engine.accept_link(link, max_message_bytes=limit, capabilities=capabilities, dynamic=dynamic)
        incoming.top_up()

    async def _attach_dynamic(self, link: Link, terminus: Terminus) -> None:
        """Make a temporary queue or topic; it goes with this link, on which one sends to it or receives from it."""
        services = self.services
        filters = Filters() if link.incoming else filters_of_node(link, self._container_id, self.now_ms())
        node, info = await services.nodes.create(self, terminus.capabilities)
        if self._is_lost(link):
            services.nodes.delete(node)
            return
        self._nodes[link] = node
        if not link.incoming:
            self._accept_node(link, node, filters, node.address)
            return
        address = TargetAddress(info.name, None, node.key)
        destination = self.destination(node.address, address, info)
        incoming = IncomingLink(self, link, destination, services.config.link_credit, self._grant.publish)
        limit = min(services.config.max_message_bytes, info.max_message_bytes)
        self._accept_incoming(link, incoming, limit, node.source(terminus.capabilities).capabilities, node.address)

    def _accept_node(self, link: Link, node: Node, filters: Filters, dynamic: str | None = None) -> None:
        """Let a link receive from a temporary queue or topic of this connection."""
        source = msgspec.structs.replace(
            node.source(link.source.capabilities), condition=filters.condition, filters=filters.applied
        )
        outgoing = OutgoingLink(self, link, source, settled=link.settle_mode == SETTLED)
        outgoing.joined(node.join(outgoing))
        link.context = outgoing
        self._outgoing.append(outgoing)
        settled = link.settle_mode == SETTLED
        self.engine.accept_link(
            link, capabilities=source.capabilities, settled=settled, filters=source.filters, dynamic=dynamic
        )
        self.pump.flush()
        outgoing.wake()

    async def _attach_outgoing(self, link: Link) -> None:
        services = self.services
        node = services.nodes.find(link.source.address)
        if node is not None:
            if node.owner is not self:
                raise AddressError(UNAUTHORIZED_ACCESS, "a temporary node is for the connection that made it")
            self._accept_node(link, node, filters_of_node(link, self._container_id, self.now_ms()))
            return
        found = None
        if link.source.kind is TerminusKind.NONE:
            source = await self._resume(link)
            found = source.topic
        else:
            source = source_of(link, self._container_id, self.now_ms())
        if source.group is not None:
            await services.ended(source.group)
        if not self._grant.subscribe.whole_topic(source.topic):
            raise AddressError(UNAUTHORIZED_ACCESS, f"no right to receive from {source.topic}")
        info = await services.publisher.topic(source.topic)
        if isinstance(source.start, AtOffset) and source.partition is None and info.partitions > 1:
            raise AddressError(INVALID_FIELD, f"{source.topic} has {info.partitions} partitions: an offset needs one")
        if self._is_lost(link):
            return
        outgoing = OutgoingLink(self, link, source, settled=link.settle_mode == SETTLED)
        if source.exclusive and source.group is not None:
            former = services.subscriptions.get(source.group)
            if former is not None:
                former.steal()
            services.subscriptions[source.group] = outgoing
        await self._connect(outgoing, source)
        if self._is_lost(link):
            outgoing.leave()
            return
        link.context = outgoing
        self._outgoing.append(outgoing)
        settled = link.settle_mode == SETTLED
        self.engine.accept_link(
            link, capabilities=source.capabilities, settled=settled, filters=source.filters, found=found
        )
        self.pump.flush()
        outgoing.wake()

    async def _resume(self, link: Link) -> Source:
        """A durable subscription by its name alone: only Kafka knows what it is for."""
        group = subscription_of(link, self._container_id)
        await self.services.ended(group)
        topics = sorted(name for name in await self.services.groups.topics(group) if is_topic_name(name))
        if not topics:
            raise AddressError(NOT_FOUND, f"there is no subscription {group!r}")
        return resumed(link, self._container_id, topics[0])

    async def _connect(self, outgoing: OutgoingLink, source: Source) -> None:
        """Give the link its reader; it is offered nothing before it is accepted."""
        try:
            if source.group is None:
                start = Place.END if source.start is None else source.start
                await self.services.tail.watch_from(source.topic, outgoing, outgoing, start, source.partition)
            else:
                reset: OffsetReset = "latest" if source.at_end else "earliest"
                topics = [source.topic]
                outgoing.joined(await self.services.groups.join(source.group, topics, outgoing, offset_reset=reset))
        except BeyondEnd as beyond:
            outgoing.leave()
            raise AddressError(PRECONDITION_FAILED, str(beyond)) from None
        except Refused:
            outgoing.leave()
            raise
        except asyncio.CancelledError:  # the connection was lost meanwhile
            outgoing.leave()
            raise

    @staticmethod
    def _honest(wanted: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in TARGET_CAPABILITIES if name in wanted)

    def _refuse(self, link: Link, error: Error) -> None:
        self.services.counts.refused_links += 1
        if not self._is_lost(link):
            self.engine.refuse_link(link, error)

    def _is_lost(self, link: Link) -> bool:
        """Whether the peer has left while its attach was being answered."""
        return not link.attached or self.gone or self._connection.closing

    def _lost(self, link: Link, *, for_good: bool = False, failed: bool = False) -> None:
        """A link is gone; `for_good`: the peer has closed its terminus; `failed`: with its connection, which broke."""
        context = link.context
        if isinstance(context, IncomingLink):
            if context in self._incoming:
                self._incoming.remove(context)
                self.services.senders -= 1
                self.services.forget(context)
        elif isinstance(context, Coordinator):
            context.lost()
        elif isinstance(context, OutgoingLink):
            if context in self._outgoing:
                self._outgoing.remove(context)
            context.leave(unsubscribe=for_good, failed=failed)
        node = self._nodes.pop(link, None)
        if node is not None:
            for receiver in node.links:
                if receiver is not context:
                    self.detach(receiver, Error(RESOURCE_DELETED, f"{node.address} is no more"))
            self.services.nodes.delete(node)
