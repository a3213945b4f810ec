"""Scenario `fan-out`: one publisher, many subscribers at QoS 0; deliveries a second, all of them compared."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import NamedTuple

from loadtest.clients.follower import Follower, Stream
from loadtest.clients.mqtt import Publisher
from loadtest.clients.pace import Pace
from loadtest.clients.topics import create_topic
from loadtest.gateway import process_cpu
from loadtest.numbering import Numbering
from loadtest.report import Latencies

CONNECTING = 50  # connections begun at once


class Fan(NamedTuple):
    """What to do.

    Attributes:
        subscribers: how many there are.
        messages: how many are published.
        window: unanswered publishes (QoS 1).
        rate: messages a second, or None for as fast as answered.
        size: payload bytes.
        patience: seconds without a delivery after which what is missing is lost.
        extra: filters that match nothing, shared out over the subscribers.
    """

    subscribers: int = 1000
    messages: int = 1000
    window: int = 100
    rate: float | None = None
    size: int = 100
    patience: float = 5.0
    extra: int = 0


class Spread(NamedTuple):
    """What came of it; `cpu_us` is the gateway's CPU per delivery, publishing included."""

    deliveries: int
    lost: int
    seconds: float
    publish_seconds: float
    latencies: Latencies
    cpu_us: float

    def row(self) -> dict[str, float | int]:
        """As columns of a report. Latencies are from a message's PUBLISH to its delivery, last of each read."""
        return {
            "deliveries": self.deliveries,
            "deliveries per second": round(self.deliveries / self.seconds) if self.seconds else 0,
            "published in s": round(self.publish_seconds, 2),
            **{f"{name} ms": value for name, value in self.latencies.summary().items()},
            "cpu us/delivery": round(self.cpu_us, 2),
            "lost": self.lost,
        }


async def fan_out(kafka: str, address: tuple[str, int], fan: Fan, pid: int) -> Spread:
    """Run it."""
    numbering = Numbering()
    topic = f"fan-{numbering.run}"
    await create_topic(kafka, topic)
    payloads = [numbering.payload(0, sequence, fan.size) for sequence in range(fan.messages)]
    latencies = Latencies()
    sent_at: list[float] = []
    last = 0.0

    def told(number: int, now: float) -> None:
        nonlocal last
        last = now
        latencies.record(now - sent_at[number])

    stream = Stream(payloads)
    followers = [
        Follower(f"{topic}-{number}", [f"{topic}/#", *_fillers(topic, fan, number)], stream, fan.messages, told)
        for number in range(fan.subscribers)
    ]
    await _connect(followers, address)
    pace = Pace(fan.window, fan.rate)
    make = partial(Publisher, f"{topic}-publisher", f"{topic}/news", payloads, pace, lambda first, behind: None)
    _, publisher = await asyncio.get_running_loop().create_connection(make, *address)
    await publisher.connected
    sent_at = publisher.sent_at
    cpu, began = process_cpu(pid), time.perf_counter()
    pace.start()
    publisher.push()
    while not publisher.finished.done():
        await asyncio.wait((publisher.finished,), timeout=0.002 if fan.rate else None)
        publisher.push()
    publish_seconds = time.perf_counter() - began
    waiting = {one.finished for one in followers}
    while waiting and time.perf_counter() - max(last, began + publish_seconds) < fan.patience:
        _, waiting = await asyncio.wait(waiting, timeout=0.5)
    cpu = process_cpu(pid) - cpu
    deliveries = sum(one.got for one in followers)
    publisher.close()
    for follower in followers:
        follower.close()
    lost = fan.messages * fan.subscribers - deliveries
    return Spread(
        deliveries, lost, last - began, publish_seconds, latencies, cpu / deliveries * 1e6 if deliveries else 0.0
    )


def _fillers(topic: str, fan: Fan, number: int) -> list[str]:
    """Filters that look like the others and match nothing: literal ones, `+` and `#` in turn."""
    first, behind = (fan.extra * at // fan.subscribers for at in (number, number + 1))
    forms = ("{topic}/device/{at}/state", "{topic}/+/{at}/state", "{topic}/device/{at}/#")
    return [forms[at % 3].format(topic=topic, at=at) for at in range(first, behind)]


async def _connect(followers: list[Follower], address: tuple[str, int]) -> None:
    loop = asyncio.get_running_loop()
    for first in range(0, len(followers), CONNECTING):
        some = followers[first : first + CONNECTING]
        await asyncio.gather(*(loop.create_connection(partial(_same, one), *address) for one in some))
        await asyncio.gather(*(one.subscribed for one in some))


def _same(follower: Follower) -> Follower:
    return follower
