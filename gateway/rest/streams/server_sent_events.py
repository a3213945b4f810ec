"""Server-sent events (WHATWG HTML section 9.2): streams a topic's records to browsers as they are stored.

A stream costs a socket and two timers, no task. Each event's `id` is a position; a browser that reconnects sends the
last one, so no record is missed or repeated. A stream in a consumer group gets a share of the records instead. There a
record is settled when the client's TCP stack has acknowledged its bytes, as a browser itself acknowledges nothing.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Final

import msgspec
from aiohttp import web

from gateway.clients import ClientView, SubscriptionView
from gateway.flow import ConnectionFlow, Flowing, Window, shown, subject
from gateway.limits.brakes import SendingPause
from gateway.limits.limits import ClientLimits
from gateway.net.writes import Writes
from gateway.rest.consume.start_positions import find_span
from gateway.rest.present import BY_CLIENT, BY_SERVER, STOPPED, HttpPresence, stream_key
from gateway.rest.server.call import Call
from gateway.rest.server.operation_set import OperationSet
from gateway.rest.server.request_login import forbidden
from gateway.rest.services import RestServices
from gateway.rest.streams.feeds import Feeds, FeedSubscriber, Form
from gateway.rest.streams.group_subscriber import GroupSubscriber, is_refused
from gateway.rest.streams.stream_socket import StreamSocket, begin_stream
from gateway.security.authorization import Grant
from gateway.security.expiry import Expiry
from gateway.statistics import counter, gauge
from mapping.record import Received
from mapping.rest.outgoing import RecordFilter, view_line
from mapping.tenants import Names
from protocols.rest.errors import SHUTTING_DOWN, RestError, busy, unprocessable
from protocols.rest.media import Format
from protocols.rest.positions import BEGINNING, END, wanted
from protocols.rest.responses import encode
from protocols.rest.streaming import EVENT_TYPE, chunk, event, heartbeat, retry

RETRY_MS: Final = 2000
END_TIMEOUT_S: Final = 2.0  # how long a stream in a group waits at its end for the client's TCP acknowledgements
SETTLE_S: Final = 0.25  # between two checks of TCP acknowledgements
UNSETTLED: Final = 1000  # unsettled records of a group for one client


@functools.lru_cache(maxsize=1024)
def event_form(embedded: Format, names: Names) -> Form:
    """Return what encodes records as events in HTTP chunks, shared by all clients of a tenant."""

    def event_chunk(record: Received, position: str) -> bytes:
        return chunk(event(view_line(names.shown(record), embedded), position))

    return event_chunk


class StreamsStatistics(msgspec.Struct):
    """Counts of event streams, since the start."""

    open: Annotated[int, gauge("open streams of events")] = 0
    opened_total: Annotated[int, counter("streams opened")] = 0
    events_total: Annotated[int, counter("events sent")] = 0
    refused_total: Annotated[int, counter("streams refused because there are too many")] = 0


class EventStream:
    """One stream; a `feeds.Sink`, a `group_subscriber.Receiver` and a `stream_socket.StreamUser`."""

    load: Final = 0  # it publishes nothing

    def __init__(self, streams: EventStreams, topic: str, call: Call, limit: int | None) -> None:
        self.socket = StreamSocket(streams.writes, streams.outgoing, self)
        self.source: FeedSubscriber | GroupSubscriber | None = None  # provides records; set once it has joined
        self.form = event_form(Format(call.query["format"]), call.grant.names)
        self._peer = call.connection.peer
        self.principal = call.grant.identity.name
        self._since = streams.wall_clock() / 1000
        self.presence_key = stream_key(call.grant.names.mqtt(self.principal))
        self._topic = topic
        self.grant = call.grant
        self._group: str | None = call.query.get("group")
        self._streams = streams
        self._left = limit
        self._unsettled: deque[tuple[int, Received]] = deque()  # with the count of sent bytes up to the record's end
        self._settled = 0  # the same count for the latest settled record
        self._ending = False
        self._ended = BY_CLIENT  # why it ended, for presence
        self._heartbeat_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None
        self._settle_timer: asyncio.TimerHandle | None = None
        self._expiry = Expiry(streams.wall_clock, self.end)
        self.limits: ClientLimits | None = None  # of the connection, once the stream owns it
        self._sending: SendingPause | None = None  # None: no rate limit
        limits = call.connection.limits
        if limits is not None and limits.outgoing is not None:
            self._sending = SendingPause(limits.outgoing, self.subject, self.writable)

    def start(self, heartbeat_s: float, duration_s: float | None, expires_ms: int | None) -> None:
        """Start the timers, after the head of the answer was sent."""
        loop = asyncio.get_running_loop()
        self._heartbeat_timer = loop.call_later(heartbeat_s, self._send_heartbeat, heartbeat_s)
        if duration_s is not None:
            self._end_timer = loop.call_later(duration_s, self.end)
        self._expiry.set(expires_ms)

    def end(self) -> None:
        """End the answer after its last event; in a group, when that is settled or after `END_TIMEOUT_S` seconds."""
        self._left = 0
        if self._ended is BY_CLIENT:
            self._ended = BY_SERVER
        if not self._unsettled or self._ending:
            self.socket.end()
            return
        self._ending = True
        if self._end_timer is not None:
            self._end_timer.cancel()
        self._end_timer = asyncio.get_running_loop().call_later(END_TIMEOUT_S, self.socket.end)

    def rights_changed(self) -> None:
        """End the stream if the client's changed rights no longer allow it."""
        if is_refused(self.grant, self._topic, self._group):
            self.end()

    # drain.Departing

    may_leave: Final = True

    @property
    def left(self) -> bool:
        """See `gateway.drain.Departing`."""
        return self.socket.closed or self._left == 0

    def prepare_to_leave(self) -> bool:
        """Return False: there is nothing to wait for, as events are sent when they come."""
        return False

    def leave(self) -> None:
        """End the stream, and let the client reconnect after a random time."""
        self._ended = STOPPED
        self.socket.send(chunk(retry(random.randint(RETRY_MS // 2, RETRY_MS * 3 // 2))))  # noqa: S311 - no secret
        self.end()

    # flow.Flowing

    @property
    def subject(self) -> str:
        """See `gateway.flow.Flowing`."""
        return subject("http", self.principal, self._peer)

    def flow(self) -> ConnectionFlow:
        """See `gateway.flow.Flowing`. A browser grants no credit; only its socket limits the stream."""
        unsettled = len(self._unsettled)
        events = Window("events", False, self._topic, UNSETTLED, UNSETTLED - unsettled, unsettled)
        return ConnectionFlow(
            protocol="http",
            peer=self._peer,
            principal=shown(self.principal),
            subject=self.subject,
            unwritten=self.socket.unwritten,
            windows=[events],
            windows_total=1,
        )

    # clients.Connected

    @property
    def identifier(self) -> str:
        """See `gateway.clients.Connected`."""
        return "" if self.left else f"http/{self._peer}"

    def view(self, *, whole: bool) -> ClientView:
        """See `gateway.clients.Connected`."""
        view = ClientView(
            id=self.identifier,
            protocol="http",
            kind="stream",
            principal=self.principal,
            address=self._peer,
            since=self._since,
        )
        if whole:
            view.flow = self.flow()
            view.subscriptions, view.subscriptions_total = [SubscriptionView(self._topic)], 1
        return view

    def kick(self) -> None:
        """End the answer after its last event."""
        self.end()

    # feeds.Sink

    @property
    def has_capacity(self) -> bool:
        """Whether one more event can be sent."""
        if self._sending is not None and not self._sending.is_open:
            return False
        return self.socket.has_capacity and self._left != 0

    def send(self, data: bytes) -> None:
        """Send an event; end the stream after the last one that the client requested."""
        self.socket.send(data)
        if self._sending is not None:
            self._sending.spend(1, len(data))
        self._streams.counts.events_total += 1
        if self._left is not None:
            self._left -= 1
            if not self._left:
                asyncio.get_running_loop().call_soon(self.end)

    def gap(self, partition: int, lost: int) -> None:
        """Send an event `gap`: retention has deleted records that the client requested."""
        self.socket.send(chunk(event(encode({"partition": partition, "lost": lost}), kind="gap")))

    # group_subscriber.Receiver

    @property
    def ready(self) -> bool:
        """Whether one more record of the group can be sent."""
        return self.has_capacity and len(self._unsettled) < UNSETTLED

    def deliver(self, record: Received) -> None:
        """Send a record of the group, and settle it when the client's TCP stack has acknowledged it."""
        if not self._unsettled:
            self._settled = self.socket.total
        self.send(self.form(record, ""))
        self._unsettled.append((self.socket.total, record))
        self._count()
        if self._settle_timer is None:
            self._settle_timer = asyncio.get_running_loop().call_later(SETTLE_S, self._settle)

    def _settle(self) -> None:
        self._settle_timer = None
        source, unsettled = self.source, self._unsettled
        assert isinstance(source, GroupSubscriber)
        acknowledged = self.socket.acknowledged()
        while unsettled and unsettled[0][0] <= acknowledged:
            self._settled, record = unsettled.popleft()
            source.done(record)
        self._count()
        if not unsettled and self._ending:
            self.socket.end()
            return
        if unsettled:
            self._settle_timer = asyncio.get_running_loop().call_later(SETTLE_S, self._settle)
        source.wake()

    def _count(self) -> None:
        """Report the unsettled bytes and records to the budget of all receivers."""
        if isinstance(self.source, GroupSubscriber):
            size = self.socket.total - self._settled if self._unsettled else 0
            self.source.hold(size, len(self._unsettled))

    # stream_socket.StreamUser

    def writable(self) -> None:
        """Request records again."""
        if self.source is not None:
            self.source.wake()

    def closed(self) -> None:
        """End the stream: its connection is closed."""
        for timer in (self._heartbeat_timer, self._end_timer, self._settle_timer):
            if timer is not None:
                timer.cancel()
        self._expiry.release()
        self._streams.presence.offline(self.presence_key, self, self._ended)
        self._streams.forget(self)

    def leave_limits(self) -> None:
        """Stop counting against the client's limits."""
        if self._sending is not None:
            self._sending.end()
        if self.limits is not None:
            self.limits.leave()

    def _send_heartbeat(self, period: float) -> None:
        """Send a comment if nothing else was sent for a while."""
        self._heartbeat_timer = asyncio.get_running_loop().call_later(period, self._send_heartbeat, period)
        if not self.socket.busy and self.socket.has_capacity:
            position = "" if self.source is None else self.source.position
            self.socket.send(chunk(heartbeat(position)))
        self.socket.busy = False


class EventStreams(OperationSet):
    """The operation that streams events."""

    def __init__(self, services: RestServices, feeds: Feeds) -> None:
        self.writes = Writes()
        self.outgoing = services.publisher.budgets.outgoing
        self.wall_clock = services.wall_clock
        self.presence = HttpPresence(services.presence, services.wall_clock)
        self.counts = StreamsStatistics()
        self._config = services.config
        self._services = services
        self._feeds = feeds
        self._streams: set[EventStream] = set()
        self._draining = False
        self.operations = {"streamRecords": self.stream}
        services.access_list.watch(self._rights_changed)

    async def stream(self, call: Call, topic: str) -> web.StreamResponse:
        """`GET /topics/{topicname}/stream`."""
        query, subscribe = call.query, call.grant.subscribe
        call.negotiate(EVENT_TYPE)
        if call.request.version < (1, 1):
            raise RestError(505, "A stream needs HTTP/1.1", close=True)
        if not subscribe.some(topic):
            raise forbidden(f"read {topic}")
        chosen = RecordFilter(query.get("key", ()), query.get("header", ()))
        if len(self._streams) >= self._config.max_streams:
            self.counts.refused_total += 1
            raise busy("There are too many streams; try again")
        stream = EventStream(self, topic, call, query.get("limit"))
        self._streams.add(stream)
        try:
            if "group" in query:
                stream.source = await self._join_group(call, topic, chosen, stream)
            else:
                start = wanted(query, call.header_values().get("Last-Event-ID"))
                span = await find_span(self._services.lookup, topic, start, END)
                stream.source = await self._feeds.join(
                    topic,
                    stream.form,
                    stream,
                    span.start,
                    chosen=chosen,
                    subscribe=subscribe,
                    partition=start.partition,
                )
            if self._draining:
                raise busy(SHUTTING_DOWN, close=True)
            answer = await begin_stream(call, EVENT_TYPE, retry(RETRY_MS), stream.socket)
            stream.limits = call.connection.limits
        except BaseException:
            self.forget(stream)
            raise
        self.counts.opened_total += 1
        duration = query.get("duration")
        if stream not in self._streams:  # its client has disconnected meanwhile
            stream.leave_limits()
        else:
            self.presence.online(stream.presence_key, stream, stream.principal, stream.principal, call.connection.peer)
            stream.start(
                self._config.stream_heartbeat_s, None if duration is None else duration / 1000, call.expires_ms
            )
        return answer

    async def _join_group(self, call: Call, topic: str, chosen: RecordFilter, stream: EventStream) -> GroupSubscriber:
        """Join the consumer group that the query names."""
        query: Mapping[str, Any] = call.query
        if not call.grant.subscribe.whole_topic(topic):
            raise forbidden(f"read {topic} in a group: that needs the whole topic")
        for name in ("partition", "offset", "timestamp"):
            if name in query:
                raise unprocessable(f"A group starts at its committed offsets - at query parameter `{name}`")
        start = query.get("from", END)
        if start not in (BEGINNING, END):
            raise unprocessable("A group can only start at the beginning or the end - at query parameter `from`")
        subscriber = GroupSubscriber(stream, chosen, self._services)
        await subscriber.join(call.grant, query["group"], topic, start)
        return subscriber

    def forget(self, stream: EventStream) -> None:
        """Leave the topic or the group of a stream that has ended."""
        if stream in self._streams:
            self._streams.discard(stream)
            stream.leave_limits()
            source, stream.source = stream.source, None
            if source is not None:
                source.leave()

    def _rights_changed(self, changed: AbstractSet[Grant]) -> None:
        for stream in self.departing():
            if stream.grant in changed:
                stream.rights_changed()

    def departing(self) -> Iterable[EventStream]:
        """Return the open streams."""
        return tuple(self._streams)

    async def drain(self) -> None:
        """End every stream after its last event."""
        self._draining = True
        for stream in self.departing():
            stream.leave()

    async def stop(self) -> None:
        """Abort the connections of clients that have not read the end of their streams."""
        for stream in list(self._streams):
            stream.socket.abort()

    def flowing(self) -> list[Flowing]:
        """Return the open streams, for /flow."""
        return list(self._streams)

    def statistics(self) -> StreamsStatistics:
        """Return the counts so far."""
        return msgspec.structs.replace(self.counts, open=len(self._streams))
