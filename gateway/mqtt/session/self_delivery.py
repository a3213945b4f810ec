"""A client's own messages before their acknowledgements, where `mqtt.echo_wait_ms` asks for it (ADR 0021).

A client that is subscribed to what it publishes is sent its own message by the live reader, and PUBACK or PUBCOMP after
Kafka's answer; which is first is chance. With the setting the acknowledgement waits until the live reader has passed
the record, and the copy of a QoS 2 message waits for its PUBREC. Neither waits longer than the setting says.

There is no future, task or timer for a message: what waits is in order, and one timer of the process is for the first.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Sequence
from typing import Any, Final

from gateway.kafka.read.live_reader import LiveReader
from mapping.mqtt.outgoing import Delivery
from mapping.record import Received

Then = tuple[Callable[[Any], None], Any]
"""What to call, with what."""

NOWHERE: Final = -1


class _Waiting:
    """Something to be said; `then` is None once it was."""

    __slots__ = ("deadline", "offset", "then")

    def __init__(self, offset: int, deadline: float, then: Then) -> None:
        self.offset = offset
        self.deadline = deadline
        self.then: Then | None = then


class SelfDelivery:
    """What waits in this process for the live reader, each for at most the same time."""

    def __init__(self, live_reader: LiveReader, wait_s: float, clock: Callable[[], float]) -> None:
        """`live_reader` tells us of what it offers from now on; nobody waits longer than `wait_s` of `clock`."""
        self._live_reader = live_reader
        self._wait_s = wait_s
        self._clock = clock
        self._places: dict[tuple[str, int], collections.deque[_Waiting]] = {}
        self._all: collections.deque[_Waiting] = collections.deque()  # in the order of their deadlines
        self._timer: asyncio.TimerHandle | None = None
        live_reader.fan_out.passed = self._passed

    def __len__(self) -> int:
        """How many wait, as far as is known: those that were called are forgotten when their time comes."""
        return sum(one.then is not None for one in self._all)

    def after(self, topic: str, partition: int, offset: int, then: Then) -> None:
        """Call `then` when the live reader has passed a record: now, soon, or when the time is up.

        A client that is sent the record waits for it, so a topic that the live reader does not read was made with it:
            soon.
        """
        position = self._live_reader.position(topic, partition)
        if position is not None and position > offset:
            then[0](then[1])
            return
        waiting = self._wait(offset, then)
        self._places.setdefault((topic, partition), collections.deque()).append(waiting)

    def later(self, then: Then) -> None:
        """Call `then` when the time is up."""
        self._wait(NOWHERE, then)

    def release(self) -> None:
        """Call everything that waits: the gateway stops."""
        self._places.clear()
        waiting, self._all = self._all, collections.deque()
        for one in waiting:
            _call(one)

    def _wait(self, offset: int, then: Then) -> _Waiting:
        waiting = _Waiting(offset, self._clock() + self._wait_s, then)
        self._all.append(waiting)
        if self._timer is None:
            self._arm()
        return waiting

    def _passed(self, topic: str, partition: int, position: int) -> None:
        """The live reader has offered what is below `position`."""
        place = (topic, partition)
        waiting = self._places.get(place)
        if waiting is None:
            return
        # One behind another that waits for a later record, as PUBRELs in another order do, waits with it.
        while waiting and (waiting[0].then is None or waiting[0].offset < position):
            one = waiting.popleft()
            # Not from inside the live reader: a fault in there would end it.
            asyncio.get_running_loop().call_soon(_call, one)
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
    """Which copies of a session's own QoS 2 messages come before Kafka's answer, and so before their PUBREC."""

    __slots__ = ("_answered", "_client_id", "_early", "_open")

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id
        self._open = 0  # messages that Kafka has not answered
        self._answered: dict[tuple[str, int], int] = {}  # the highest offsets that it has told
        self._early: tuple[tuple[str, int], int] | None = None

    def published(self) -> None:
        """A message that the session will be sent went to Kafka."""
        self._open += 1

    def answered(self, count: int, topic: str, partition: int, offsets: Sequence[int]) -> bool:
        """Kafka answered for so many; whether the copies that were held back may leave."""
        self._open -= count
        if offsets:
            self._answered[topic, partition] = offsets[-1]
        if not self._open:
            self._answered.clear()
        elif self._early is not None and self._answered.get(self._early[0], NOWHERE) < self._early[1]:
            return False
        early, self._early = self._early, None
        return early is not None

    def is_early(self, record: Received, delivery: Delivery) -> bool:
        """Whether a record that is to be sent now is a copy whose PUBREC is not due yet."""
        if not self._open or delivery.qos != 2 or delivery.client != self._client_id:
            return False
        place = (record.topic, record.partition)
        if self._answered.get(place, NOWHERE) >= record.offset:
            return False
        self._early = (place, record.offset)
        return True
