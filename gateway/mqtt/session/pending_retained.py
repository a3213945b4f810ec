"""Retained messages that a session is still to be sent (section 3.3.1.3), by name: they are read when they are sent.

A kept session must get them although its connection ends in between. Its flight record notes for each subscription
how far it has come: they are sent in the order of their places in `__trivium_retained`, so one place says it all, and
after a reconnect those above it are looked up anew.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

import msgspec

from gateway.mqtt.state.records import Owed, Wish

Place = tuple[int, int]
"""Partition and offset in the topic of retained messages."""


class Waiting(msgspec.Struct, gc=False):
    """One message to be sent.

    Attributes:
        topic: its MQTT topic.
        wish: how it is sent.
        packet_id: under which identifier it goes again; 0: a new one.
        place: where it was when it was queued.
        owed: the subscription that it is for, where that is noted.
    """

    topic: str
    wish: Wish
    packet_id: int = 0
    place: Place = (-1, -1)
    owed: Owed | None = None


class RetainedQueue:
    """See the module."""

    __slots__ = ("_owed", "_waiting")

    def __init__(self, owed: Iterable[Owed] = ()) -> None:
        """Begin with what a flight record tells; nothing waits before `add`."""
        self._waiting: collections.deque[Waiting] = collections.deque()
        self._owed: list[Owed] = list(owed)

    def __bool__(self) -> bool:
        """Whether something waits."""
        return bool(self._waiting)

    @property
    def owed(self) -> tuple[Owed, ...]:
        """What a flight record tells: the subscriptions that have not come to their end."""
        return tuple(self._owed)

    def owe(self, topic_filter: str) -> Owed:
        """A subscription gets its retained messages: note it before they are queued."""
        owed = Owed(topic_filter)
        self._owed.append(owed)
        return owed

    def add(self, wish: Wish, found: Iterable[tuple[str, Place]], owed: Owed | None = None) -> None:
        """Queue what was found for a subscription, in the order of the places if it is owed."""
        self._waiting.extend(Waiting(topic, wish, 0, place, owed) for topic, place in found)
        if owed is not None and not (self._waiting and self._waiting[-1].owed is owed):
            self._settle(owed)  # nothing was found

    def add_again(self, topic: str, wish: Wish, packet_id: int) -> None:
        """Queue a message that was sent before under `packet_id`."""
        self._waiting.append(Waiting(topic, wish, packet_id))

    def first(self) -> Waiting:
        """The next one, which stays."""
        return self._waiting[0]

    def pop(self) -> None:
        """The next one was sent, or need not be."""
        done = self._waiting.popleft()
        owed = done.owed
        if owed is None:
            return
        owed.partition, owed.offset = done.place
        if not (self._waiting and self._waiting[0].owed is owed):
            self._settle(owed)

    def forget(self, topic_filter: str) -> None:
        """The client has unsubscribed: nothing new is sent for it [MQTT-3.10.4-2]."""
        self._owed = [owed for owed in self._owed if owed.topic_filter != topic_filter]
        self._waiting = collections.deque(
            waiting
            for waiting in self._waiting
            if waiting.packet_id or waiting.wish.options.topic_filter != topic_filter
        )

    def clear(self) -> None:
        """The connection is gone; what is owed is known."""
        self._waiting.clear()

    def _settle(self, owed: Owed) -> None:
        self._owed = [other for other in self._owed if other is not owed]
