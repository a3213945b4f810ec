"""Sends readings to a topic and checks the job's windows and dead letters against them."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Final, NamedTuple

from aiokafka import AIOKafkaProducer

from loadtest.clients.topics import create_topic
from loadtest.verify import stored

WINDOW_MS: Final = 5_000
SLIDE_MS: Final = 1_000
LATE: Final = "late-"
"""Prefix of the sensors whose readings are far too late; each such reading has its own sensor."""


class Topics(NamedTuple):
    """The job's topics, new for each run."""

    source: str
    target: str
    dead_letter: str


class Verdict(NamedTuple):
    """How the results compare with what was sent."""

    windows: int
    missing: int
    wrong: int  # maximum or count differs from the readings
    late: int  # readings sent behind the watermark
    vanished: int  # late readings in no window and in no dead letter
    letters: int
    late_letters_of_good: int  # good readings in the dead-letter topic

    @property
    def kept(self) -> bool:
        """True if nothing is missing or wrong."""
        return self.missing == self.wrong == self.vanished == self.late_letters_of_good == 0


async def make_topics(bootstrap: str, partitions: int = 3, *, compacted: bool = False) -> Topics:
    """Create new topics; with `compacted`, the topic of the results is compacted."""
    name = f"readings-{time.time_ns()}"
    topics = Topics(name, f"{name}-maximum", f"{name}-dlq")
    for topic in topics:
        kept = {"cleanup.policy": "compact"} if compacted and topic == topics.target else {"retention.ms": "-1"}
        await create_topic(bootstrap, topic, partitions, configs=kept)
    return topics


class Sender:
    """Sends readings and keeps the expected (maximum, count) of each (sensor, start of window)."""

    def __init__(self, producer: AIOKafkaProducer, topic: str) -> None:
        self.expected: dict[tuple[str, int], tuple[float, int]] = {}
        self.late: set[str] = set()
        self._producer = producer
        self._topic = topic

    async def send(self, sensor: str, temperature: float, at: int) -> None:
        """Send a reading. A sensor that starts with `LATE` marks a reading that is far too late."""
        temperature = round(temperature, 2)
        value = b'{"temperature": %.2f, "time": %d}' % (temperature, at)
        await self._producer.send(self._topic, value, sensor.encode())
        if sensor.startswith(LATE):
            self.late.add(sensor)
            return
        for start in starts(at):
            maximum, count = self.expected.get((sensor, start), (temperature, 0))
            self.expected[sensor, start] = max(maximum, temperature), count + 1

    async def flush(self) -> None:
        """Wait until Kafka has acknowledged everything."""
        await self._producer.flush()


def starts(at: int) -> range:
    """The start times (ms) of the windows that contain a time."""
    last = at - at % SLIDE_MS
    return range(last, last - WINDOW_MS, -SLIDE_MS)


async def compare(bootstrap: str, topics: Topics, sender: Sender) -> Verdict:
    """Compare the contents of the topics with the readings sent."""
    results: dict[tuple[str, int], tuple[float, int]] = {}
    async for record in stored(bootstrap, topics.target, "read_committed"):
        value = json.loads(record.value)
        results[value["sensor"], value["start"]] = value["maximum"], value["count"]
    letters = [(record.key or b"").decode() async for record in stored(bootstrap, topics.dead_letter)]
    seen = {sensor for sensor, _ in results} | set(letters)
    return Verdict(
        windows=len(sender.expected),
        missing=len(sender.expected.keys() - results.keys()),
        wrong=sum(key in results and results[key] != value for key, value in sender.expected.items()),
        late=len(sender.late),
        vanished=len(sender.late - seen),
        letters=len(letters),
        late_letters_of_good=sum(not sensor.startswith(LATE) for sensor in letters),
    )


async def settled(bootstrap: str, topics: Topics, sender: Sender, limit_s: float) -> Verdict:
    """Repeat the check until nothing is missing or the time limit passes; return the last result."""
    deadline = time.monotonic() + limit_s
    while True:
        verdict = await compare(bootstrap, topics, sender)
        if verdict.kept or time.monotonic() > deadline:
            return verdict
        await asyncio.sleep(2)
