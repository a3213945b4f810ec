"""Server-sent events (WHATWG HTML section 9.2): streams a topic's records to browsers as they are stored.

A stream costs a socket, no task. Each event's `id` is a position; a browser that reconnects sends the
last one, so no record is missed or repeated. A stream in a consumer group gets a share of the records instead. There a
record is settled when the client's TCP stack has acknowledged its bytes, as a browser itself acknowledges nothing.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import random
import struct
import termios
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from aiohttp import web

from gateway.net.http.http_server import SERVER
from gateway.net.pump import Pump
from gateway.rest.consume.start_positions import find_span
from gateway.rest.present import BY_CLIENT, BY_SERVER, STOPPED
from gateway.rest.server.call import Call
from gateway.rest.server.request_login import forbidden
from gateway.rest.services import RestServices
from gateway.rest.streams.feeds import Feeds, FeedSubscriber, Form
from gateway.rest.streams.group_subscriber import GroupSubscriber, is_refused
from gateway.rest.streams.stream_session import PENDING, Streams, StreamSession
from gateway.views.clients import SubscriptionView
from gateway.views.flow import FlowWindow
from mapping.record import Received
from mapping.rest.outgoing import RecordFilter, view_line
from mapping.tenants import Names
from protocols.rest.errors import SHUTTING_DOWN, RestError, busy, unprocessable
from protocols.rest.media import Format
from protocols.rest.positions import BEGINNING, END, wanted
from protocols.rest.responses import encode
from protocols.rest.streams.event_connection import EventConnection
from protocols.rest.streams.streaming import EVENT_TYPE, chunk, event, retry
from telemetry.statistics import counter, gauge

RETRY_MS: Final = 2000
END_TIMEOUT_S: Final = 2.0  # how long a stream in a group waits at its end for the client's TCP acknowledgements
SETTLE_S: Final = 0.25  # between two checks of TCP acknowledgements
UNSETTLED: Final = 1000  # unsettled records of a group for one client
_NUMBER: Final = struct.Struct("i")


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


class EventStream(StreamSession):
    """One stream; a `feeds.Sink` and a `group_subscriber.Receiver`."""

    kind = "stream"
    connection: EventConnection

    def __init__(self, streams: EventStreams, topic: str, call: Call) -> None:
        super().__init__(streams, call, EventConnection(streams.services.config.stream_heartbeat_s))
        self.source: FeedSubscriber | GroupSubscriber | None = None  # provides records; set before it is connected
        self.form = event_form(Format(call.query["format"]), call.grant.names)
        self._topic = topic
        self._group: str | None = call.query.get("group")
        self._counts = streams.counts
        self._limit: int | None = call.query.get("limit")
        self._left: int | None = 0  # events that may still be sent; None: any number
        self._unsettled: deque[tuple[int, Received]] = deque()  # with the count of sent bytes up to the record's end
        self._settled = 0  # the same count for the latest settled record
        self._ending = False
        self._duration_ms: int | None = call.query.get("duration")
        self._end_timer: asyncio.TimerHandle | None = None
        self._settle_timer: asyncio.TimerHandle | None = None

    # pump.Handler

    def connected(self, pump: Pump) -> None:
        """Begin to send: the head of the answer was sent."""
        super().connected(pump)
        self._left = self._limit
        if self._duration_ms is not None:
            self._end_timer = asyncio.get_running_loop().call_later(self._duration_ms / 1000, self.end)
        self.rights_changed()  # while it joined
        self.writable()

    def handle(self, events: list[Any]) -> None:
        """Send a heartbeat: its time is the connection's only event."""
        if events and self.source is not None and self.pump.writable:
            self.connection.send_heartbeat(self.source.position)

    def writable(self) -> None:
        """Request records again."""
        if self.source is not None:
            self.source.wake()

    def disconnected(self, reason: str) -> None:
        """Leave the topic or the group: the connection is closed."""
        super().disconnected(reason)
        self._leave_source()

    # its end

    def end(self, reason: str = "") -> None:
        """End the answer after its last event; in a group, when that is settled or after `END_TIMEOUT_S` seconds."""
        self._left = 0
        if self._ended is BY_CLIENT:
            self._ended = BY_SERVER
        if not self._unsettled or self._ending:
            self._close()
            return
        self._ending = True
        if self._end_timer is not None:
            self._end_timer.cancel()
        self._end_timer = asyncio.get_running_loop().call_later(END_TIMEOUT_S, self._close)

    def _close(self) -> None:
        self._leave_source()
        self.connection.end()
        self.pump.flush()

    def _leave_source(self) -> None:
        """Leave the topic or the group; records that are not settled return to the group."""
        for timer in (self._end_timer, self._settle_timer):
            if timer is not None:
                timer.cancel()
        source, self.source = self.source, None
        if source is not None:
            source.leave()

    def rights_changed(self) -> None:
        """End the stream if the client's changed rights no longer allow it."""
        if is_refused(self.grant, self._topic, self._group):
            self.end()

    may_leave: Final = True

    @property
    def left(self) -> bool:
        """Whether the stream has ended, or ends with what it has sent."""
        return super().left or self._left == 0

    def prepare_to_leave(self) -> bool:
        """Return False: there is nothing to wait for, as events are sent when they come."""
        return False

    def leave(self) -> None:
        """End the stream, and let the client reconnect after a random time."""
        self._ended = STOPPED
        self.connection.send(chunk(retry(random.randint(RETRY_MS // 2, RETRY_MS * 3 // 2))))  # noqa: S311 - no secret
        self.flush()
        self.end()

    # for operators

    def windows(self) -> tuple[list[FlowWindow], int]:
        """Return its unsettled records. A browser grants no credit; only its socket limits the stream."""
        unsettled = len(self._unsettled)
        return [FlowWindow("events", False, self._topic, UNSETTLED, UNSETTLED - unsettled, unsettled)], 1

    def subscriptions(self) -> tuple[list[SubscriptionView], int]:
        """Return the topic."""
        return [SubscriptionView(self._topic)], 1

    # feeds.Sink

    @property
    def has_capacity(self) -> bool:
        """Whether one more event can be sent."""
        return self._left != 0 and self.can_send and not self.connection.closing

    def send(self, data: bytes) -> None:
        """Send an event; end the stream after the last one that the client requested."""
        connection = self.connection
        connection.send(data)
        if connection.waiting >= PENDING:
            self.pump.flush()
        elif not self.pump.flushing:
            self.pump.flush_soon()
        if self.sending is not None:
            self.sending.spend(1, len(data))
        self._counts.events_total += 1
        if self._left is not None:
            self._left -= 1
            if not self._left:
                asyncio.get_running_loop().call_soon(self.end)

    def gap(self, partition: int, lost: int) -> None:
        """Send an event `gap`: retention has deleted records that the client requested."""
        self.connection.send(chunk(event(encode({"partition": partition, "lost": lost}), kind="gap")))
        if self.source is not None:  # else it is not connected yet
            self.flush()

    # group_subscriber.Receiver

    @property
    def ready(self) -> bool:
        """Whether one more record of the group can be sent."""
        return self.has_capacity and len(self._unsettled) < UNSETTLED

    def deliver(self, record: Received) -> None:
        """Send a record of the group, and settle it when the client's TCP stack has acknowledged it."""
        if not self._unsettled:
            self._settled = self.connection.total
        self.send(self.form(record, ""))
        self._unsettled.append((self.connection.total, record))
        self._count()
        if self._settle_timer is None:
            self._settle_timer = asyncio.get_running_loop().call_later(SETTLE_S, self._settle)

    def _settle(self) -> None:
        self._settle_timer = None
        source, unsettled = self.source, self._unsettled
        assert isinstance(source, GroupSubscriber)
        acknowledged = self._acknowledged()
        while unsettled and unsettled[0][0] <= acknowledged:
            self._settled, record = unsettled.popleft()
            source.membership.done(record)
        self._count()
        if not unsettled and self._ending:
            self._close()
            return
        if unsettled:
            self._settle_timer = asyncio.get_running_loop().call_later(SETTLE_S, self._settle)
        source.wake()

    def _acknowledged(self) -> int:
        """Return a lower bound for the number of sent bytes that the peer's TCP stack has acknowledged.

        It is a lower bound because the kernel counts unacknowledged bytes on the wire, which TLS makes more.
        """
        transport = self.pump.transport
        socket = None if transport is None else transport.get_extra_info("socket")
        if socket is None:
            return 0
        (queued,) = _NUMBER.unpack(fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, bytes(_NUMBER.size)))
        return self.connection.total - self.connection.waiting - self.pump.unwritten - int(queued)

    def _count(self) -> None:
        """Report the unsettled bytes and records to the budget of all receivers."""
        if isinstance(self.source, GroupSubscriber):
            size = self.connection.total - self._settled if self._unsettled else 0
            self.source.hold(size, len(self._unsettled))


class EventStreams(Streams[EventStream]):
    """The operation that streams events."""

    name = "streams"

    def __init__(self, services: RestServices, feeds: Feeds) -> None:
        super().__init__(services, feeds)
        self.counts = StreamsStatistics()
        self._draining = False
        self.operations = {"streamRecords": self.stream}

    async def stream(self, call: Call, topic: str) -> web.StreamResponse:
        """`GET /topics/{topicname}/stream`."""
        call.negotiate(EVENT_TYPE)
        if call.request.version < (1, 1):
            raise RestError(505, "A stream needs HTTP/1.1", close=True)
        if not call.grant.subscribe.some(topic):
            raise forbidden(f"read {topic}")
        chosen = RecordFilter(call.query.get("key", ()), call.query.get("header", ()))
        try:
            self.check_full(call)
        except RestError:
            self.counts.refused_total += 1
            raise
        stream = EventStream(self, topic, call)
        self._opening += 1
        try:
            join = self._join_group if "group" in call.query else self._join_topic
            source = await join(call, topic, chosen, stream)
            try:
                if self._draining:
                    raise busy(SHUTTING_DOWN, close=True)
                answer, released = await _send_head(call)
            except BaseException:
                source.leave()
                raise
        finally:
            self._opening -= 1
        self.counts.opened_total += 1
        stream.source = source
        self.connect(stream, call.connection, *released)
        return answer

    async def _join_topic(self, call: Call, topic: str, chosen: RecordFilter, stream: EventStream) -> FeedSubscriber:
        """Join the topic at the place where the client wants to start."""
        start = wanted(call.query, call.header_values().get("Last-Event-ID"))
        span = await find_span(self.services.lookup, topic, start, END)
        subscriber = FeedSubscriber(
            self.feeds,
            topic,
            stream.form,
            stream,
            chosen=chosen,
            subscribe=call.grant.subscribe,
            partition=start.partition,
        )
        await subscriber.join(span.start)
        return subscriber

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
        subscriber = GroupSubscriber(stream, chosen, self.services)
        await subscriber.join(call.grant, query["group"], topic, start, call.connection.share)
        return subscriber

    async def drain(self) -> None:
        """End every stream after its last event."""
        self._draining = True
        for stream in self.departing():
            stream.leave()

    def statistics(self) -> StreamsStatistics:
        """Return the counts so far."""
        return msgspec.structs.replace(self.counts, open=len(self.pumps))


class _StreamHead(web.StreamResponse):
    """An answer whose end aiohttp must not write: `EventConnection.end` does."""

    async def write_eof(self, data: bytes = b"") -> None: ...


async def _send_head(call: Call) -> tuple[web.StreamResponse, tuple[asyncio.Transport, bytes]]:
    """Send the head of an endless answer, and take the socket from aiohttp, which writes nothing more to it.

    Raises:
        ConnectionError: The client has disconnected.
    """
    answer = _StreamHead(
        headers={
            "Content-Type": EVENT_TYPE,
            "Server": SERVER,
            "Cache-Control": "no-store",
            "Connection": "close",
            "X-Accel-Buffering": "no",  # makes proxies such as nginx forward without buffering
        }
    )
    await call.begin(answer)
    await answer.write(retry(RETRY_MS))
    released = call.connection.release()
    if released is None:
        raise ConnectionResetError("the client has left")
    return answer, released
