"""One AMQP connection: login, links, and the owner of the records that its peer sends.

Events arrive from `protocols.amqp` in order. Only a login delays the events behind it; an attach is answered by a task
(`gateway.amqp.attaches`) while the connection's other links work on.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any, Final

import structlog

from gateway.amqp.attaches import NO_SENDERS, AttachingPeer
from gateway.amqp.links.incoming import IncomingLink, settle_each
from gateway.amqp.links.outgoing import OutgoingLink
from gateway.amqp.links.relay import RelayLink
from gateway.amqp.login import AmqpLogin
from gateway.amqp.present import CLOSED_BY_PEER, CONNECTION_LOST, closed_by_us, failed
from gateway.amqp.services import PRODUCT, AmqpServices
from gateway.amqp.transactions import Coordinator
from gateway.kafka.contracts import Result
from gateway.limits.limits import LimitExceeded
from gateway.limits.rate_pauses import CreditPause
from gateway.net.protocol_listener import STOPPING
from gateway.net.pump import Pump
from gateway.runtime.audited import audit, where_of
from gateway.runtime.taps import taps
from gateway.runtime.turns import in_turns
from gateway.security.expiry import Expiry
from gateway.security.fair_queue import Unavailable
from gateway.security.login.exchange import Continue, Done, Failed
from gateway.security.tenancy import NoTenantError
from gateway.views.clients import CLOSED, CONNECTION_LOG, SUBSCRIPTIONS, SubscriptionView
from gateway.views.flow import FlowWindow, fullest
from gateway.views.presence import AMQP, Present
from protocols.amqp.connection import Connection
from protocols.amqp.events import (
    ConnectionOpened,
    CreditChanged,
    DeliveriesAccepted,
    DispositionReceived,
    LinkDetached,
    LinkRequested,
    Retired,
    SaslInitReceived,
    SaslResponseReceived,
    SessionEnded,
    TransactionalTransfer,
    TransferAborted,
    TransfersReceived,
    TransferUnfit,
)
from protocols.amqp.links import Link
from protocols.amqp.outcomes import (
    CONNECTION_FORCED,
    INVALID_FIELD,
    RESOURCE_DELETED,
    RESOURCE_LIMIT_EXCEEDED,
    UNAUTHORIZED_ACCESS,
    Error,
)
from protocols.amqp.sasl import SaslCode
from protocols.amqp.transactions import UNKNOWN_ID
from protocols.connection import ConnectionClosed, ConnectionFailed

log = structlog.get_logger(CONNECTION_LOG)

CAPABILITIES: Final = ("ANONYMOUS-RELAY", "SHARED-SUBS")  # of a connection


class AmqpConnection(AttachingPeer):
    """The `Handler` of one connection's pump, and the publisher's `Owner`."""

    def __init__(self, services: AmqpServices, connection: Connection, register: set[AmqpConnection]) -> None:
        """`register` is the set of all open connections."""
        super().__init__(services, connection)
        self._register = register
        self._login: AmqpLogin | None = None  # until its outcome
        self._expiry: Expiry | None = None  # of the login's token, if it has one
        self.is_open = False  # we have answered the peer's open, and told of it
        self._closed_cleanly = False  # a close was sent or received
        self._ended = CONNECTION_LOST  # how the connection ended, for the presence topic

    @property
    def _log(self) -> Any:
        """A logger with the connection's fields; made when needed, because an idle connection should keep none."""
        return log.bind(protocol="amqp", peer=self.pump.peer, client=self.client_id or None)

    @property
    def _presence_name(self) -> str:
        """The container-id with its tenant's prefix; several connections may have it."""
        return self.grant.names.mqtt(self.client_id)

    # Handler

    def connected(self, pump: Pump) -> None:
        """Prepare the login for a new socket."""
        super().connected(pump)
        services = self.services
        self._register.add(self)
        services.counts.connections += 1
        certificate = pump.peercert
        entrance = pump.entrance
        self._login = AmqpLogin(entrance, peer=pump.peer, certificate=certificate)
        certified = entrance.identify_certificate(certificate) is not None
        self._connection.mechanisms = entrance.offers(certificate=certified)
        self._connection.allow_without_sasl = entrance.anonymous() is not None

    def handle(self, events: list[Any]) -> Awaitable[None] | None:
        """Handle events; the awaitable, if there is one, is a login."""
        touched: dict[IncomingLink | Coordinator, None] = {}  # links to give credit to
        now_ms = self.services.wall_clock()
        waiting: Awaitable[None] | None = None
        for event in events:
            kind = type(event)
            if kind is TransfersReceived:
                incoming = event.link.context
                size = sum(map(len, event.messages))
                if self.crediting is not None:
                    self.crediting.spend(0, size)
                incoming.receive(event.deliveries, event.messages, size, now_ms)
                touched[incoming] = None
            elif kind is DeliveriesAccepted:
                event.link.context.accepted(event.deliveries)
            elif kind is DispositionReceived:
                event.link.context.disposition(event.delivery, event.state)
            elif kind is SaslInitReceived or kind is SaslResponseReceived:
                waiting = self._log_in(event)  # no event follows before the SASL outcome
            else:
                self._control(event, touched)
        for incoming in touched:
            incoming.top_up()
        return waiting

    def writable(self) -> None:
        """Wake the receivers, because the socket's buffer has capacity again."""
        for outgoing in tuple(self._outgoing):
            outgoing.wake()

    def disconnected(self, reason: str) -> None:
        """Release everything of the connection; the socket is closed."""
        if self._expiry is not None:
            self._expiry.set(None)
        self._register.discard(self)
        if self.crediting is not None:
            self.crediting.end()
        self.leave_limits()
        if self._incoming is not NO_SENDERS:
            self.budget.gate.unsubscribe(self._own_gate_changed)
            self._own_gate_changed(True)
        for task in tuple(self._tasks):
            task.cancel()
        for coordinator in {transaction.coordinator for transaction in self.transactions.values()}:
            coordinator.detached()
        in_turns(self._end_all_links())
        if self.is_open:
            self._log.info("connection closed", reason=reason)
            if self.services.presence is not None and self.client_id:
                self.services.presence.offline(f"{AMQP}/{self._presence_name}", self, self._ended)

    def _end_all_links(self) -> Iterator[None]:
        """End the remaining links one by one, then free the engine's memory."""
        links = [incoming.link for incoming in self._incoming] + [outgoing.link for outgoing in self._outgoing]
        yield from self._end_links(links, failed=not self._closed_cleanly)
        self.leave_sender()
        self._connection.release()

    # Owner

    def settle(self, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        """Settle messages after Kafka's answer; see `gateway.kafka.contracts.Owner`."""
        settle_each(self, tokens, result)

    def broken(self, error: Exception, _tokens: Sequence[Any]) -> None:
        """Close the connection after a bug in `settle`: the peer then knows that unsettled messages are in doubt."""
        self.pump.give_up()

    def detach(self, link: Link, error: Error) -> None:
        """Detach or refuse a link with an error."""
        self._log.info("link detached", link=link.name, error=error)
        if not self.left:
            if link.accepted:
                self.engine.close_link(link, error)
            else:
                self.refuse(link, error)
            self.pump.flush_soon()
        self._link_ended(link, link.context)

    # called by the server

    def rights_changed(self) -> None:
        """Detach the links that the peer's new rights do not allow."""
        publish = self.grant.publish
        for incoming in tuple(self._incoming):
            topic = incoming.topic
            if topic is None or isinstance(incoming, RelayLink) or incoming.link in self.nodes:
                continue  # an anonymous relay, which checks each message, or the peer's own node
            if publish.some(topic):
                incoming.allowed = None if publish.uniform(topic) else publish
            else:
                reason = f"the right to publish to {topic} was revoked"
                self.detach(incoming.link, Error(UNAUTHORIZED_ACCESS, reason))
        for outgoing in tuple(self._outgoing):
            if outgoing.is_refused_by(self.grant):
                reason = f"the right to receive from {outgoing.topic} was revoked"
                self.detach(outgoing.link, Error(UNAUTHORIZED_ACCESS, reason))

    def prepare_to_leave(self) -> bool:
        """Stop granting credit; in-flight messages are still answered."""
        self.quiescing = True
        return False

    @property
    def may_leave(self) -> bool:
        """Whether all messages are settled and no transaction is open; without a transaction also stop reading."""
        if self.transactions:
            return False
        self.pump.pause_reading(STOPPING)
        return not any(incoming.window.unsettled for incoming in self._incoming)

    def leave(self) -> None:
        """Close the connection because the gateway stops; receivers' unsettled records return to their groups."""
        self._close(self.services.closing_error(), stopping=True)

    # for operators

    @property
    def identifier(self) -> str:
        """Its container-id with its address; "" before the peer's open and after a close."""
        return f"amqp/{self.client_id}@{self.pump.peer}" if self.client_id and not self.left else ""

    @property
    def protocol_version(self) -> str:
        """The version of AMQP."""
        return "1.0"

    def windows(self) -> tuple[list[FlowWindow], int]:
        """Return the windows of the links with the most unsettled messages, and the number of links."""
        senders = fullest(self._incoming, lambda link: link.window.unsettled)
        receivers = fullest(self._outgoing, lambda link: link.unsettled)
        windows = [*(link.flow() for link in senders), *(link.flow() for link in receivers)]
        return windows, len(self._incoming) + len(self._outgoing)

    def subscriptions(self) -> tuple[list[SubscriptionView], int]:
        """Return the first links, and the number of all."""
        links: Iterator[IncomingLink | OutgoingLink] = itertools.chain(self._incoming, self._outgoing)
        flows = [link.flow() for link in itertools.islice(links, SUBSCRIPTIONS)]
        views = [SubscriptionView(flow.name, topic=flow.topic, to_kafka=flow.to_kafka) for flow in flows]
        return views, len(self._incoming) + len(self._outgoing)

    def kick(self) -> None:
        """Close the connection with `amqp:connection:forced`."""
        self._close(Error(CONNECTION_FORCED, CLOSED))

    def statistics(self) -> tuple[int, int, int, int, int, int]:
        """Return the current (senders, receivers, credit, unanswered, unsettled, window)."""
        return (
            len(self._incoming),
            len(self._outgoing),
            sum(incoming.link.credit for incoming in self._incoming),
            sum(incoming.window.unsettled for incoming in self._incoming),
            sum(outgoing.unsettled for outgoing in self._outgoing),
            sum(incoming.window.most for incoming in self._incoming),
        )

    def _close(self, error: Error, *, stopping: bool = False) -> None:
        if not self.left:
            self._closed_cleanly = True
            self._ended = closed_by_us(error, stopping=stopping)
            self._connection.close(error)
            self.pump.flush()

    # events

    def _control(self, event: Any, touched: dict[IncomingLink | Coordinator, None]) -> None:
        match event:
            case CreditChanged(link=link, drain=drain):
                if link.context is not None:  # else it is not accepted yet, and the credit is read then
                    link.context.credit_changed(drain)
            case TransactionalTransfer(link=link) | TransferUnfit(link=link):
                self._receive_one(event)
                touched[link.context] = None
            case Retired(link=link, txn_id=txn_id):
                transaction = self.transactions.get(txn_id)
                if transaction is not None:
                    transaction.retire(link.context, event)
                else:
                    self.detach(link, Error(UNKNOWN_ID, "no transaction has this txn-id"))
            case TransferAborted(link=link):
                self.services.counts.aborted += 1
                touched[link.context] = None
            case ConnectionOpened():
                self._opened(event)
            case LinkRequested(link=link):
                self.answer(link)
            case LinkDetached(link=link):
                if event.by_us:
                    self._log.info("link detached", link=link.name, error=event.error)
                self._link_ended(link, link.context, closed=event.closed and not event.by_us)
            case SessionEnded(links=links):
                in_turns(self._end_links(links, failed=False))
            case ConnectionFailed(reason=reason, code=code):
                self.services.counts.broken += 1
                self._ended = failed(event)
                if self._login is not None and reason.startswith("SASL outcome"):
                    self._audit_refusal("this mechanism is not offered")
                self._log.info("connection failed", reason=reason, code=code)
            case ConnectionClosed():
                self._closed_cleanly = True  # the engine has answered; the pump closes the socket
                self._ended = CLOSED_BY_PEER

    def _receive_one(self, event: TransactionalTransfer | TransferUnfit) -> None:
        """Handle a message of a transaction, or an unfit one of a transaction or of none."""
        link, delivery = event.link.context, event.delivery
        if self.crediting is not None:
            self.crediting.spend(0, event.size if isinstance(event, TransferUnfit) else len(event.data))
        transaction = self.transactions.get(event.txn_id) if event.txn_id is not None else None
        if isinstance(event, TransferUnfit):
            link.unfit(delivery, event.size, event.format, transaction)
        else:
            link.post(transaction, delivery, event.data, self.now_ms())

    async def _log_in(self, event: SaslInitReceived | SaslResponseReceived) -> None:
        login = self._login
        assert login is not None
        step = await login.step(event)
        if not isinstance(step, Continue):
            self._login = None
        if isinstance(step, Failed):
            self.services.counts.refused_logins += 1
            self._audit_refusal(step.reason, login.name, busy=step.busy)
            self._log.debug("login refused", reason=step.reason)
        if self.pump.closed:
            return
        match step:
            case Continue(challenge):
                more = self._connection.sasl_challenge(challenge)
            case Done(identity, last_word, expires_ms):
                self.identity = identity
                if expires_ms is not None:
                    self._expiry = Expiry(self.services.wall_clock, self._expired)
                    self._expiry.set(expires_ms)
                more = self._connection.sasl_outcome(SaslCode.OK, last_word or None)
            case Failed():
                more = self._connection.sasl_outcome(SaslCode.SYS_TEMP if step.busy else SaslCode.AUTH)
        waiting = self.handle(more)
        if waiting is not None:
            await waiting

    def _audit_refusal(self, reason: str, name: str = "", *, busy: bool = False) -> None:
        if audit.enabled:
            audit.refused(where_of("amqp", self.pump, self.client_id), reason, name=name, busy=busy)

    def _expired(self) -> None:
        self._log.info("token expired")
        self._close(Error(UNAUTHORIZED_ACCESS, "the token has expired"))

    def _opened(self, event: ConnectionOpened) -> None:
        if self.services.is_closed:
            self._connection.close(self.services.closing_error())
            return
        identity = self.identity if event.with_sasl else self.pump.entrance.anonymous()
        if identity is None:
            self._audit_refusal("no login")
            self._connection.close(Error(UNAUTHORIZED_ACCESS, "authentication with SASL is required"))
            return
        access = self.services.access
        if access.by_certificate:
            identity = identity.with_certificate(self.pump.peercert)
        try:
            identity = self.pump.entrance.assign_tenant(identity, self.pump.peercert)
            self.grant = access.for_client(identity, event.container_id, peer=self.pump.peer)
        except NoTenantError as error:
            self.services.counts.refused_logins += 1
            self._audit_refusal(str(error), identity.name)
            self._connection.close(Error(UNAUTHORIZED_ACCESS, str(error)))
            return
        except Unavailable as away:
            self._connection.close(Error(CONNECTION_FORCED, str(away)))
            return
        name = self.grant.names.mqtt(event.container_id)
        if not self.grant.names.has_mqtt(name):  # its presence, for example, would be another client's
            self._audit_refusal("the container-id is reserved for a tenant", identity.name)
            self._connection.close(Error(INVALID_FIELD, "the container-id is reserved for a tenant"))
            return
        self.identity, self.principal = identity, identity.name
        self.client_id = event.container_id
        self.pump.identified()
        try:
            self.enter_limits(self.services.limits, identity)
        except LimitExceeded as exceeded:
            self._log.debug("connection refused", principal=identity.name, reason=str(exceeded))
            self._connection.close(Error(RESOURCE_LIMIT_EXCEEDED, str(exceeded)))
            return
        self.limit_sending()
        if self.limits is not None and self.limits.incoming is not None:
            self.crediting = CreditPause(self.limits.incoming, self.subject)
        if audit.enabled:
            audit.accepted(where_of("amqp", self.pump, self.client_id), identity.name, identity.method)
        if taps.watchers:
            taps.named(self.pump, self.identifier)
        self.is_open = True
        self._connection.open(CAPABILITIES, (("product", PRODUCT),))
        self._log.info("connection opened", principal=identity.name, listener=self.pump.entrance.name)
        if self.services.presence is not None and self.client_id:
            name = self._presence_name
            present = Present(
                client=name,
                principal=identity.name,
                protocol=AMQP,
                address=self.pump.peer,
                since=self.now_ms(),
            )
            self.services.presence.online(f"{AMQP}/{name}", self, present)

    def _end_links(self, links: Sequence[Link], *, failed: bool) -> Iterator[None]:
        contexts = [link.context for link in links]  # the engine drops them at the end of this turn
        for link, context in zip(links, contexts, strict=True):
            self._link_ended(link, context, failed=failed)
            yield

    def _link_ended(self, link: Link, context: Any, *, closed: bool = False, failed: bool = False) -> None:
        """Release a link that has ended; `closed` with its terminus by the peer, or `failed` with its connection."""
        if isinstance(context, IncomingLink):
            if context in self._incoming:
                del self._incoming[context]
                self.services.gates.senders -= 1
                context.leave()
        elif isinstance(context, Coordinator):
            context.detached()
        elif isinstance(context, OutgoingLink):
            self._outgoing.pop(context, None)
            context.leave(unsubscribe=closed, failed=failed)
        elif self._attaches is not None:
            self._attaches.forget(link)
        node = self.nodes.pop(link, None)
        if node is not None:
            for receiver in node.links:
                if receiver is not context:
                    self.detach(receiver.link, Error(RESOURCE_DELETED, f"{node.address} was deleted"))
            node.delete()
