"""The deliveries to a consumer group, and which of them came again without a reason."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import NamedTuple

from loadtest.clients.kept.lasting import Delivery, Place
from loadtest.numbering import Numbering
from loadtest.verify import Arrivals


class Again(NamedTuple):
    """A record that was delivered to a group again.

    `age` is the time from its acceptance to the next kill, without Kafka's outages; infinite if there was no kill, None
    if it was not accepted. `below` is whether it was committed before that kill.
    """

    place: Place
    age: float | None
    below: bool


class Kill(NamedTuple):
    """A kill of the gateway: its time, and the committed offsets of each group."""

    at: float
    committed: dict[str, dict[int, int]]


class Outage(NamedTuple):
    """A time when Kafka was down, or groups could not commit yet."""

    begin: float
    end: float


class Group:
    """The deliveries to one consumer group."""

    def __init__(self, name: str, numbering: Numbering) -> None:
        self.name = name
        self.arrivals = Arrivals(numbering)
        self._deliveries: dict[Place, list[tuple[int, float]]] = collections.defaultdict(list)  # (generation, at)
        self._accepted: dict[Place, list[tuple[int, float]]] = collections.defaultdict(list)

    def take(self, delivery: Delivery) -> None:
        """Record a delivery."""
        if self.arrivals.take(delivery.payload):
            self._deliveries[delivery.place].append((delivery.generation, delivery.at))

    def accepted(self, delivery: Delivery, at: float) -> None:
        """Record that its acceptance was sent."""
        self._accepted[delivery.place].append((delivery.generation, at))

    def again(self, kills: Sequence[Kill], outages: Sequence[Outage]) -> list[Again]:
        """Return every repeated delivery."""
        return [
            self._check(place, generation, at, kills, outages)
            for place, deliveries in self._deliveries.items()
            for generation, at in deliveries[1:]
        ]

    def _check(
        self, place: Place, generation: int, at: float, kills: Sequence[Kill], outages: Sequence[Outage]
    ) -> Again:
        """`generation` counts the kills before a connection, so kill number `generation` ended it."""
        below = any(kill.committed[self.name].get(place.partition, 0) > place.offset for kill in kills[:generation])
        ages: list[float] = []
        for earlier, accepted in self._accepted[place]:
            if earlier < generation:
                ages.append(_age(accepted, kills[earlier].at, outages))
            elif accepted < at:  # by the same gateway, which rejoined its group after the broker was killed
                died = max((outage.begin for outage in outages if outage.begin < at), default=math.inf)
                ages.append(_age(accepted, died, outages))
        return Again(place, max(ages, default=None), below)


def _age(accepted: float, ended: float, outages: Sequence[Outage]) -> float:
    away = sum(max(0.0, min(ended, outage.end) - max(accepted, outage.begin)) for outage in outages)
    return max(0.0, ended - accepted - away)
