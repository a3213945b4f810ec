"""Scenario `latency`: sensor -> MQTT -> Kafka -> Spark -> Kafka -> MQTT subscriber, at a rate, with each trigger.

Latency is from sending a reading to the arrival of the first result that contains it. Only readings after a warm-up
count (Java compiles, caches fill), and every sensor's last reading must have arrived in the end. Real time pauses at
each checkpoint, which the longest latency shows, so the measurement should be longer than an interval.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Final, NamedTuple

from loadtest.clients.joining import join
from loadtest.clients.mqtt import Subscriber
from loadtest.clients.single import SinglePublisher
from loadtest.gateway import GatewayProcess
from loadtest.report import Latencies
from loadtest.spark.job import Job
from loadtest.spark.readings import Topics, make_topics

SENSORS_OF_A_CONNECTION: Final = 50
TICK_S: Final = 0.002
SETTLE_S: Final = 60.0
CONNECT_S: Final = 60.0


class Plan(NamedTuple):
    """Parameters and limits."""

    rate: int  # readings per second of all sensors
    sensors: int
    warm_up_s: float
    seconds: float
    triggers: tuple[str, ...]
    interval: str | None  # interval of real-time checkpoints; None for the job's own
    p50_ms: float  # limits in real time
    p99_ms: float


class Tally:
    """The time when each sensor's readings were sent, and when their results arrived."""

    def __init__(self) -> None:
        self.latencies = Latencies()
        self.results = 0
        self.last: dict[str, int] = {}  # sensor -> the newest reading sent, epoch ms
        self._seen: dict[str, int] = {}
        self._from = float("inf")  # start of the measurement

    def count_from_now(self) -> None:
        """End the warm-up."""
        self._from = time.time() * 1000

    def result(self, payload: bytes) -> None:
        """Record the arrival of a result."""
        now = time.time() * 1000
        value = json.loads(payload)
        sensor, latest = value["sensor"], value["latest"]
        self.results += 1
        if latest > self._seen.get(sensor, 0):
            self._seen[sensor] = latest
            if latest >= self._from:
                self.latencies.record((now - latest) / 1000)

    @property
    def missing(self) -> int:
        """The number of sensors whose newest reading is in no result."""
        return sum(self._seen.get(sensor, 0) < sent for sensor, sent in self.last.items())


async def run(bootstrap: str, directory: Path, plan: Plan, gateway: GatewayProcess | None) -> int:
    """Measure each trigger; 0 if real time meets its limits, and nothing is missing."""
    own = None if gateway else GatewayProcess(directory, bootstrap)
    if own is not None:
        await own.start()
    try:
        kept = [await _measure(bootstrap, directory, plan, trigger, own or gateway) for trigger in plan.triggers]
    finally:
        if own is not None:
            await own.stop()
    return 0 if all(kept) else 1


async def _measure(bootstrap: str, directory: Path, plan: Plan, trigger: str, gateway: GatewayProcess | None) -> bool:
    assert gateway is not None
    topics = await make_topics(bootstrap)
    tally = Tally()
    place = directory / trigger
    place.mkdir()
    options = ["--trigger", trigger]
    if trigger == "real-time" and plan.interval is not None:
        options += ["--interval", plan.interval]
    async with Job(bootstrap, topics, place, *options, quick_start=False) as job:
        await job.start()
        senders, subscriber = await _connect(gateway, topics, plan, tally)
        began, cpu = time.monotonic(), job.cpu()
        sent = await _send(senders, tally, topics.source, plan)
        await _settled(senders, tally)
        cpu_s, seconds = job.cpu() - cpu, time.monotonic() - began
        refused = sum(sender.refused + sender.unanswered for sender in senders) + subscriber.lost.done()
        subscriber.close()
        for sender in senders:
            sender.close()
        code = await job.stop()
    p50, p99, p999, longest = (tally.latencies.milliseconds(percent) for percent in (50, 99, 99.9, 100))
    print(
        f"{trigger}: {sent:,} readings of {plan.sensors:,} sensors at {sent / (plan.warm_up_s + plan.seconds):,.0f}/s, "
        f"{tally.results:,} results; p50 {p50:.0f} ms, p99 {p99:.0f} ms, p99.9 {p999:.0f} ms, longest {longest:.0f} ms "
        f"of {tally.latencies.count:,}; "
        f"not acknowledged {refused}, sensors without their last result {tally.missing}; "
        f"Spark {cpu_s / seconds:.2f} of a core",
        flush=True,
    )
    fast = trigger != "real-time" or (p50 <= plan.p50_ms and p99 <= plan.p99_ms)
    return fast and tally.latencies.count > 0 and not tally.missing and not refused and code == 0


async def _connect(
    gateway: GatewayProcess, topics: Topics, plan: Plan, tally: Tally
) -> tuple[list[SinglePublisher], Subscriber]:
    """Connect the sensors last, since only their messages keep them alive, and the subscriber to the results."""
    address = gateway.address("mqtt")
    subscriber = await join(Subscriber("results", f"{topics.target}/#", 1, tally.result), address)
    senders = [
        await join(SinglePublisher(f"sensors-{number}"), address)
        for number in range(-(-plan.sensors // SENSORS_OF_A_CONNECTION))
    ]
    async with asyncio.timeout(CONNECT_S):
        await asyncio.gather(subscriber.subscribed, *(sender.connected for sender in senders))
    return senders, subscriber


async def _settled(senders: list[SinglePublisher], tally: Tally) -> None:
    """Wait until everything is acknowledged and has arrived, for at most `SETTLE_S`."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        if time.monotonic() > deadline or not (tally.missing or any(sender.unanswered for sender in senders)):
            return
        await asyncio.sleep(0.1)


async def _send(senders: list[SinglePublisher], tally: Tally, topic: str, plan: Plan) -> int:
    """Send evenly at the plan's rate; return the number of readings."""
    sent, began, counts = 0, time.monotonic(), False
    while (elapsed := time.monotonic() - began) < plan.warm_up_s + plan.seconds:
        if not counts and elapsed >= plan.warm_up_s:
            counts = True
            tally.count_from_now()
        now = int(time.time() * 1000)
        for number in range(sent, int(elapsed * plan.rate)):
            sensor = number % plan.sensors
            name = f"s{sensor}"
            tally.last[name] = now
            payload = b'{"temperature": %d, "time": %d, "sent": %d}' % (number % 61 - 20, now, now)
            senders[sensor // SENSORS_OF_A_CONNECTION].publish(f"{topic}/{name}", payload)
            sent += 1
        await asyncio.sleep(TICK_S)
    return sent
