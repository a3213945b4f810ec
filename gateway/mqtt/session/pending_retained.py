"""The retained messages that are still to be sent to a session (section 3.3.1.3), by topic; read when they are sent.

A kept session must get them even if its connection ends in between. They are sent in the order of their offsets in
`__trivium_retained`, so the in-flight record needs one position for each subscription; after a reconnect the messages
above it are searched again.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Iterable

import msgspec

from gateway.mqtt.routing.retained import Position
from gateway.mqtt.state.records import PendingRetained, SessionSubscription


class Pending(msgspec.Struct, gc=False, eq=False):
    """The messages still to be sent to a subscription, or one message to be resent."""

    subscription: SessionSubscription  # sets QoS and subscription identifier
    packet_id: int = 0  # packet identifier of a resent message; 0: a new one
    progress: PendingRetained | None = None  # position that the in-flight record stores, for QoS 1 and 2
    # topics and positions of their messages, in sending order
    found: collections.deque[tuple[str, Position]] = msgspec.field(default_factory=collections.deque)
    is_found: bool = False  # the search is complete; nothing is sent before
    is_dropped: bool = False  # nothing more is to be sent


class RetainedQueue:
    """A queue of retained messages, and the progress of each subscription."""

    __slots__ = ("_pending", "_progress")

    def __init__(self, progress: Iterable[PendingRetained] = ()) -> None:
        """Start with the progress from an in-flight record and an empty queue."""
        self._pending: collections.OrderedDict[Pending, None] = collections.OrderedDict()  # in sending order
        self._progress = {id(replay): replay for replay in progress}

    @property
    def progress(self) -> tuple[PendingRetained, ...]:
        """The unfinished subscriptions, for the in-flight record."""
        return tuple(self._progress.values())

    def expect(self, topic_filter: str) -> PendingRetained:
        """Note that a subscription gets retained messages, before they are queued."""
        progress = PendingRetained(topic_filter)
        self._progress[id(progress)] = progress
        return progress

    def supersede(self, filters: Collection[str]) -> None:
        """Drop what waits for filters that are subscribed to again, except what is being sent: all is sent again."""
        for pending in [*itertools.islice(self._pending, 1, None)]:
            if not pending.packet_id and pending.subscription.options.topic_filter in filters:
                self._end(pending)

    def __bool__(self) -> bool:
        """Whether anything is still to be sent or searched."""
        return bool(self._pending or self._progress)

    def add(self, subscription: SessionSubscription, progress: PendingRetained | None = None) -> Pending:
        """Queue a subscription; the caller fills `found` and calls `send`."""
        pending = Pending(subscription, progress=progress)
        self._pending[pending] = None
        return pending

    def send(self, pending: Pending) -> None:
        """Release a completely searched subscription for sending; with `progress`, `found` is in offset order."""
        pending.is_found = True
        if not pending.found:
            self._end(pending)

    def add_again(self, topic: str, subscription: SessionSubscription, packet_id: int) -> None:
        """Queue a message that was sent before under `packet_id`."""
        again = collections.deque(((topic, (-1, -1)),))
        self._pending[Pending(subscription, packet_id, None, again, is_found=True)] = None

    @property
    def first(self) -> Pending | None:
        """The subscription whose first message is the next to send, or None if nothing can be sent now."""
        first = next(iter(self._pending), None)
        return first if first is not None and first.is_found else None

    def pop(self) -> None:
        """Remove the next message: it was sent, or need not be sent."""
        pending = next(iter(self._pending))
        position = pending.found.popleft()[1]
        if pending.progress is not None:
            pending.progress.partition, pending.progress.offset = position
        if not pending.found:
            self._end(pending)

    def forget(self, topic_filter: str) -> None:
        """Drop the messages of an unsubscribed filter, except one that is being resent [MQTT-3.10.4-2]."""
        for pending in [*self._pending]:
            if not pending.packet_id and pending.subscription.options.topic_filter == topic_filter:
                self._end(pending)
        # one that was expected, and not queued yet
        self._progress = {key: replay for key, replay in self._progress.items() if replay.topic_filter != topic_filter}

    def clear(self) -> None:
        """Empty the queue after the connection has ended; the progress is kept."""
        for pending in self._pending:
            pending.is_dropped = True
        self._pending.clear()

    def _end(self, pending: Pending) -> None:
        pending.is_dropped = True
        del self._pending[pending]
        self._progress.pop(id(pending.progress), None)
