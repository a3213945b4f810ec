"""From a sensor and back: sensor -> MQTT -> Kafka -> Spark -> Kafka -> MQTT subscriber, at a rate, with each trigger.

Latency is from sending a reading to the arrival of the first result that contains it. Only readings after a warm-up
count (Java compiles, caches fill), and every sensor's last reading must have arrived in the end. Real time pauses at
each checkpoint, which the longest latency shows, so the measurement should be longer than an interval.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Final, Literal, NamedTuple

from loadtest.clients.connection import join
from loadtest.clients.mqtt import LAST_ID, Publisher, Subscriber, packet_id
from loadtest.clients.mqtt_wire import publish_packet
from loadtest.clients.pace import Pace
from loadtest.engine.command import Scenario
from loadtest.engine.stand import Stand
from loadtest.gateway import GatewayProcess
from loadtest.report import Latencies
from loadtest.spark.job import Job
from loadtest.spark.readings import Topics, make_topics

SENSORS_OF_A_CONNECTION: Final = 50
TICK_S: Final = 0.002
SETTLE_S: Final = 60.0
CONNECT_S: Final = 60.0


class Plan(NamedTuple):
    """Parameters and limits.

    Attributes:
        rate: readings per second of all sensors.
        sensors: number of sensors.
        warm_up: seconds before measurements count.
        seconds: measured; more than a real-time interval.
        trigger: only this one; otherwise one after the other.
        interval: of real-time checkpoints; none: the job's own.
        p50: limit in ms for the median in real time.
        p99: limit in ms for the 99th percentile in real time.
    """

    rate: int = 1_000
    sensors: int = 1_000
    warm_up: float = 60.0
    seconds: float = 330.0
    trigger: Literal["micro-batch", "real-time"] | None = None
    interval: str | None = None
    p50: float = 60.0
    p99: float = 150.0


class Sensors(Publisher):
    """The sensors of one connection: a reading is published at QoS 1 when its time has come."""

    def __init__(self, client_id: str) -> None:
        self._readings: list[bytes] = []
        super().__init__(client_id, self._readings, Pace(LAST_ID, None))
        self.pace.start()

    @property
    def unanswered(self) -> int:
        """The number of readings without a PUBACK of success."""
        return self.total - self.answered + sum(self.refused.values())

    def publish(self, topic: str, payload: bytes) -> None:
        """Publish one reading; on a closed connection it stays unanswered."""
        self._readings.append(publish_packet(topic, payload, 1, packet_id(self.total)))
        self.total += 1
        self.push()


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


async def run(stand: Stand, plan: Plan) -> None:
    """Measure each trigger: real time must meet its limits, and nothing be missing."""
    async with stand.gateway() as gateway:
        for trigger in (plan.trigger,) if plan.trigger else ("real-time", "micro-batch"):
            await _measure(stand, plan, trigger, gateway)


async def _measure(stand: Stand, plan: Plan, trigger: str, gateway: GatewayProcess) -> None:
    bootstrap, directory = gateway.kafka, stand.directory
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
        refused = sum(sender.unanswered for sender in senders) + (subscriber.lost is not None)
        subscriber.close()
        for sender in senders:
            sender.close()
        code = await job.stopped()
    p50, p99, p999, longest = (tally.latencies.milliseconds(percent) for percent in (50, 99, 99.9, 100))
    stand.row(**{
        "trigger": trigger, "readings": sent, "per second": round(sent / (plan.warm_up + plan.seconds)),
        "results": tally.results, "p50 ms": p50, "p99 ms": p99, "p99.9 ms": p999, "longest ms": longest,
        "not acknowledged": refused, "without their last result": tally.missing, "cores": round(cpu_s / seconds, 2),
    })  # fmt: skip
    fast = trigger != "real-time" or (p50 <= plan.p50 and p99 <= plan.p99)
    stand.check(fast and tally.latencies.count > 0, f"{trigger}: p50 {p50:.0f} ms, p99 {p99:.0f} ms")
    lost = tally.missing or refused or code
    stand.check(
        not lost, f"{trigger}: {tally.missing} sensors without their last result, {refused} refused, exit {code}"
    )


async def _connect(
    gateway: GatewayProcess, topics: Topics, plan: Plan, tally: Tally
) -> tuple[list[Sensors], Subscriber]:
    """Connect the sensors last, since only their messages keep them alive, and the subscriber to the results."""
    address = gateway.address("mqtt")
    subscriber = await join(Subscriber("results", f"{topics.target}/#", 1, tally.result), address)
    senders = [
        await join(Sensors(f"sensors-{number}"), address)
        for number in range(-(-plan.sensors // SENSORS_OF_A_CONNECTION))
    ]
    async with asyncio.timeout(CONNECT_S):
        await asyncio.gather(subscriber.subscribed, *(sender.connected for sender in senders))
    return senders, subscriber


async def _settled(senders: list[Sensors], tally: Tally) -> None:
    """Wait until everything is acknowledged and has arrived, for at most `SETTLE_S`."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        waiting = tally.missing or any(sender.answered < sender.total for sender in senders)
        if not waiting or time.monotonic() > deadline:
            return
        await asyncio.sleep(0.1)


async def _send(senders: list[Sensors], tally: Tally, topic: str, plan: Plan) -> int:
    """Send evenly at the plan's rate; return the number of readings."""
    sent, began, counts = 0, time.monotonic(), False
    while (elapsed := time.monotonic() - began) < plan.warm_up + plan.seconds:
        if not counts and elapsed >= plan.warm_up:
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


SCENARIOS = (Scenario("latency", "measure from an MQTT sensor through Spark to an MQTT subscriber", Plan(), run),)
