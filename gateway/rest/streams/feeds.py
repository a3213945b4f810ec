"""Live streams of a topic: what is read once goes to all listeners, encoded once for each form.

A listener is a subscriber of the live reader (`gateway.kafka.read`): one without capacity falls behind and gets all
later, so nothing is dropped and nothing waits in memory. With each record it is told a position, from which a later
stream goes on exactly behind it. All who are at the end of the log have the same position, so that even this is encoded
once.
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
from mapping.rest_view import RecordFilter
from protocols.rest.positions import format_position

LINGER_S: Final = 5.0  # a topic without listeners is still watched for so long: most come back at once
DEMAND: Final = 500  # of a listener with capacity: it says itself when there is none left


class Form(Protocol):
    """How a record stands in a stream; hashable by identity, so that what was encoded is found again."""

    def encode(self, record: Received, position: str) -> bytes:
        """The bytes for the socket; `position` is behind the record."""
        ...


class Sink(Protocol):
    """Where a listener's bytes go."""

    @property
    def room(self) -> bool:
        """Whether one more record can be taken."""
        ...

    def send(self, data: bytes) -> None:
        """Take the bytes of one record."""
        ...

    def gap(self, partition: int, lost: int) -> None:
        """Retention had deleted records that the listener asked for."""
        ...


class Feed:
    """One topic at the end of the log, and who listens.

    Attributes:
        places: by partition, the offset behind what the live reader has passed.
        users: who listens, or is about to.
        listeners: who does; changed by `add` and `remove`. There may be thousands.
    """

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.places: dict[int, int] = {}
        self.listeners: dict[Listener, None] = {}
        self._subscribers: tuple[tuple[Listener, None], ...] | None = ()
        self.users = 0
        self.watched = False
        self.watching = asyncio.Lock()
        self.lingering: asyncio.TimerHandle | None = None
        self._record: Received | None = None
        self._encoded: dict[Form, bytes] = {}
        self._position: str | None = None

    def select(self, record: Received) -> Collection[tuple[Subscriber, None]]:
        """See `contracts.Fanout`."""
        self.places[record.partition] = record.offset + 1
        self._record = record
        self._encoded.clear()
        self._position = None
        if self._subscribers is None:
            self._subscribers = tuple(self.listeners.items())  # as of now: one may leave during an offer
        return self._subscribers

    def add(self, listener: Listener) -> None:
        """Offer it what comes."""
        self.listeners[listener] = None
        self._subscribers = None

    def remove(self, listener: Listener) -> bool:
        """Offer it nothing more; whether it listened."""
        if listener not in self.listeners:
            return False
        del self.listeners[listener]
        self._subscribers = None
        return True

    def encoded(self, form: Form) -> bytes:
        """The record that was selected last, in a form."""
        data = self._encoded.get(form)
        if data is None:
            assert self._record is not None
            data = self._encoded[form] = form.encode(self._record, self.position)
        return data

    @property
    def position(self) -> str:
        """Behind what the live reader has passed."""
        if self._position is None:
            self._position = format_position(self.places)
        return self._position


class Listener:
    """One stream: a subscriber that wants some of a topic's records."""

    lossy: Final = False

    def __init__(
        self,
        live_reader: LiveReader,
        feed: Feed,
        form: Form,
        sink: Sink,
        *,
        chosen: RecordFilter,
        allowed: Permission | None,
        partition: int | None,
    ) -> None:
        """Made by `Feeds.join`."""
        self._live_reader = live_reader
        self.feed = feed
        self._form = form
        self._sink = sink
        self._chosen = chosen
        self._allowed = allowed
        self._partition = partition
        self._everything = chosen.everything and allowed is None and partition is None
        # None while its place is the feed's. Empty: it has just fallen behind, and the live reader knows where.
        self._own: dict[int, int] | None = None

    def begin(self, start: Mapping[int, int]) -> None:
        """Go on from here, whatever the live reader has passed."""
        self._own = dict(start)
        self._rejoin(self._own)

    @property
    def demand(self) -> int:
        """See `contracts.Subscriber`."""
        return DEMAND if self._sink.room else 0

    def offer_nowait(self, record: Received, context: object = None) -> bool:
        """See `contracts.Subscriber`."""
        own = self._own
        if own is None:
            if self._everything or self._wants(record):
                if not self._sink.room:
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
        if wanted and not self._sink.room:
            return False
        own[partition] = record.offset + 1
        if wanted:
            self._sink.send(self._form.encode(record, format_position(own)))
        if own[partition] == self.feed.places.get(partition):
            self._rejoin(own)
        return True

    def wake(self) -> None:
        """There may be capacity again."""
        if self._own is not None and self._sink.room:
            self._live_reader.resume(self)

    @property
    def position(self) -> str:
        """Behind everything that was offered."""
        if self._own is None:
            return self.feed.position
        return format_position(self._own or self._live_reader.places(self.feed.topic, self))

    def _wants(self, record: Received) -> bool:
        if self._partition is not None and record.partition != self._partition:
            return False
        if not self._chosen.everything and not self._chosen.matches(record):
            return False
        return self._allowed is None or self._allowed(record.topic, record.key)

    def _rejoin(self, own: Mapping[int, int]) -> None:
        """Share the feed's place from now on, if it is the same."""
        places = self.feed.places
        if all(
            places.get(partition) == offset for partition, offset in own.items()
        ) and not self._live_reader.is_behind(self.feed.topic, self):
            self._own = None


class Feeds:
    """All topics that somebody listens to."""

    def __init__(self, live_reader: LiveReader) -> None:
        """Nothing is watched before somebody listens."""
        self._live_reader = live_reader
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
    ) -> Listener:
        """Listen; the sink may be given records before this returns.

        Args:
            topic: its name.
            form: how the sink wants records.
            sink: gets them.
            start: by partition, the offset to begin at: of all partitions, or of the one.
            chosen: which records.
            allowed: judges each record by its key; None: all are allowed.
            partition: of this one alone.

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
                    await self._live_reader.watch(topic, feed)
                    feed.watched = True
        except BaseException:
            self._release(feed)
            raise
        listener = Listener(self._live_reader, feed, form, sink, chosen=chosen, allowed=allowed, partition=partition)
        # Nothing is waited for from here on: the live reader must not pass anything in between.
        for number, offset in self._live_reader.places(topic, listener).items():
            feed.places.setdefault(number, offset)
        feed.add(listener)
        for number, offset in start.items():
            gap: Callable[[int], None] = partial(sink.gap, number)
            self._live_reader.catch_up(topic, feed, listener, number, offset, gap)
        listener.begin(start)
        return listener

    def leave(self, listener: Listener) -> None:
        """Listen no more."""
        feed = listener.feed
        if feed.remove(listener):
            self._live_reader.forget(listener)
            self._release(feed)

    def stop(self) -> None:
        """Nobody listens any more."""
        for feed in list(self._feeds.values()):
            if feed.lingering is not None:
                feed.lingering.cancel()
            feed.listeners = {}  # who leaves after this has left
            self._end(feed)

    def _release(self, feed: Feed) -> None:
        feed.users -= 1
        assert feed.users >= 0
        if not feed.users:
            feed.lingering = asyncio.get_running_loop().call_later(LINGER_S, self._end, feed)

    def _end(self, feed: Feed) -> None:
        del self._feeds[feed.topic]
        if feed.watched:
            self._live_reader.unwatch(feed.topic, feed)
