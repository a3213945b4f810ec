"""Live streams of a topic: a record is read once for all streams, and encoded once for each form.

A stream is a subscriber of the live reader (`gateway.kafka.read`). One without capacity falls behind and is brought the
records later, so nothing is dropped and nothing waits in memory. With each record it is told a position, from which a
later stream goes on exactly behind it. All streams at the end of the log have the same position, which is encoded once
too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Final, Protocol

from gateway.kafka.contracts import Subscriber
from gateway.kafka.read.live_reader import LiveReader
from gateway.security.permissions import Permission
from mapping.record import Received
from mapping.rest.outgoing import RecordFilter
from protocols.rest.positions import format_position

LINGER_S: Final = 5.0  # a topic without streams is still watched for so long: most clients come back at once
DEMAND: Final = 500  # of a stream with capacity: it says itself when it has none left


class Form(Protocol):
    """How a record stands in a stream; hashable by identity, so that what was encoded is found again."""

    def encode(self, record: Received, position: str) -> bytes:
        """The bytes for the socket; `position` is behind the record."""


class Sink(Protocol):
    """The connection that a stream's bytes go to."""

    @property
    def has_capacity(self) -> bool:
        """Whether one more record can be taken."""

    def send(self, data: bytes) -> None:
        """Take the bytes of one record."""

    def gap(self, partition: int, lost: int) -> None:
        """Tell that retention had deleted records that the client asked for."""


class Feed:
    """One topic at the end of the log, and its streams."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        # by partition, the offset behind the last record that the live reader has passed
        self.offsets: dict[int, int] = {}
        # the streams; changed by `add` and `remove`. There may be thousands.
        self.subscribers: dict[FeedSubscriber, None] = {}
        self._selected: tuple[tuple[FeedSubscriber, None], ...] | None = ()
        self.users = 0  # streams, and requests that are about to open one
        self.watched = False
        self.watching = asyncio.Lock()
        self.lingering: asyncio.TimerHandle | None = None
        self._record: Received | None = None
        self._encoded: dict[Form, bytes] = {}
        self._position: str | None = None

    def select(self, record: Received) -> Collection[tuple[Subscriber, None]]:
        """Every stream of the topic (`contracts.Fanout`); the record is kept for `encoded`."""
        self.offsets[record.partition] = record.offset + 1
        self._record = record
        self._encoded.clear()
        self._position = None
        if self._selected is None:
            self._selected = tuple(self.subscribers.items())  # as of now: one may leave during an offer
        return self._selected

    def add(self, subscriber: FeedSubscriber) -> None:
        """Offer a stream the records that come."""
        self.subscribers[subscriber] = None
        self._selected = None

    def remove(self, subscriber: FeedSubscriber) -> bool:
        """Offer a stream nothing more; whether it was offered records before."""
        if subscriber not in self.subscribers:
            return False
        del self.subscribers[subscriber]
        self._selected = None
        return True

    def made_anew(self, topic: str) -> None:
        """The topic was deleted and made again: all of it is new (`contracts.Fanout`)."""
        self.offsets.clear()
        self._position = None
        for subscriber in self.subscribers:
            subscriber.made_anew()

    def encoded(self, form: Form) -> bytes:
        """The record that was selected last, in a form."""
        data = self._encoded.get(form)
        if data is None:
            assert self._record is not None
            data = self._encoded[form] = form.encode(self._record, self.position)
        return data

    @property
    def position(self) -> str:
        """The position behind the last record that the live reader has passed."""
        if self._position is None:
            self._position = format_position(self.offsets)
        return self._position


class FeedSubscriber:
    """One stream: a subscriber of a topic, for those of its records that the client chose and may read."""

    lossy: Final = False

    def __init__(
        self,
        feeds: Feeds,
        feed: Feed,
        form: Form,
        sink: Sink,
        *,
        chosen: RecordFilter,
        allowed: Permission | None,
        partition: int | None,
    ) -> None:
        """Called by `Feeds.join`, which says what the arguments are."""
        self._feeds = feeds
        self._live_reader = feeds.live_reader
        self.feed = feed
        self._form = form
        self._sink = sink
        self._chosen = chosen
        self._allowed = allowed
        self._partition = partition
        self._everything = chosen.everything and allowed is None and partition is None
        # Offsets by partition; None while they are the feed's. Empty: it has just fallen behind the live reader, which
        # knows its offsets.
        self._own: dict[int, int] | None = None

    def begin(self, start: Mapping[int, int]) -> None:
        """Read on from these offsets, whatever the live reader has passed."""
        self._own = dict(start)
        self._rejoin(self._own)

    @property
    def demand(self) -> int:
        """How many records may be offered; 0: no capacity (`contracts.Subscriber`)."""
        return DEMAND if self._sink.has_capacity else 0

    def offer_nowait(self, record: Received, context: object = None) -> bool:
        """Send the record if it is wanted; False: no capacity (`contracts.Subscriber`)."""
        own = self._own
        if own is None:
            if self._everything or self._wants(record):
                if not self._sink.has_capacity:
                    self._own = {}
                    return False
                self._sink.send(self.feed.encoded(self._form))
            return True
        if not own:
            own |= self._live_reader.places(self.feed.topic, self)
        partition = record.partition
        if record.offset < own.get(partition, 0):
            return True  # stored before the stream began
        wanted = self._everything or self._wants(record)
        if wanted and not self._sink.has_capacity:
            return False
        own[partition] = record.offset + 1
        if wanted:
            self._sink.send(self._form.encode(record, format_position(own)))
        if own[partition] == self.feed.offsets.get(partition):
            self._rejoin(own)
        return True

    def made_anew(self) -> None:
        """Be offered everything in a topic that was made again."""
        self._own = None

    def wake(self) -> None:
        """Be offered records again, if there is capacity."""
        if self._own is not None and self._sink.has_capacity:
            self._live_reader.resume(self)

    @property
    def position(self) -> str:
        """The position behind the last record that was offered."""
        if self._own is None:
            return self.feed.position
        return format_position(self._own or self._live_reader.places(self.feed.topic, self))

    def leave(self) -> None:
        """End the stream; it is offered nothing more."""
        self._feeds.leave(self)

    def _wants(self, record: Received) -> bool:
        if self._partition is not None and record.partition != self._partition:
            return False
        if not self._chosen.everything and not self._chosen.matches(record):
            return False
        return self._allowed is None or self._allowed(record.topic, record.key)

    def _rejoin(self, own: Mapping[int, int]) -> None:
        """Share the feed's offsets from now on, if they are the same."""
        offsets = self.feed.offsets
        if all(
            offsets.get(partition) == offset for partition, offset in own.items()
        ) and not self._live_reader.is_behind(self.feed.topic, self):
            self._own = None


class Feeds:
    """The feeds of all topics that have a stream."""

    def __init__(self, live_reader: LiveReader) -> None:
        """Watch a topic by `live_reader` while it has streams, and `LINGER_S` longer."""
        self.live_reader = live_reader
        self._feeds: dict[str, Feed] = {}

    async def join(
        self,
        topic: str,
        form: Form,
        sink: Sink,
        start: Mapping[int, int],
        *,
        chosen: RecordFilter,
        allowed: Permission | None = None,
        partition: int | None = None,
    ) -> FeedSubscriber:
        """Open a stream; the sink may be given records before this returns.

        `start` has the offsets to begin at, of all partitions or of the one. `allowed` judges each record by its key;
        None: all are allowed.

        Raises:
            Refused: as `LiveReader.watch`.
        """
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
            self._release(feed)
            raise
        subscriber = FeedSubscriber(self, feed, form, sink, chosen=chosen, allowed=allowed, partition=partition)
        # Nothing is waited for from here on: the live reader must not pass anything in between.
        for number, offset in self.live_reader.places(topic, subscriber).items():
            feed.offsets.setdefault(number, offset)
        feed.add(subscriber)
        for number, offset in start.items():
            gap: Callable[[int], None] = partial(sink.gap, number)
            self.live_reader.catch_up(topic, feed, subscriber, number, offset, gap)
        subscriber.begin(start)
        return subscriber

    def leave(self, subscriber: FeedSubscriber) -> None:
        """End a stream (`FeedSubscriber.leave`)."""
        feed = subscriber.feed
        if feed.remove(subscriber):
            self.live_reader.forget(subscriber)
            self._release(feed)

    def stop(self) -> None:
        """End all streams."""
        for feed in list(self._feeds.values()):
            if feed.lingering is not None:
                feed.lingering.cancel()
            feed.subscribers = {}  # a stream that leaves after this has left
            self._end(feed)

    def _release(self, feed: Feed) -> None:
        feed.users -= 1
        assert feed.users >= 0
        if not feed.users:
            feed.lingering = asyncio.get_running_loop().call_later(LINGER_S, self._end, feed)

    def _end(self, feed: Feed) -> None:
        del self._feeds[feed.topic]
        if feed.watched:
            self.live_reader.unwatch(feed.topic, feed)
