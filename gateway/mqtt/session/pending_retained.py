"""Retained messages that a session is still to be sent (section 3.3.1.3), by name: they are read when they are sent.

A kept session must get them although its connection ends in between. Its in-flight record notes for each subscription
how far it has come: they are sent in the order of their places in `__trivium_retained`, so one place says it all, and
after a reconnect those above it are looked up anew.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

import msgspec

from gateway.mqtt.routing.retained import Place
from gateway.mqtt.state.records import PendingRetained, SessionSubscription


class Pending(msgspec.Struct, gc=False, eq=False):
    """What a subscription is still to be sent, or one message again."""

    subscription: SessionSubscription  # how it is sent
    packet_id: int = 0  # under which identifier it goes again; 0: a new one
    progress: PendingRetained | None = None  # the note of how far it has come, where that is needed
    # topics and where their messages were, in the order in which they are sent
    found: collections.deque[tuple[str, Place]] = msgspec.field(default_factory=collections.deque)
    is_found: bool = False  # whether that is all; nothing is sent before
    is_dropped: bool = False  # nothing of it is to be sent any more


class RetainedQueue:
    """A queue of retained messages, and how far each subscription has come in it."""

    __slots__ = ("_pending", "_progress")

    def __init__(self, progress: Iterable[PendingRetained] = ()) -> None:
        """Begin with what an in-flight record tells; nothing waits before `add`."""
        self._pending: collections.deque[Pending] = collections.deque()
        self._progress: list[PendingRetained] = list(progress)

    @property
    def progress(self) -> tuple[PendingRetained, ...]:
        """What an in-flight record tells: the subscriptions that have not come to their end."""
        return tuple(self._progress)

    def expect(self, topic_filter: str) -> PendingRetained:
        """A subscription gets its retained messages: note it before they are queued."""
        progress = PendingRetained(topic_filter)
        self._progress.append(progress)
        return progress

    def __bool__(self) -> bool:
        """Whether anything is to be sent, or to be looked for."""
        return bool(self._pending or self._progress)

    def add(self, subscription: SessionSubscription, progress: PendingRetained | None = None) -> Pending:
        """Queue what a subscription is to be sent; its `found` is to be filled, see `send`."""
        pending = Pending(subscription, progress=progress)
        self._pending.append(pending)
        return pending

    def send(self, pending: Pending) -> None:
        """All is found; in the order of the places if it has a note of its progress."""
        pending.is_found = True
        if not pending.found:
            self._end(pending)

    def add_again(self, topic: str, subscription: SessionSubscription, packet_id: int) -> None:
        """Queue a message that was sent before under `packet_id`."""
        pending = Pending(subscription, packet_id, None, collections.deque(((topic, (-1, -1)),)), is_found=True)
        self._pending.append(pending)

    @property
    def first(self) -> Pending | None:
        """Whose first message is the next one; None: nothing can be sent now."""
        return self._pending[0] if self._pending and self._pending[0].is_found else None

    def pop(self) -> None:
        """The next one was sent, or need not be."""
        pending = self._pending[0]
        place = pending.found.popleft()[1]
        if pending.progress is not None:
            pending.progress.partition, pending.progress.offset = place
        if not pending.found:
            self._end(pending)

    def forget(self, topic_filter: str) -> None:
        """The client has unsubscribed: nothing new is sent for it [MQTT-3.10.4-2]."""
        self._progress = [progress for progress in self._progress if progress.topic_filter != topic_filter]
        self._drop(
            pending
            for pending in self._pending
            if not pending.packet_id and pending.subscription.options.topic_filter == topic_filter
        )

    def clear(self) -> None:
        """The connection is gone; the progress is known."""
        self._drop(self._pending)

    def _drop(self, dropped: Iterable[Pending]) -> None:
        for pending in dropped:
            pending.is_dropped = True
        self._pending = collections.deque(pending for pending in self._pending if not pending.is_dropped)

    def _end(self, pending: Pending) -> None:
        self._pending.remove(pending)
        self._progress = [progress for progress in self._progress if progress is not pending.progress]
