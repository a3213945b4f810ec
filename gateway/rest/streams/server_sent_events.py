"""Server-sent events (WHATWG HTML section 9.2): a topic's records as they are stored, to any number of browsers.

A stream costs a socket and two timers, no task. Its events have a position as their `id`; a browser that comes back
says the last one, and nothing is missed or doubled. A stream in a consumer group takes its share instead: what the
client's machine has acknowledged is settled, and no browser says that it has dealt with a record.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from aiohttp import web

from gateway.kafka.groups.membership import Membership, OffsetReset
from gateway.net.pump import Writes
from gateway.rest.consume.start_positions import find_span
from gateway.rest.server.call import Call
from gateway.rest.server.operation_set import Handler, OperationSet
from gateway.rest.server.request_login import forbidden
from gateway.rest.services import RestServices
from gateway.rest.streams.feeds import Feeds, Form, Listener
from gateway.rest.streams.group_shares import Share
from gateway.rest.streams.stream_socket import StreamSocket, begin_stream
from gateway.security.expiry import Expiry
from gateway.statistics import counter, gauge
from mapping.record import Received
from mapping.rest_view import RecordFilter, view_line
from protocols.rest.errors import RestError, busy, unprocessable
from protocols.rest.media import Format
from protocols.rest.positions import BEGINNING, END, wanted
from protocols.rest.responses import encode
from protocols.rest.streaming import EVENT_TYPE, chunk, event, heartbeat, retry

RETRY_MS: Final = 2000
LAST_S: Final = 2.0
SETTLE_S: Final = 0.25  # between two looks at what a client's machine has acknowledged
UNSETTLED: Final = 1000  # records of a group that are on their way to one client


class EventForm:
    """A record as an event, in a chunk of its own."""

    def __init__(self, embedded: Format) -> None:
        self.embedded = embedded

    def encode(self, record: Received, position: str) -> bytes:
        """See `feeds.Form`."""
        return chunk(event(view_line(record, self.embedded), position))


FORMS: Final[dict[str, Form]] = {embedded.value: EventForm(embedded) for embedded in Format}


class StreamsStatistics(msgspec.Struct, frozen=True):
    """What streams of events came to, since the start."""

    open: Annotated[int, gauge("open streams of events")]
    opened_total: Annotated[int, counter("streams opened")]
    events_total: Annotated[int, counter("events sent")]
    refused_total: Annotated[int, counter("streams refused because there are too many")]


class EventStream:
    """One stream. Its listener or share is set when it has joined, and gives it records."""

    def __init__(self, streams: EventStreams, limit: int | None) -> None:
        self.socket = StreamSocket(streams.writes, self)
        self.listener: Listener | None = None
        self.share: Share | None = None
        self.form: Form = FORMS[Format.JSON.value]
        self._streams = streams
        self._left = limit
        self._unsettled: deque[tuple[int, Received]] = deque()  # and the bytes sent when it was
        self._ending = False
        self._heart: asyncio.TimerHandle | None = None
        self._over: asyncio.TimerHandle | None = None
        self._settling: asyncio.TimerHandle | None = None
        self._expiry = Expiry(streams.wall_clock, self.end)

    def start(self, heartbeat_s: float, duration_s: float | None, expires_ms: int | None) -> None:
        """The head of the answer was sent."""
        loop = asyncio.get_running_loop()
        self._heart = loop.call_later(heartbeat_s, self._beat, heartbeat_s)
        if duration_s is not None:
            self._over = loop.call_later(duration_s, self.end)
        self._expiry.set(expires_ms)

    def end(self) -> None:
        """End the answer behind its last event; in a group, when that is settled or `LAST_S` seconds have passed."""
        self._left = 0
        if not self._unsettled or self._ending:
            self.socket.end()
            return
        self._ending = True
        if self._over is not None:
            self._over.cancel()
        self._over = asyncio.get_running_loop().call_later(LAST_S, self.socket.end)

    # feeds.Sink

    @property
    def room(self) -> bool:
        """See `feeds.Sink`."""
        return self.socket.room and self._left != 0

    def send(self, data: bytes) -> None:
        """See `feeds.Sink`."""
        self.socket.send(data)
        self._streams.events += 1
        if self._left is not None:
            self._left -= 1
            if not self._left:
                asyncio.get_running_loop().call_soon(self.end)

    def gap(self, partition: int, lost: int) -> None:
        """See `feeds.Sink`."""
        self.socket.send(chunk(event(encode({"partition": partition, "lost": lost}), kind="gap")))

    # shares.Receiver

    @property
    def ready(self) -> bool:
        """See `shares.Receiver`."""
        return self.room and len(self._unsettled) < UNSETTLED

    def deliver(self, record: Received) -> None:
        """See `shares.Receiver`."""
        self.send(self.form.encode(record, ""))
        self._unsettled.append((self.socket.total, record))
        if self._settling is None:
            self._settling = asyncio.get_running_loop().call_later(SETTLE_S, self._settle)

    def _settle(self) -> None:
        self._settling = None
        share, unsettled = self.share, self._unsettled
        assert share is not None
        there = self.socket.acknowledged()
        while unsettled and unsettled[0][0] <= there:
            share.done(unsettled.popleft()[1])
        if not unsettled and self._ending:
            self.socket.end()
            return
        if unsettled:
            self._settling = asyncio.get_running_loop().call_later(SETTLE_S, self._settle)
        share.wake()

    # stream_socket.StreamUser

    def writable(self) -> None:
        """See `stream_socket.StreamUser`."""
        if self.listener is not None:
            self.listener.wake()
        if self.share is not None:
            self.share.wake()

    def closed(self) -> None:
        """See `stream_socket.StreamUser`."""
        for timer in (self._heart, self._over, self._settling):
            if timer is not None:
                timer.cancel()
        self._expiry.release()
        self._streams.forget(self)

    def _beat(self, period: float) -> None:
        """Say that we are there, unless an event has."""
        self._heart = asyncio.get_running_loop().call_later(period, self._beat, period)
        if not self.socket.busy and self.socket.room:
            position = "" if self.listener is None else self.listener.position
            self.socket.send(chunk(heartbeat(position)))
        self.socket.busy = False


class EventStreams(OperationSet):
    """The operation that streams events."""

    def __init__(self, services: RestServices, feeds: Feeds) -> None:
        """Listen through `feeds`."""
        self.writes = Writes()
        self.wall_clock = services.wall_clock
        self.events = 0
        self._config = services.config
        self._spawn = services.spawn
        self._lookup = services.lookup
        self._groups = services.groups
        self._names = services.names
        self._feeds = feeds
        self._streams: set[EventStream] = set()
        self._draining = False
        self._opened = self._refused = 0

    def operations(self) -> Mapping[str, Handler]:
        """See `OperationSet`."""
        return {"streamRecords": self.stream}

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
            self._refused += 1
            raise busy("There are too many streams; try again")
        stream = EventStream(self, query.get("limit"))
        stream.form = FORMS[query["format"]]
        self._streams.add(stream)
        try:
            if "group" in query:
                stream.share = await self._share(call, topic, chosen, stream)
            else:
                start = wanted(query, call.header_values().get("Last-Event-ID"))
                span = await find_span(self._lookup, topic, start, END)
                stream.listener = await self._feeds.join(
                    topic,
                    stream.form,
                    stream,
                    span.start,
                    chosen=chosen,
                    allowed=None if subscribe.uniform(topic) else subscribe,
                    partition=start.partition,
                )
            if self._draining:
                raise busy("The gateway is shutting down", close=True)
            answer = await begin_stream(call, EVENT_TYPE, retry(RETRY_MS), stream.socket)
        except BaseException:
            self.forget(stream)
            raise
        self._opened += 1
        duration = query.get("duration")
        if stream in self._streams:
            stream.start(
                self._config.stream_heartbeat_s, None if duration is None else duration / 1000, call.expires_ms
            )
        return answer

    async def _share(self, call: Call, topic: str, chosen: RecordFilter, stream: EventStream) -> Share:
        """Join the consumer group that the query names."""
        query: Mapping[str, Any] = call.query
        if not call.grant.subscribe.whole_topic(topic):
            raise forbidden(f"read {topic} in a group: that needs the whole topic")
        for name in ("partition", "offset", "timestamp"):
            if name in query:
                raise unprocessable(f"A group knows its place by itself - at query parameter `{name}`")
        place = query.get("from", END)
        if place not in (BEGINNING, END):
            raise unprocessable("A group begins at the beginning or the end - at query parameter `from`")
        reset: OffsetReset = "earliest" if place == BEGINNING else "latest"
        await self._names.admit(call.grant, query["group"], topic)
        share = Share(stream, chosen)
        membership: Membership = await self._groups.join(query["group"], [topic], share, offset_reset=reset)
        share.joined(membership)
        return share

    def forget(self, stream: EventStream) -> None:
        """The stream is over."""
        if stream not in self._streams:
            return
        self._streams.discard(stream)
        listener, stream.listener = stream.listener, None
        if listener is not None:
            self._feeds.leave(listener)
        if stream.share is not None:
            self._spawn(stream.share.leave())

    async def drain(self) -> None:
        """End all streams, each behind its last event."""
        self._draining = True
        for stream in list(self._streams):
            stream.end()

    async def stop(self) -> None:
        """Streams whose clients have not read their end are cut off."""
        for stream in list(self._streams):
            stream.socket.abort()

    def statistics(self) -> StreamsStatistics:
        """Counts so far."""
        return StreamsStatistics(
            open=len(self._streams),
            opened_total=self._opened,
            events_total=self.events,
            refused_total=self._refused,
        )
