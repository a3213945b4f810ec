"""Scenario `recovery`: kills the embedded Kafka with many gigabytes that it has not flushed, and restarts it.

Each partition gets less than a segment, and Kafka flushes whole segments only, so all of it must be read back. The
first starts are killed during this recovery. The last one is waited for, however long it takes; then every acknowledged
record must be there.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaProducer

from loadtest.beside import beside
from loadtest.clients.topics import create_topic
from loadtest.gateway import GatewayProcess
from loadtest.numbering import Numbering
from loadtest.verify import stored

GB: Final = 1_000_000_000
OF_A_PARTITION: Final = 900_000_000
"""Bytes of a partition; a segment has 1 GiB."""
RECORD: Final = 250_000
AT_ONCE: Final = 64
"""Unacknowledged records; for each partition one in four is awaited by a batch of 1 MB."""
READ_BYTES: Final = 16 * 1024 * 1024
POLL_S: Final = 0.05

IN_THE_MIDDLE: Final = 3
"""A start is killed when Kafka recovers this many of our partitions, if there are as many: it does two at a time."""


class Plan(NamedTuple):
    """Parameters.

    Attributes:
        gigabytes: of stored records.
        kills: starts to kill while Kafka recovers.
    """

    gigabytes: float = 3.0
    kills: int = 1


class Outcome(NamedTuple):
    """The result; times in seconds. `problems` is empty if every record was there.

    Attributes:
        recovered: partitions that Kafka read back in the last start.
        waits: log lines of the gateway that say that it waits.
    """

    gigabytes: float
    partitions: int
    records: int
    fill_s: float
    first_start_s: float
    killed_within: int
    start_s: float
    recovered: int
    waits: int
    read_s: float
    problems: list[str]

    def row(self) -> dict[str, Any]:
        """Return the columns of a report."""
        return {name: round(value, 1) if isinstance(value, float) else value for name, value in self._asdict().items()}


class Recovery:
    """One run. `gateway` is not started yet, and has its own embedded Kafka."""

    def __init__(self, gateway: GatewayProcess, plan: Plan, say: Callable[[str], None]) -> None:
        self._gateway = gateway
        self._plan = plan
        self._say = say
        self._numbering = Numbering()
        self._topic = f"recovery-{self._numbering.run}"
        self._log = gateway.log.parent / "data" / "kafka" / "logs" / "broker.log"
        self._recovering = re.compile(rb"partition=%s-(\d+)[^\n]* Recovering unflushed segment" % self._topic.encode())
        self._stored: dict[int, int] = {}

    async def run(self) -> Outcome:
        """Fill, kill, start, kill, start, read."""
        plan, problems = self._plan, list[str]()
        partitions = max(1, round(plan.gigabytes * GB / OF_A_PARTITION))
        first_start_s = await self._timed(self._gateway.start())
        await create_topic(self._gateway.kafka, self._topic, partitions)
        fill_s = await self._timed(self._fill(partitions))
        self._say(f"{sum(self._stored.values())} records are stored after {fill_s:.1f} s")
        await self._gateway.kill()
        killed = 0
        for _ in range(plan.kills):
            place = self._size()
            await self._gateway.launch()
            if await self._recovers(place):
                killed += 1
                self._say("killed during recovery")
            await self._gateway.kill()
        if killed < plan.kills:
            problems.append(f"{plan.kills - killed} starts were finished before they could be killed")
        place, waits = self._size(), self._waits()
        begun = time.monotonic()
        await self._gateway.launch()
        await self._gateway.wait_ready(None)
        start_s = time.monotonic() - begun
        recovered = self._recovered(place)
        waits = self._waits() - waits
        self._say(f"ready again after {start_s:.1f} s")
        read_s = await self._timed(self._read(problems))
        records = sum(self._stored.values())
        return Outcome(
            records * RECORD / GB, partitions, records, fill_s, first_start_s, killed, start_s, recovered, waits,
            read_s, problems,
        )  # fmt: skip

    async def _timed(self, work: Any) -> float:
        begun = time.monotonic()
        await work
        return time.monotonic() - begun

    async def _fill(self, partitions: int) -> None:
        """Store the same number of acknowledged records in each partition."""
        count = round(self._plan.gigabytes * GB / RECORD / partitions)
        producer = AIOKafkaProducer(
            bootstrap_servers=self._gateway.kafka, acks="all", max_batch_size=1_000_000, max_request_size=1_048_576
        )
        await producer.start()
        waiting: set[Any] = set()
        try:
            for number in range(count):
                for partition in range(partitions):
                    waiting.add(await producer.send(self._topic, _value(number), partition=partition))
                    if len(waiting) >= AT_ONCE:
                        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                        self._count(done)
            done, _ = await asyncio.wait(waiting)
            self._count(done)
        finally:
            await producer.stop()

    def _count(self, answered: Collection[Any]) -> None:
        for future in answered:
            partition = future.result().partition
            self._stored[partition] = self._stored.get(partition, 0) + 1

    async def _recovers(self, place: int) -> bool:
        """Wait until Kafka recovers; False if it is ready before."""
        wanted = min(IN_THE_MIDDLE, len(self._stored))
        async with beside(self._gateway.wait_ready(None)) as (ready,):
            while not ready.done():
                if self._recovered(place) >= wanted:
                    return True
                await asyncio.wait({ready}, timeout=POLL_S)
        return False

    async def _read(self, problems: list[str]) -> None:
        """Verify all records in order."""
        next_ones = dict.fromkeys(self._stored, 0)
        async with contextlib.aclosing(stored(self._gateway.kafka, self._topic, partition_bytes=READ_BYTES)) as records:
            async for record in records:
                number = next_ones[record.partition]
                if record.value != _value(number):
                    problems.append(f"{record.partition}: record {record.offset} is not number {number}")
                    return
                next_ones[record.partition] = number + 1
        for part, count in self._stored.items():
            if next_ones[part] < count:
                problems.append(f"partition {part}: {count - next_ones[part]} of {count} records are lost")

    def _size(self) -> int:
        return self._log.stat().st_size

    def _recovered(self, place: int) -> int:
        """Return how many of our partitions Kafka has started to recover since this position in its log."""
        return len(set(self._recovering.findall(self._since(place))))

    def _since(self, place: int) -> bytes:
        """Return Kafka's log from a position on; all of it if it was rotated."""
        with self._log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(place if place <= size else 0)
            return file.read()

    def _waits(self) -> int:
        return self._gateway.log.read_bytes().count(b"the embedded broker is starting for")


def _value(number: int) -> bytes:
    return number.to_bytes(8, "big") * (RECORD // 8)


def clear(directory: Path) -> None:
    """Delete the data, but not the logs."""
    shutil.rmtree(directory / "gateway" / "data" / "kafka" / "data", ignore_errors=True)
