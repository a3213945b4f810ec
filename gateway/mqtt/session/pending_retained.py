"""Retained messages that a session is still to be sent (section 3.3.1.3), by name: they are read when they are sent.

A kept session must get them although its connection ends in between. Its flight record notes for each subscription
how far it has come: they are sent in the order of their places in `__trivium_retained`, so one place says it all, and
after a reconnect those above it are looked up anew.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

import msgspec

from gateway.mqtt.routing.retained import Place
from gateway.mqtt.state.records import Owed, Wish


class Pending(msgspec.Struct, gc=False, eq=False):
    """What a subscription is still to be sent, or one message again.

    Attributes:
        wish: how it is sent.
        packet_id: under which identifier it goes again; 0: a new one.
        owed: the note of how far it has come, where that is needed.
        found: topics and where their messages were, in the order in which they are sent.
        is_found: whether that is all; nothing is sent before.
        is_dropped: nothing of it is to be sent any more.
    """

    wish: Wish
    packet_id: int = 0
    owed: Owed | None = None
    found: collections.deque[tuple[str, Place]] = msgspec.field(default_factory=collections.deque)
    is_found: bool = False
    is_dropped: bool = False


class RetainedQueue:
    """See the module."""

    __slots__ = ("_owed", "_pending")

    def __init__(self, owed: Iterable[Owed] = ()) -> None:
        """Begin with what a flight record tells; nothing waits before `add`."""
        self._pending: collections.deque[Pending] = collections.deque()
        self._owed: list[Owed] = list(owed)

    @property
    def owed(self) -> tuple[Owed, ...]:
        """What a flight record tells: the subscriptions that have not come to their end."""
        return tuple(self._owed)

    def owe(self, topic_filter: str) -> Owed:
        """A subscription gets its retained messages: note it before they are queued."""
        owed = Owed(topic_filter)
        self._owed.append(owed)
        return owed

    def __bool__(self) -> bool:
        """Whether anything is to be sent, or to be looked for."""
        return bool(self._pending or self._owed)

    def add(self, wish: Wish, owed: Owed | None = None) -> Pending:
        """Queue what a subscription is to be sent; its `found` is to be filled, see `send`."""
        pending = Pending(wish, owed=owed)
        self._pending.append(pending)
        return pending

    def send(self, pending: Pending) -> None:
        """All is found; in the order of the places if it is owed."""
        pending.is_found = True
        if not pending.found:
            self._end(pending)

    def add_again(self, topic: str, wish: Wish, packet_id: int) -> None:
        """Queue a message that was sent before under `packet_id`."""
        pending = Pending(wish, packet_id, None, collections.deque(((topic, (-1, -1)),)), is_found=True)
        self._pending.append(pending)

    @property
    def first(self) -> Pending | None:
        """Whose first message is the next one; None: nothing can be sent now."""
        return self._pending[0] if self._pending and self._pending[0].is_found else None

    def pop(self) -> None:
        """The next one was sent, or need not be."""
        pending = self._pending[0]
        place = pending.found.popleft()[1]
        if pending.owed is not None:
            pending.owed.partition, pending.owed.offset = place
        if not pending.found:
            self._end(pending)

    def forget(self, topic_filter: str) -> None:
        """The client has unsubscribed: nothing new is sent for it [MQTT-3.10.4-2]."""
        self._owed = [owed for owed in self._owed if owed.topic_filter != topic_filter]
        self._drop(
            pending
            for pending in self._pending
            if not pending.packet_id and pending.wish.options.topic_filter == topic_filter
        )

    def clear(self) -> None:
        """The connection is gone; what is owed is known."""
        self._drop(self._pending)

    def _drop(self, dropped: Iterable[Pending]) -> None:
        for pending in dropped:
            pending.is_dropped = True
        self._pending = collections.deque(pending for pending in self._pending if not pending.is_dropped)

    def _end(self, pending: Pending) -> None:
        self._pending.remove(pending)
        self._owed = [owed for owed in self._owed if owed is not pending.owed]
