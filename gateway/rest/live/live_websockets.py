"""Live WebSockets: publish and subscribe over one connection, with acknowledgements and credit in both directions.

A session is driven by a pump, like those of MQTT and AMQP. Records go to the publisher immediately, in the order in
which they arrive, and a message is answered when its last record is settled. While Kafka is slow, the socket is not
read.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from aiohttp import web

from gateway.kafka.contracts import Refused
from gateway.kafka.publish.sender_partitions import RememberedSender
from gateway.limits.rate_pauses import ReadingPause
from gateway.net.http.upgrade import check_upgrade
from gateway.net.pump import Pump
from gateway.rest.live.live_subscription import LiveSubscription
from gateway.rest.parts import RestParts
from gateway.rest.present import BY_SERVER, STOPPED
from gateway.rest.produce.tickets import Ticket, submit_allowed
from gateway.rest.server.audited import FORBIDDEN, audit_denied
from gateway.rest.server.call import Call
from gateway.rest.server.request_dispatcher import refusal
from gateway.rest.server.request_login import forbidden
from gateway.rest.streams.stream_session import Streams, StreamSession
from gateway.views.clients import SUBSCRIPTIONS, SubscriptionView
from gateway.views.flow import FlowWindow, fullest
from gateway.views.pauses import PROCESS_BUDGET, UNANSWERED
from mapping.rest.incoming import to_records
from protocols.connection import ConnectionClosed, ConnectionFailed
from protocols.rest.errors import SHUTTING_DOWN, RestError, busy
from protocols.rest.streams.live_connection import LiveConnection
from protocols.rest.streams.live_messages import (
    SUBPROTOCOL,
    Acknowledge,
    BadMessage,
    Credit,
    LiveProduce,
    LiveSubscribe,
    LiveUnsubscribe,
    Release,
    failed,
    produced,
    unsubscribed,
)
from protocols.websocket import POLICY_VIOLATION, SERVICE_RESTART
from telemetry.statistics import counter, gauge

MOST_SUBSCRIPTIONS: Final = 256  # of one connection
MAX_UNANSWERED: Final = 1024  # unanswered produce messages of one connection; at this number it is not read
STOPPING: Final = "stopping"
CLOSE_S: Final = 1.0  # how long clients have to answer a Close frame


class LiveWebSocketStatistics(msgspec.Struct):
    """Counts of live WebSockets, since the start."""

    open: Annotated[int, gauge("open WebSockets")] = 0
    opened_total: Annotated[int, counter("WebSockets opened")] = 0
    messages_total: Annotated[int, counter("messages of clients")] = 0
    records_in_total: Annotated[int, counter("records published")] = 0
    records_out_total: Annotated[int, counter("records sent to clients")] = 0
    errors_total: Annotated[int, counter("messages answered by an error")] = 0
    unanswered: Annotated[int, gauge("messages that wait for Kafka")] = 0


class LiveSession(StreamSession):
    """One connection; it pauses reading at `MAX_UNANSWERED` unanswered messages."""

    kind = "websocket"
    connection: LiveConnection

    def __init__(self, live: Live, call: Call) -> None:
        config = live.services.config
        super().__init__(live, call, LiveConnection(config.max_body_bytes, config.stream_heartbeat_s))
        self._feeds = live.feeds
        self._counts = live.counts
        self._reading: ReadingPause | None = None  # None: no rate limit
        self._subscriptions: dict[str, LiveSubscription] = {}
        self._sender = RememberedSender(lasting=True)
        self.unanswered = 0  # produce messages that wait for Kafka
        self._draining = False

    # pump.Handler

    def connected(self, pump: Pump) -> None:
        """Set up the session of a new connection."""
        super().connected(pump)
        if self.limits is not None and self.limits.incoming is not None:
            self._reading = ReadingPause(self.limits.incoming, self._pause, self._resume)
        gate = self.services.publisher.gate
        gate.subscribe(self._on_gate)
        if not gate.is_open:
            self._pause(PROCESS_BUDGET)

    def handle(self, events: list[Any]) -> Awaitable[None] | None:
        """Act on the messages that were read, until one must wait for the client's rate."""
        reading = self._reading
        for position, event in enumerate(events):
            if type(event) is LiveProduce and reading is not None and reading.must_wait():
                return self._handle_late(reading, events[position:])
            if isinstance(event, ConnectionClosed | ConnectionFailed):
                self._leave_all()
                continue
            self._counts.messages_total += 1
            try:
                self._act(event)
            except RestError as error:
                self.refuse(event.id, error)
        return None

    async def _handle_late(self, reading: ReadingPause, events: list[Any]) -> None:
        await reading.over()
        waiting = None if self.pump.closed else self.handle(events)
        if waiting is not None:
            await waiting

    def _act(self, message: Any) -> None:
        match message:
            case LiveProduce():
                self._produce(message)
            case LiveSubscribe():
                self._subscribe(message)
            case LiveUnsubscribe():
                self._unsubscribe(message)
            case Credit():
                self._subscription(message.id).grant(message.credit)
            case Acknowledge():
                self._subscription(message.id).settle(message.deliveries, None)
            case Release():
                self._subscription(message.id).settle(message.deliveries, message.failed)
            case BadMessage():
                self.refuse(message.id, message.error)

    def writable(self) -> None:
        """Request records again: the socket has capacity."""
        for subscription in tuple(self._subscriptions.values()):
            subscription.wake()

    def disconnected(self, reason: str) -> None:
        """End the session: its connection is closed."""
        super().disconnected(reason)
        self._leave_all()
        if self._reading is not None:
            self._reading.end()
            self._reading = None  # avoids a reference cycle
        self._sender.leave()
        self.connection.release()
        self.services.publisher.gate.unsubscribe(self._on_gate)

    # for operators

    def windows(self) -> tuple[list[FlowWindow], int]:
        """Return the unanswered messages, and the fullest subscriptions."""
        producing = FlowWindow("produce", True, "", MAX_UNANSWERED, MAX_UNANSWERED - self.unanswered, self.unanswered)
        subscriptions = fullest(self._subscriptions.values(), lambda each: each.unsettled)
        return [producing, *(each.flow() for each in subscriptions)], 1 + len(self._subscriptions)

    def subscriptions(self) -> tuple[list[SubscriptionView], int]:
        """Return the first subscriptions, and the number of all."""
        flows = [each.flow() for each in itertools.islice(self._subscriptions.values(), SUBSCRIPTIONS)]
        return [SubscriptionView(flow.name, topic=flow.topic) for flow in flows], len(self._subscriptions)

    # for subscriptions

    @property
    def has_capacity(self) -> bool:
        """Whether one more record can be sent."""
        return self.can_send and not self.connection.closing

    def send(self, payload: bytes) -> None:
        """Send a message soon."""
        self.connection.send(payload)
        self.flush()

    def send_frame(self, frame: bytes) -> None:
        """Send a record's frame soon."""
        self.connection.send_frame(frame)
        self._counts.records_out_total += 1
        if self.sending is not None:
            self.sending.spend(1, len(frame))
        self.flush()

    def refuse(self, name: str | None, error: RestError) -> None:
        """Answer a message with an error."""
        self._counts.errors_total += 1
        if error.status == FORBIDDEN:
            audit_denied(self.pump, self.grant, error.message)
        self.send(failed(name, error))

    def drop_subscription(self, subscription: LiveSubscription, error: RestError) -> None:
        """Remove a subscription that failed, and answer it with an error."""
        if self._subscriptions.get(subscription.name) is subscription:
            del self._subscriptions[subscription.name]
            self.refuse(subscription.name, error)

    # messages

    def _produce(self, message: LiveProduce) -> None:
        grant = self.grant
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
            limit=self.services.config.max_records,
            principal=grant.identity.name,
        )
        self._counts.records_in_total += len(records)
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
        submit_allowed(self.services.publisher, grant, records, ticket, sender=self._sender)

    def _produced(self, name: str, ticket: Ticket, done: asyncio.Future[None]) -> None:
        self.unanswered -= 1
        if self.pump.closed:
            return
        self.send(produced(name, ticket.results))
        if self.unanswered <= MAX_UNANSWERED // 2:
            self._resume(UNANSWERED)
        if self._draining and not self.unanswered:
            self.close()

    def _subscribe(self, message: LiveSubscribe) -> None:
        if message.id in self._subscriptions:
            raise RestError(409, "There is a subscription with this id")
        if len(self._subscriptions) >= MOST_SUBSCRIPTIONS:
            raise RestError(422, f"A connection has at most {MOST_SUBSCRIPTIONS} subscriptions")
        if self._draining:
            raise busy(SHUTTING_DOWN)
        subscription = LiveSubscription(self, self.grant, self.services, self._feeds, message)
        self._subscriptions[message.id] = subscription
        self.pump.spawn(self._join(subscription))

    async def _join(self, subscription: LiveSubscription) -> None:
        try:
            await subscription.join()
        except RestError as error:
            self.drop_subscription(subscription, error)
        except Refused as refused:
            self.drop_subscription(subscription, refusal(refused))

    def _unsubscribe(self, message: LiveUnsubscribe) -> None:
        subscription = self._subscription(message.id)
        del self._subscriptions[message.id]
        subscription.leave()
        self.send(unsubscribed(message.id))

    def _subscription(self, name: str) -> LiveSubscription:
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

    def prepare_to_leave(self) -> bool:
        """Stop reading and sending; close the connection when Kafka has answered all submitted records."""
        self._draining = True
        self._ended = STOPPED
        self._pause(STOPPING)
        self._leave_all()
        if not self.unanswered:
            self.close()
        return True

    @property
    def may_leave(self) -> bool:
        """Whether all messages are answered."""
        return not self.unanswered

    def leave(self) -> None:
        """Do nothing: the answer to its last message has closed it."""

    def close(self) -> None:
        """Close the connection because the gateway stops."""
        self.connection.close(SERVICE_RESTART, "the gateway stops")
        self.pump.flush()

    def end(self, reason: str) -> None:
        """Close the connection with 1008."""
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


class Live(Streams[LiveSession]):
    """The operation that opens a live WebSocket."""

    name = "live"

    def __init__(self, rest: RestParts) -> None:
        super().__init__(rest.services, rest.feeds)
        self.counts = LiveWebSocketStatistics()
        self.operations = {"openStream": self.open}

    async def open(self, call: Call) -> web.StreamResponse:
        """`GET /stream`."""
        offer = check_upgrade(call.request)
        subprotocol = offer.choose((SUBPROTOCOL,))
        self.check_full(call)

        def take_over(transport: asyncio.Transport, received: bytes) -> None:
            self.counts.opened_total += 1
            self.connect(LiveSession(self, call), call.connection, transport, received)

        return offer.accept(subprotocol, take_over)

    async def drain(self) -> None:
        """Close every connection when Kafka has answered its submitted records."""
        for session in self.departing():
            session.prepare_to_leave()

    async def stop(self) -> None:
        """Close the open connections, and abort those that are left after `CLOSE_S`."""
        for session in self.departing():
            session.close()
        await self.pumps.close(CLOSE_S)

    def statistics(self) -> LiveWebSocketStatistics:
        """Return the counts so far."""
        unanswered = sum(session.unanswered for session in self.departing())
        return msgspec.structs.replace(self.counts, open=len(self.pumps), unanswered=unanswered)


OPERATIONS = (Live,)
