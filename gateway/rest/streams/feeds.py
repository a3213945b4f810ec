"""Live streams of a topic: a record is read once for all streams, and encoded once for each form.

A stream is a subscriber of the live reader (`gateway.kafka.read`). A stream without capacity falls behind and gets the
records later from the log, so nothing is dropped or kept in memory. Each record is sent with the position behind it,
from which a later stream can continue. All streams at the end of the log have the same position, which is also encoded
only once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

from gateway.kafka.contracts import Fanout, Subscriber
from gateway.kafka.read.live_reader import LiveReader
from gateway.security.rights.permissions import Permission
from mapping.record import Received
from mapping.rest.outgoing import RecordFilter
from protocols.rest.positions import format_position

LINGER_S: Final = 5.0  # how long a topic without streams is still watched: most clients reconnect immediately
SHARED_FORMS: Final = 64  # whose bytes of the latest record are kept, besides those of the first form
SHARED_BYTES: Final = 64 * 1024  # the most bytes of each
DEMAND: Final = 500  # of a stream with capacity; it refuses records when it has none left


Form = Callable[[Received, str], bytes]
"""Returns the bytes of a record for the sockets of all streams with this form, given the position behind it."""


class Sink(Protocol):
    """The connection that a stream writes to."""

    @property
    def has_capacity(self) -> bool:
        """Whether one more record can be sent."""

    def send(self, data: bytes) -> None:
        """Send the bytes of one record."""

    def gap(self, partition: int, lost: int) -> None:
        """Report that retention has deleted `lost` records that the client requested."""


class Feed(Fanout):
    """One topic that is read at the end of the log, and its streams."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        # by partition, the offset behind the last record that the live reader has passed
        self.offsets: dict[int, int] = {}
        # the streams, perhaps thousands; changed only by `add` and `remove`
        self.subscribers: dict[FeedSubscriber, None] = {}
        self._selected: tuple[tuple[FeedSubscriber, None], ...] | None = ()
        self.users = 0  # streams, and requests that are opening one
        self.watched = False
        self.watching = asyncio.Lock()
        self.lingering: asyncio.TimerHandle | None = None
        self._record: Received  # most recently selected
        self._encoded: dict[Form, bytes] = {}
        self._position: str | None = None

    def select(self, records: Sequence[Received], at: int) -> tuple[Collection[tuple[Subscriber, None]], int]:
        """Return every stream of the topic, and keep the record for `encoded` (`contracts.Fanout`)."""
        record = records[at]
        self.offsets[record.partition] = record.offset + 1
        self._record = record
        self._encoded.clear()
        self._position = None
        if self._selected is None:
            self._selected = tuple(self.subscribers.items())  # a copy, as a stream may leave during an offer
        return self._selected, 1

    def add(self, subscriber: FeedSubscriber) -> None:
        """Offer the records to a stream from now on."""
        self.subscribers[subscriber] = None
        self._selected = None

    def remove(self, subscriber: FeedSubscriber) -> bool:
        """Stop offering records to a stream; returns False if it was removed before."""
        if subscriber not in self.subscribers:
            return False
        del self.subscribers[subscriber]
        self._selected = None
        return True

    def topic_recreated(self, topic: str) -> None:
        """The topic was deleted and re-created: all its records are new (`contracts.Fanout`)."""
        self.offsets.clear()
        self._position = None
        for subscriber in self.subscribers:
            subscriber.topic_recreated()

    def encoded(self, form: Form) -> bytes:
        """Return the most recently selected record, encoded by `form`.

        The result is kept until the next record, within bounds: clients choose how many forms there are.
        """
        kept = self._encoded
        data = kept.get(form)
        if data is None:
            data = form(self._record, self.position)
            if not kept or (len(kept) < SHARED_FORMS and len(data) <= SHARED_BYTES):
                kept[form] = data
        return data

    @property
    def position(self) -> str:
        """The position behind the last record that the live reader has passed."""
        if self._position is None:
            self._position = format_position(self.offsets)
        return self._position


class FeedSubscriber(Subscriber):
    """One stream: a subscriber of a topic for the records that the client chose and may read."""

    feed: Feed  # once it has joined

    def __init__(
        self,
        feeds: Feeds,
        topic: str,
        form: Form,
        sink: Sink,
        *,
        chosen: RecordFilter,
        subscribe: Permission,
        partition: int | None,
    ) -> None:
        """`subscribe` is the client's right, which may depend on a record's key. `partition`: None means all."""
        self._feeds = feeds
        self._live_reader = feeds.live_reader
        self._topic = topic
        self._form = form
        self._sink = sink
        self._chosen = chosen
        self._allowed = None if subscribe.uniform(topic) else subscribe
        self._partition = partition
        self._everything = chosen.everything and self._allowed is None and partition is None
        # Offsets by partition. None while they are the same as the feed's; empty if it has just fallen behind the live
        # reader, which knows them.
        self._own: dict[int, int] | None = None

    async def join(self, start: Mapping[int, int]) -> None:
        """Start at these offsets, of all chosen partitions. The sink may get records before this returns.

        Raises:
            Refused: As `LiveReader.watch`.
        """
        feed = self.feed = await self._feeds.watch(self._topic)
        # No await from here on: the live reader must not pass a record meanwhile.
        for number, offset in self._live_reader.positions(self._topic, self).items():
            feed.offsets.setdefault(number, offset)
        feed.add(self)
        for number, offset in start.items():
            gap: Callable[[int], None] = partial(self._sink.gap, number)
            self._live_reader.catch_up(self._topic, feed, self, number, offset, gap)
        self._own = dict(start)
        self._rejoin(self._own)

    @property
    def demand(self) -> int:
        """The number of records that may be offered; 0 without capacity (`contracts.Subscriber`)."""
        return DEMAND if self._sink.has_capacity else 0

    def offer_nowait(self, record: Received, context: object = None) -> bool:
        """Send the record if it matches; False without capacity (`contracts.Subscriber`)."""
        own = self._own
        if own is None:
            if self._everything or self._wants(record):
                if not self._sink.has_capacity:
                    self._own = {}
                    return False
                self._sink.send(self.feed.encoded(self._form))
            return True
        if not own:
            own |= self._live_reader.positions(self._topic, self)
        partition = record.partition
        if record.offset < own.get(partition, 0):
            return True  # before the stream's start
        wanted = self._everything or self._wants(record)
        if wanted and not self._sink.has_capacity:
            return False
        own[partition] = record.offset + 1
        if wanted:
            self._sink.send(self._form(record, format_position(own)))
        if own[partition] == self.feed.offsets.get(partition):
            self._rejoin(own)
        return True

    def topic_recreated(self) -> None:
        """Accept all records of a topic that was re-created."""
        self._own = None

    def wake(self) -> None:
        """Request records again if there is capacity."""
        if self._own is not None and self._sink.has_capacity:
            self._live_reader.resume(self)

    @property
    def position(self) -> str:
        """The position behind the last offered record."""
        if self._own is None:
            return self.feed.position
        return format_position(self._own or self._live_reader.positions(self._topic, self))

    def leave(self) -> None:
        """End the stream; it may have ended before."""
        if self.feed.remove(self):
            self._live_reader.forget(self)
            self._feeds.release(self.feed)

    def _wants(self, record: Received) -> bool:
        if self._partition is not None and record.partition != self._partition:
            return False
        if not self._chosen.everything and not self._chosen.matches(record):
            return False
        return self._allowed is None or self._allowed(record.topic, record.key)

    def _rejoin(self, own: Mapping[int, int]) -> None:
        """Use the feed's offsets from now on if they are the same."""
        offsets = self.feed.offsets
        if all(
            offsets.get(partition) == offset for partition, offset in own.items()
        ) and not self._live_reader.is_behind(self._topic, self):
            self._own = None


class Feeds:
    """The feeds of all topics that have a stream."""

    def __init__(self, live_reader: LiveReader) -> None:
        """Watch a topic with `live_reader` while it has streams, and `LINGER_S` longer."""
        self.live_reader = live_reader
        self._feeds: dict[str, Feed] = {}

    async def watch(self, topic: str) -> Feed:
        """Return the feed of a topic for one more stream, which must `release` it; raises Refused."""
        feed = self._feeds.get(topic)
        if feed is None:
            feed = self._feeds[topic] = Feed(topic)
        feed.users += 1
        if feed.lingering is not None:
            feed.lingering.cancel()
            feed.lingering = None
        try:
            async with feed.watching:
                if not feed.watched:
                    await self.live_reader.watch(topic, feed)
                    feed.watched = True
        except BaseException:
            self.release(feed)
            raise
        return feed

    def stop(self) -> None:
        """End all streams."""
        for feed in list(self._feeds.values()):
            if feed.lingering is not None:
                feed.lingering.cancel()
            feed.subscribers = {}  # so that a later `leave` does nothing
            self._end(feed)

    def release(self, feed: Feed) -> None:
        """Note that a stream has left, or was not opened; a topic without streams is watched for `LINGER_S` longer."""
        feed.users -= 1
        assert feed.users >= 0
        if not feed.users:
            feed.lingering = asyncio.get_running_loop().call_later(LINGER_S, self._end, feed)

    def _end(self, feed: Feed) -> None:
        del self._feeds[feed.topic]
        if feed.watched:
            self.live_reader.unwatch(feed.topic, feed)
