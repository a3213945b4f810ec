"""Live WebSockets: publish and subscribe over one connection, with acknowledgements and credit in both directions.

A session is driven by a pump, like those of MQTT and AMQP. Records go to the publisher immediately, in the order in
which they arrive, and a message is answered when its last record is settled. While Kafka is slow, the socket is not
read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterable
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Annotated, Any, Final

import msgspec
import structlog
from aiohttp import web

from gateway.clients import CLOSED, SUBSCRIPTIONS, ClientView, SubscriptionView
from gateway.flow import ConnectionFlow, Flowing, Window, fullest, shown, subject
from gateway.kafka.contracts import Refused
from gateway.kafka.publish.sender_partitions import Sender
from gateway.limits.brakes import ReadingPause, SendingPause
from gateway.limits.limits import ClientLimits
from gateway.net.pump import Pump
from gateway.net.upgrade import check_upgrade
from gateway.net.writes import Writes
from gateway.pauses import PROCESS, PROCESS_BUDGET, UNANSWERED, pauses
from gateway.rest.present import BY_CLIENT, BY_SERVER, STOPPED, HttpPresence, stream_key
from gateway.rest.produce.tickets import Ticket, submit_allowed
from gateway.rest.server.audited import FORBIDDEN, audit_denied
from gateway.rest.server.call import Call
from gateway.rest.server.operation_set import OperationSet
from gateway.rest.server.request_dispatcher import refusal
from gateway.rest.server.request_login import forbidden
from gateway.rest.services import RestServices
from gateway.rest.streams.feeds import Feeds
from gateway.rest.streams.live_subscription import Subscription
from gateway.security.authorization import Grant
from gateway.security.expiry import Expiry
from gateway.statistics import counter, gauge
from mapping.rest.incoming import to_records
from protocols.connection import ConnectionClosed, ConnectionFailed
from protocols.rest.errors import SHUTTING_DOWN, RestError, busy
from protocols.rest.live_connection import LiveConnection
from protocols.rest.live_messages import (
    SUBPROTOCOL,
    Acknowledge,
    BadMessage,
    Credit,
    Produce,
    Release,
    Subscribe,
    Unsubscribe,
    failed,
    produced,
    unsubscribed,
)
from protocols.websocket import POLICY_VIOLATION, SERVICE_RESTART

log = structlog.get_logger(__name__)

MOST_SUBSCRIPTIONS: Final = 256  # of one connection
MAX_UNANSWERED: Final = 1024  # unanswered produce messages of one connection; at this number it is not read
STOPPING: Final = "stopping"
CLOSE_S: Final = 1.0  # how long clients have to answer a Close frame


class LiveStatistics(msgspec.Struct):
    """Counts of live WebSockets, since the start."""

    open: Annotated[int, gauge("open WebSockets")] = 0
    opened_total: Annotated[int, counter("WebSockets opened")] = 0
    messages_total: Annotated[int, counter("messages of clients")] = 0
    records_in_total: Annotated[int, counter("records published")] = 0
    records_out_total: Annotated[int, counter("records sent to clients")] = 0
    errors_total: Annotated[int, counter("messages answered by an error")] = 0
    unanswered: Annotated[int, gauge("messages that wait for Kafka")] = 0


class LiveSession:
    """One connection; a `pump.Handler`."""

    pump: Pump
    load: Final = 0  # it has no budget of its own; it pauses at `MAX_UNANSWERED` unanswered messages

    def __init__(
        self,
        live: Live,
        grant: Grant,
        connection: LiveConnection,
        expires_ms: int | None,
        limits: ClientLimits | None,
    ) -> None:
        self.live = live
        self._limits = limits
        self._reading: ReadingPause | None = None  # None: no rate limit
        self._sending: SendingPause | None = None
        self.grant = grant
        self.connection = connection
        self._subscriptions: dict[str, Subscription] = {}
        self._sender = Sender(lasting=True)
        self.unanswered = 0  # produce messages that wait for Kafka
        self._draining = False
        self._ended = BY_CLIENT  # why it ended, for presence
        self._expires_ms = expires_ms
        self._expiry = Expiry(live.services.wall_clock, self._expired)

    # pump.Handler

    def connected(self, pump: Pump) -> None:
        """Set up the session of a new connection."""
        self.pump = pump
        self.live.presence.online(self._presence_key, self, self.principal, self.principal, pump.peer)
        self._expiry.set(self._expires_ms)
        limits = self._limits
        if limits is not None and limits.incoming is not None:
            self._reading = ReadingPause(limits.incoming, self._pause, self._resume)
        if limits is not None and limits.outgoing is not None:
            self._sending = SendingPause(limits.outgoing, self.subject, self.writable)
        gate = self.live.services.publisher.gate
        gate.subscribe(self._on_gate)
        if not gate.is_open:
            self._pause(PROCESS_BUDGET)

    def handle(self, events: list[Any]) -> Awaitable[None] | None:
        """Act on the messages that were read."""
        for event in events:
            kind = type(event)
            if kind is ConnectionClosed or kind is ConnectionFailed:
                self._leave_all()
                continue
            self.live.counts.messages_total += 1
            if kind is BadMessage:
                self.refuse(event.id, event.error)
                continue
            try:
                _ACTIONS[kind](self, event)
            except RestError as error:
                self.refuse(event.id, error)
        return None

    def writable(self) -> None:
        """Request records again: the socket has capacity."""
        for subscription in tuple(self._subscriptions.values()):
            subscription.wake()

    def disconnected(self, reason: str) -> None:
        """End the session: its connection is closed."""
        self.live.presence.offline(self._presence_key, self, self._ended)
        self._leave_all()
        for pause in (self._reading, self._sending):
            if pause is not None:
                pause.end()
        if self._limits is not None:
            self._limits.leave()
        self._sender.leave()
        self._expiry.release()
        self.connection.release()
        self.live.services.publisher.gate.unsubscribe(self._on_gate)

    @property
    def subject(self) -> str:
        """See `gateway.flow.Flowing`."""
        return subject("http", self.grant.identity.name, self.pump.peer)

    @property
    def _presence_key(self) -> str:
        return stream_key(self.grant.names.mqtt(self.principal))

    def flow(self) -> ConnectionFlow | None:
        """See `gateway.flow.Flowing`."""
        shared = pauses.since(PROCESS_BUDGET, PROCESS) if self.pump.is_paused_for(PROCESS_BUDGET) else None
        producing = Window("produce", True, "", MAX_UNANSWERED, MAX_UNANSWERED - self.unanswered, self.unanswered)
        subscriptions = fullest(self._subscriptions.values(), lambda each: each.unsettled)
        return ConnectionFlow(
            protocol="http",
            peer=self.pump.peer,
            principal=shown(self.grant.identity.name),
            subject=self.subject,
            unwritten=self.pump.unwritten,
            windows=[producing, *(each.flow() for each in subscriptions)],
            windows_total=1 + len(self._subscriptions),
            paused=[] if shared is None else [shared],
        )

    # clients.Connected

    @property
    def identifier(self) -> str:
        """See `gateway.clients.Connected`."""
        return "" if self.left else f"http/{self.pump.peer}"

    @property
    def principal(self) -> str:
        """See `gateway.clients.Connected`."""
        return self.grant.identity.name

    @property
    def socket(self) -> Pump:
        """See `gateway.clients.Connected`."""
        return self.pump

    def view(self, *, whole: bool) -> ClientView:
        """See `gateway.clients.Connected`."""
        view = ClientView(
            id=self.identifier,
            protocol="http",
            kind="websocket",
            principal=self.principal,
            address=self.pump.peer,
            since=self.live.services.wall_clock() / 1000 - self.pump.age_s,
        )
        if whole:
            view.flow = self.flow()
            flows = [each.flow() for each in self._subscriptions.values()]
            view.subscriptions = [SubscriptionView(one.name, topic=one.topic) for one in flows[:SUBSCRIPTIONS]]
            view.subscriptions_total = len(flows)
        return view

    def kick(self) -> None:
        """Close the connection with 1008."""
        self._end(CLOSED)

    # for subscriptions

    @property
    def has_capacity(self) -> bool:
        """Whether one more record can be sent."""
        if self._sending is not None and not self._sending.is_open:
            return False
        return self.pump.writable and not self.connection.closing

    def send(self, payload: bytes) -> None:
        """Send a message soon."""
        self.connection.send(payload)
        self._flush()

    def send_frame(self, frame: bytes) -> None:
        """Send a record's frame soon."""
        self.connection.send_frame(frame)
        self.live.counts.records_out_total += 1
        if self._sending is not None:
            self._sending.spend(1, len(frame))
        self._flush()

    def refuse(self, name: str | None, error: RestError) -> None:
        """Answer a message with an error."""
        self.live.counts.errors_total += 1
        if error.status == FORBIDDEN:
            audit_denied(self.pump, self.grant, error.message)
        self.send(failed(name, error))

    def drop_subscription(self, subscription: Subscription, error: RestError) -> None:
        """Remove a subscription that failed, and answer it with an error."""
        if self._subscriptions.get(subscription.name) is subscription:
            del self._subscriptions[subscription.name]
            self.refuse(subscription.name, error)

    # messages

    def _produce(self, message: Produce) -> None:
        live, grant = self.live, self.grant
        topic = grant.names.topic(message.topic)
        if not grant.publish.some(topic):
            raise forbidden(f"publish to {message.topic}")
        if message.partition is not None and message.partition < 0:
            raise RestError(422, "The partition is negative")
        records = to_records(
            b'{"records":%b}' % bytes(message.records),
            message.format,
            topic=topic,
            partition=message.partition,
            limit=live.services.config.max_records,
            principal=grant.identity.name,
        )
        live.counts.records_in_total += len(records)
        if self._reading is not None:
            self._reading.spend(len(records), len(bytes(message.records)))
        if not records:
            self.send(produced(message.id, ()))
            return
        ticket = Ticket(len(records), grant.identity.name)
        ticket.done.add_done_callback(partial(self._produced, message.id, ticket))
        self.unanswered += 1
        if self.unanswered >= MAX_UNANSWERED:
            self._pause(UNANSWERED)
        submit_allowed(live.services.publisher, grant, records, ticket, sender=self._sender)

    def _produced(self, name: str, ticket: Ticket, done: asyncio.Future[None]) -> None:
        self.unanswered -= 1
        if self.pump.closed:
            return
        self.send(produced(name, ticket.results))
        if self.unanswered <= MAX_UNANSWERED // 2:
            self._resume(UNANSWERED)
        if self._draining and not self.unanswered:
            self._close()

    def _subscribe(self, message: Subscribe) -> None:
        if message.id in self._subscriptions:
            raise RestError(409, "There is a subscription with this id")
        if len(self._subscriptions) >= MOST_SUBSCRIPTIONS:
            raise RestError(422, f"A connection has at most {MOST_SUBSCRIPTIONS} subscriptions")
        if self._draining:
            raise busy(SHUTTING_DOWN)
        subscription = Subscription(self, self.grant, self.live.services, self.live.feeds, message)
        self._subscriptions[message.id] = subscription
        self.pump.spawn(self._join(subscription))

    async def _join(self, subscription: Subscription) -> None:
        try:
            await subscription.join()
        except RestError as error:
            self.drop_subscription(subscription, error)
        except Refused as refused:
            self.drop_subscription(subscription, refusal(refused))

    def _credit(self, message: Credit) -> None:
        self._subscription(message.id).grant(message.credit)

    def _acknowledge(self, message: Acknowledge) -> None:
        self._subscription(message.id).settle(message.deliveries, None)

    def _release_deliveries(self, message: Release) -> None:
        self._subscription(message.id).settle(message.deliveries, message.failed)

    def _unsubscribe(self, message: Unsubscribe) -> None:
        subscription = self._subscription(message.id)
        del self._subscriptions[message.id]
        subscription.leave()
        self.send(unsubscribed(message.id))

    def _subscription(self, name: str) -> Subscription:
        subscription = self._subscriptions.get(name)
        if subscription is None:
            raise RestError(404, "There is no subscription with this id")
        return subscription

    def rights_changed(self) -> None:
        """End the subscriptions that the client's changed rights no longer allow."""
        for subscription in tuple(self._subscriptions.values()):
            if subscription.is_refused:
                subscription.leave()
                self.drop_subscription(subscription, forbidden("keep this subscription: the rights have changed"))

    # the end

    @property
    def left(self) -> bool:
        """See `gateway.drain.Departing`."""
        return self.pump.closed or self.connection.closing

    def prepare_to_leave(self) -> bool:
        """Stop reading and sending; close the connection when Kafka has answered all submitted records."""
        self._draining = True
        self._ended = STOPPED
        self._pause(STOPPING)
        self._leave_all()
        if not self.unanswered:
            self._close()
        return True

    @property
    def may_leave(self) -> bool:
        """See `gateway.drain.Departing`."""
        return not self.unanswered

    def leave(self) -> None:
        """Do nothing: the answer to its last message has closed it."""

    def _close(self) -> None:
        self.connection.close(SERVICE_RESTART, "the gateway stops")
        self.pump.flush()

    def stop(self) -> None:
        """Close the connection now."""
        self._close()
        self.pump.close()

    def _expired(self) -> None:
        self._end("the token has expired")

    def _end(self, reason: str) -> None:
        self._ended = BY_SERVER
        self._leave_all()
        self.connection.close(POLICY_VIOLATION, reason)
        self.pump.flush()

    def _leave_all(self) -> None:
        subscriptions = tuple(self._subscriptions.values())
        self._subscriptions.clear()
        for subscription in subscriptions:
            subscription.leave()

    # pausing and resuming to read

    def _on_gate(self, is_open: bool) -> None:
        if is_open:
            self._resume(PROCESS_BUDGET)
        else:
            self._pause(PROCESS_BUDGET)

    def _pause(self, reason: str) -> None:
        self.connection.reading = False
        self.pump.pause_reading(reason)

    def _resume(self, reason: str) -> None:
        self.pump.resume_reading(reason)
        self.connection.reading = self.pump.reading

    def _flush(self) -> None:
        if self.connection.waiting >= PENDING:
            self.pump.flush()
        else:
            self.pump.flush_soon()


PENDING: Final = 64 * 1024  # bytes that are written immediately; fewer wait for the end of the loop iteration
_ACTIONS: Final[dict[type, Any]] = {
    Produce: LiveSession._produce,
    Subscribe: LiveSession._subscribe,
    Credit: LiveSession._credit,
    Acknowledge: LiveSession._acknowledge,
    Release: LiveSession._release_deliveries,
    Unsubscribe: LiveSession._unsubscribe,
}


class Live(OperationSet):
    """The operation that opens a live WebSocket, and the open sessions."""

    def __init__(self, services: RestServices, feeds: Feeds) -> None:
        self.services = services
        self.feeds = feeds
        self.counts = LiveStatistics()
        self.presence = HttpPresence(services.presence, services.wall_clock)
        self._sessions: dict[Pump, LiveSession] = {}
        self._writes = Writes()
        self._empty = asyncio.Event()
        self.operations = {"openStream": self.open}
        services.access_list.watch(self._rights_changed)

    async def open(self, call: Call) -> web.StreamResponse:
        """`GET /stream`."""
        config = self.services.config
        offer = check_upgrade(call.request)
        subprotocol = offer.choose((SUBPROTOCOL,))
        if len(self._sessions) >= config.max_streams:
            raise busy("There are too many streams; try again")

        def take_over(transport: asyncio.Transport, received: bytes) -> None:
            connection = LiveConnection(config.max_body_bytes, config.stream_heartbeat_s)
            session = LiveSession(self, call.grant, connection, call.expires_ms, call.connection.limits)
            services = self.services
            outgoing = services.publisher.budgets.outgoing
            clock, remove = services.clock, self._remove
            pump = Pump(connection, session, services.spawn, clock, remove, writes=self._writes, outgoing=outgoing)
            pump.source, pump.entrance = call.connection.source, call.connection.entrance
            self._sessions[pump] = session
            self.counts.opened_total += 1
            transport.set_protocol(pump)
            pump.connection_made(transport)
            if received:
                pump.data_received(received)

        return offer.accept(subprotocol, take_over)

    def _rights_changed(self, changed: AbstractSet[Grant]) -> None:
        for session in self.departing():
            if session.grant in changed:
                session.rights_changed()

    def _remove(self, pump: Pump) -> None:
        del self._sessions[pump]
        pump.entrance.connections -= 1
        if not self._sessions:
            self._empty.set()

    def departing(self) -> Iterable[LiveSession]:
        """Return the open sessions."""
        return tuple(self._sessions.values())

    async def drain(self) -> None:
        """Close every connection when Kafka has answered its submitted records."""
        for session in self.departing():
            session.prepare_to_leave()

    async def stop(self) -> None:
        """Close the open connections, and abort those that are left after `CLOSE_S`."""
        for session in tuple(self._sessions.values()):
            session.stop()
        if self._sessions:
            self._empty.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), CLOSE_S)
        for pump in tuple(self._sessions):
            pump.abort()

    def flowing(self) -> list[Flowing]:
        """Return the open sessions, for /flow."""
        return list(self._sessions.values())

    def statistics(self) -> LiveStatistics:
        """Return the counts so far."""
        unanswered = sum(session.unanswered for session in self._sessions.values())
        return msgspec.structs.replace(self.counts, open=len(self._sessions), unanswered=unanswered)
