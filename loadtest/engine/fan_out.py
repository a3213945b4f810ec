"""One publisher, many subscribers at QoS 0 or listeners to server-sent events; all their bytes are compared.

The publisher and a modest client are processes of their own, so that they only wait for the gateway.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from loadtest.beside import beside
from loadtest.clients.connection import join_all
from loadtest.clients.crowd.apart import Apart, Order
from loadtest.clients.crowd.events import EventListener, Shared
from loadtest.clients.crowd.follower import Follower, Stream
from loadtest.clients.topics import create_topic
from loadtest.gateway import GatewayProcess, process_cpu
from loadtest.numbering import Numbering
from loadtest.report import Latencies

MODEST_RATE: Final = 20.0  # messages per second of the modest client


class Fan(NamedTuple):
    """Parameters.

    Attributes:
        subscribers: number of subscribers.
        messages: number of published messages.
        window: unacknowledged publishes (QoS 1).
        rate: messages per second, or None for as fast as they are acknowledged.
        size: payload bytes.
        patience: seconds without a delivery after which missing messages are lost.
        extra: filters that match nothing, divided among the subscribers.
        events: whether they are HTTP listeners to events.
    """

    subscribers: int = 1000
    messages: int = 1000
    window: int = 100
    rate: float | None = None
    size: int = 100
    patience: float = 5.0
    extra: int = 0
    events: bool = False


class Spread(NamedTuple):
    """The result; `cpu_us` is the gateway's CPU per delivery, including publishing.

    `puback_ms` are percentiles of the publisher's PUBACK latency, `modest_ms` those of a client that publishes one
    message after the other to an unread topic. `generator` is the share of a processor used by the subscribers' side:
    near 1 the test has measured itself.
    """

    deliveries: int
    lost: int
    wrong: int  # subscribers that got other bytes than the others
    seconds: float
    latencies: Latencies
    cpu_us: float
    puback_ms: dict[str, float]
    modest_ms: dict[str, float]
    generator: float


async def fan_out(gateway: GatewayProcess, fan: Fan) -> Spread:
    """Run it."""
    numbering, pid = Numbering(), gateway.pid
    topic = f"fan-{numbering.run}"
    await create_topic(gateway.kafka, topic, 1 if fan.events else 3)  # listeners in one order receive equal bytes
    await create_topic(gateway.kafka, f"{topic}-beside")
    received: list[tuple[int, float]] = []  # the last message of each read, and when

    def on_message(number: int, now: float) -> None:
        received.append((number, now))

    followers = _followers(topic, fan, numbering, on_message)
    await join_all(followers, gateway.address("http" if fan.events else "mqtt"), lambda one: one.subscribed)
    address, order = gateway.address("mqtt"), Order(topic, numbering.run, fan.messages, fan.size, fan.window, fan.rate)
    publisher = await Apart.start(address, order, begin=False)
    modest = await Apart.start(address, Order(f"{topic}-beside", rate=MODEST_RATE))
    cpu, own, began = process_cpu(pid), process_cpu(os.getpid()), time.perf_counter()
    publisher.begin()
    async with beside(publisher.finished()) as (publishing,):
        waiting = {one.finished for one in followers}
        quiet_since, count = began, 0
        while waiting and (not publishing.done() or time.perf_counter() - quiet_since < fan.patience):
            _, waiting = await asyncio.wait(waiting, timeout=0.5)
            if not publishing.done() or len(received) > count:
                quiet_since, count = time.perf_counter(), len(received)
        await publishing
    cpu, own = process_cpu(pid) - cpu, process_cpu(os.getpid()) - own
    until = time.perf_counter()
    await modest.answered(until)
    deliveries = sum(one.got for one in followers)
    for follower in followers:
        follower.close()
    latencies = Latencies()
    for number, now in received:
        latencies.record(now - publisher.due_at[number])
    for one in (publisher, modest):
        await one.stop()
    return Spread(
        deliveries,
        fan.messages * fan.subscribers - deliveries,
        sum(one.wrong for one in followers),
        max((now for _, now in received), default=began) - publisher.due_at[0],
        latencies,
        cpu / deliveries * 1e6 if deliveries else 0.0,
        publisher.between(began, until).summary(),
        modest.between(began, until).summary(),
        own / (until - began),
    )


def _followers(
    topic: str, fan: Fan, numbering: Numbering, on_message: Callable[[int, float], None]
) -> Sequence[Follower | EventListener]:
    if fan.events:
        shared, path = Shared(), f"/topics/{topic}/stream?format=text"
        return [EventListener(path, shared, fan.messages, on_message) for _ in range(fan.subscribers)]
    stream = Stream([numbering.payload(0, sequence, fan.size) for sequence in range(fan.messages)])
    return [
        Follower(f"{topic}-{number}", [f"{topic}/#", *_fillers(topic, fan, number)], stream, fan.messages, on_message)
        for number in range(fan.subscribers)
    ]


def _fillers(topic: str, fan: Fan, number: int) -> list[str]:
    """Return filters similar to the others that match nothing: literal ones, `+` and `#` in turn."""
    first, behind = (fan.extra * at // fan.subscribers for at in (number, number + 1))
    forms = ("{topic}/device/{at}/state", "{topic}/+/{at}/state", "{topic}/device/{at}/#")
    return [forms[at % 3].format(topic=topic, at=at) for at in range(first, behind)]
