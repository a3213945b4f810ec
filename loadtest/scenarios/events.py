"""Scenario `sse`: one publisher, many listeners to server-sent events; none may fall behind, and all are compared."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

from loadtest.clients.events import EventListener, Shared
from loadtest.clients.joining import join_all
from loadtest.clients.mqtt import Publisher, publishes
from loadtest.clients.pace import Pace
from loadtest.clients.topics import create_topic
from loadtest.gateway import process_cpu
from loadtest.numbering import Numbering
from loadtest.report import Latencies


class Crowd(NamedTuple):
    """Parameters.

    Attributes:
        listeners: number of listeners.
        messages: number of messages, published at QoS 1 over MQTT.
        rate: messages per second.
        size: payload bytes.
        late: the most seconds that a listener may be behind the publisher.
        patience: seconds without an event after which missing events are lost.
    """

    listeners: int = 1000
    messages: int = 2000
    rate: float = 100.0
    size: int = 100
    late: float = 1.0
    patience: float = 5.0


class Result(NamedTuple):
    """The result; `cpu_us` is the gateway's CPU per event, including publishing."""

    events: int
    lost: int
    wrong: int
    seconds: float
    latencies: Latencies
    cpu_us: float
    problems: list[str]

    def row(self) -> dict[str, float | int]:
        """Return the columns of a report. Latencies are from PUBLISH to event, for the last event of each read."""
        return {
            "events": self.events,
            "events per second": round(self.events / self.seconds) if self.seconds else 0,
            **{f"{name} ms": value for name, value in self.latencies.summary().items()},
            "cpu us/event": round(self.cpu_us, 2),
            "lost": self.lost,
            "wrong": self.wrong,
        }


async def listen(kafka: str, mqtt: tuple[str, int], http: tuple[str, int], crowd: Crowd, pid: int) -> Result:
    """Run it on a gateway with process id `pid`."""
    numbering = Numbering()
    topic = f"events-{numbering.run}"
    await create_topic(kafka, topic, 1)
    payloads = [numbering.payload(0, sequence, crowd.size) for sequence in range(crowd.messages)]
    latencies = Latencies()
    due_at: Sequence[float] = ()
    last = 0.0

    def on_message(number: int, now: float) -> None:
        nonlocal last
        last = now
        latencies.record(now - due_at[number])

    shared = Shared()
    path = f"/topics/{topic}/stream?format=text"
    listeners = [EventListener(path, shared, crowd.messages, on_message) for _ in range(crowd.listeners)]
    await join_all(listeners, http, lambda one: one.begun)
    pace = Pace(crowd.messages, crowd.rate)
    publisher = Publisher(f"{topic}-publisher", publishes(f"{topic}/news", payloads), pace)
    await publisher.join(mqtt)
    due_at = publisher.due_at
    cpu, began = process_cpu(pid), time.perf_counter()
    publisher.start()
    while not publisher.finished.done():
        await asyncio.wait((publisher.finished,), timeout=0.002)
        publisher.push()
    published = time.perf_counter()
    waiting = {one.finished for one in listeners}
    while waiting and time.perf_counter() - max(last, published) < crowd.patience:
        _, waiting = await asyncio.wait(waiting, timeout=0.5)
    cpu = process_cpu(pid) - cpu
    events = sum(one.got for one in listeners)
    wrong = sum(one.wrong for one in listeners)
    publisher.close()
    for listener in listeners:
        listener.close()
    lost = crowd.messages * crowd.listeners - events
    problems = [
        f"{count} {what}" for count, what in ((lost, "lost"), (wrong, "received other bytes than the others")) if count
    ]
    slowest = latencies.milliseconds(100.0) / 1000
    if slowest > crowd.late:
        problems.append(f"a listener was {slowest:.2f} s behind")
    return Result(events, lost, wrong, last - began, latencies, cpu / events * 1e6 if events else 0.0, problems)
