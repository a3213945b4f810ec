"""Delivers a client's own messages before their acknowledgements, if `mqtt.echo_wait_ms` is set (ADR 0021).

A client that subscribes to its own topic gets its message from the live reader, and PUBACK or PUBCOMP after Kafka's
answer, in either order. With the setting the acknowledgement waits until the live reader has passed the record, and the
copy of a QoS 2 message waits for its PUBREC. Neither waits longer than the setting allows.

There is no future, task or timer per message: waiting callbacks are ordered, and one timer serves the first.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from gateway.kafka.read.live_reader import LiveReader
from mapping.mqtt.outgoing import MqttDelivery
from mapping.record import Received

Callback = tuple[Callable[[Any], None], Any]
"""Callback and argument."""

NO_OFFSET: Final = -1


class _Waiting(msgspec.Struct, eq=False):
    """A waiting callback; `then` is None once it was called."""

    offset: int
    deadline: float
    then: Callback | None


class SelfDelivery:
    """The callbacks of this process that wait for the live reader, each for at most the same time."""

    def __init__(self, live_reader: LiveReader, wait_s: float, clock: Callable[[], float]) -> None:
        """Subscribe to `live_reader`'s positions; a callback waits at most `wait_s` seconds of `clock`."""
        self._live_reader = live_reader
        self._wait_s = wait_s
        self._clock = clock
        self._places: dict[tuple[str, int], collections.deque[_Waiting]] = {}
        self._all: collections.deque[_Waiting] = collections.deque()  # in the order of their deadlines
        self._timer: asyncio.TimerHandle | None = None
        live_reader.distributor.passed = self._passed

    def after(self, topic: str, partition: int, offset: int, then: Callback) -> None:
        """Call `then` when the live reader has passed a record, which may be now, or when the time is up.

        If the live reader has no position in the partition yet, the topic was created by this record, and reading
        starts soon: the client subscribes to it.
        """
        position = self._live_reader.position(topic, partition)
        if position is not None and position > offset:
            then[0](then[1])
            return
        waiting = self._wait(offset, then)
        self._places.setdefault((topic, partition), collections.deque()).append(waiting)

    def later(self, then: Callback) -> None:
        """Call `then` when the time is up."""
        self._wait(NO_OFFSET, then)

    def release(self) -> None:
        """Call everything that waits, because the gateway stops."""
        self._places.clear()
        waiting, self._all = self._all, collections.deque()
        for waiter in waiting:
            _call(waiter)

    def _wait(self, offset: int, then: Callback) -> _Waiting:
        waiting = _Waiting(offset, self._clock() + self._wait_s, then)
        self._all.append(waiting)
        if self._timer is None:
            self._arm()
        return waiting

    def _passed(self, topic: str, partition: int, position: int) -> None:
        """Call what waited for records below `position`, which the live reader has offered."""
        place = (topic, partition)
        waiting = self._places.get(place)
        if waiting is None:
            return
        # A callback behind one for a later record waits with it; this happens if PUBRELs come in another order.
        while waiting and (waiting[0].then is None or waiting[0].offset < position):
            waiter = waiting.popleft()
            # Not from inside the live reader, which an exception would end.
            asyncio.get_running_loop().call_soon(_call, waiter)
        if not waiting:
            del self._places[place]

    def _arm(self) -> None:
        delay = max(0.0, self._all[0].deadline - self._clock())
        self._timer = asyncio.get_running_loop().call_later(delay, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = self._clock()
        while self._all and (self._all[0].then is None or self._all[0].deadline <= now):
            _call(self._all.popleft())
        for place, waiting in list(self._places.items()):
            while waiting and waiting[0].then is None:
                waiting.popleft()
            if not waiting:
                del self._places[place]
        if self._all:
            self._arm()


def _call(waiting: _Waiting) -> None:
    then, waiting.then = waiting.then, None
    if then is not None:
        then[0](then[1])


class OwnCopies:
    """Finds copies of a session's own QoS 2 messages that come before Kafka's answer, and so before their PUBREC."""

    __slots__ = ("_answered", "_client_id", "_early", "_open")

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id
        self._open = 0  # messages without Kafka's answer
        self._answered: dict[tuple[str, int], int] = {}  # the highest offset answered, per partition
        self._early: tuple[tuple[str, int], int] | None = None

    def published(self) -> None:
        """Count a message that was submitted to Kafka and that the session will get a copy of."""
        self._open += 1

    def answered(self, count: int, topic: str, partition: int, offsets: Sequence[int]) -> bool:
        """Note Kafka's answer for `count` messages; return whether held copies may now be sent."""
        self._open -= count
        if offsets:
            self._answered[topic, partition] = offsets[-1]
        if not self._open:
            self._answered.clear()
        elif self._early is not None and self._answered.get(self._early[0], NO_OFFSET) < self._early[1]:
            return False
        early, self._early = self._early, None
        return early is not None

    def is_early(self, record: Received, delivery: MqttDelivery) -> bool:
        """Whether the record to be sent next is an own copy whose PUBREC is not due yet."""
        if not self._open or delivery.qos != 2 or delivery.client != self._client_id:
            return False
        place = (record.topic, record.partition)
        if self._answered.get(place, NO_OFFSET) >= record.offset:
            return False
        self._early = (place, record.offset)
        return True
