"""Kills the embedded Kafka with many gigabytes that it has not flushed, and restarts it.

Each partition gets less than a segment, and Kafka flushes whole segments only, so all of it must be read back. The
first starts are killed during this recovery. The last one is waited for, however long it takes; then every acknowledged
record must be there. The data is deleted at the end.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaProducer

from loadtest.beside import beside
from loadtest.clients.topics import create_topic
from loadtest.engine.command import Scenario
from loadtest.engine.stand import Stand
from loadtest.gateway import GatewayProcess
from loadtest.numbering import Numbering
from loadtest.verify import Ledger, read_topic

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


class Log:
    """The log of a broker, in which it says what it recovers."""

    def __init__(self, gateway: GatewayProcess, topic: str) -> None:
        self._path = gateway.log.parent / "data" / "kafka" / "logs" / "broker.log"
        self._recovering = re.compile(rb"partition=%s-(\d+)[^\n]* Recovering unflushed segment" % topic.encode())

    def size(self) -> int:
        """Return its present size."""
        return self._path.stat().st_size

    def recovered(self, since: int) -> int:
        """Return how many of the topic's partitions it recovers since a size; from its start if it was rotated."""
        with self._path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(since if since <= size else 0)
            return len(set(self._recovering.findall(file.read())))


async def run(stand: Stand, plan: Plan) -> None:
    """Fill, kill, start, kill, start, read."""
    gateway = GatewayProcess(stand.directory / "gateway", None)
    try:
        await _recover(stand, plan, gateway)
    finally:
        await gateway.stop()
        shutil.rmtree(stand.directory / "gateway" / "data" / "kafka" / "data", ignore_errors=True)


async def _recover(stand: Stand, plan: Plan, gateway: GatewayProcess) -> None:
    numbering, ledger, taken = Numbering(), Ledger(), dict[str, float]()
    topic, partitions = f"recovery-{numbering.run}", max(1, round(plan.gigabytes * GB / OF_A_PARTITION))
    log = Log(gateway, topic)

    async def timed(what: str, work: Any) -> Any:
        begun = time.monotonic()
        found = await work
        taken[what] = round(time.monotonic() - begun, 1)
        return found

    await timed("first start s", gateway.start())
    await create_topic(gateway.kafka, topic, partitions)
    count = round(plan.gigabytes * GB / RECORD / partitions)
    await timed("fill s", _fill(gateway.kafka, topic, numbering, ledger, partitions=range(partitions), count=count))
    await gateway.kill()
    killed = 0
    for _ in range(plan.kills):
        since = log.size()
        await gateway.launch()
        killed += await _recovers(gateway, log, since, min(IN_THE_MIDDLE, partitions))
        await gateway.kill()
    stand.check(killed == plan.kills, f"{plan.kills - killed} starts were finished before they could be killed")
    since, waits = log.size(), _waits(gateway.log)
    await gateway.launch()
    await timed("start s", gateway.wait_ready(None))
    recovered = log.recovered(since)
    arrivals = await timed("read s", read_topic(gateway.kafka, topic, numbering, partition_bytes=READ_BYTES))
    verdict = arrivals.verdict(ledger)
    stand.problems += verdict.problems(once=True)
    stand.row(
        gigabytes=verdict.stored * RECORD / GB, partitions=partitions, records=verdict.stored, killed=killed,
        recovered=recovered, waits=_waits(gateway.log) - waits, **taken,
    )  # fmt: skip


async def _fill(
    bootstrap: str, topic: str, numbering: Numbering, ledger: Ledger, *, partitions: range, count: int
) -> None:
    """Store the same number of acknowledged records in each partition."""
    waiting: dict[Any, tuple[int, int]] = {}

    async def answered(how: str) -> None:
        done, _ = await asyncio.wait(waiting, return_when=how)
        for future in done:
            future.result()
            ledger.acknowledge(*waiting.pop(future))

    async with AIOKafkaProducer(
        bootstrap_servers=bootstrap, acks="all", max_batch_size=1_000_000, max_request_size=1_048_576
    ) as producer:
        for number in range(count):
            for partition in partitions:
                value = numbering.payload(partition, number, RECORD)
                waiting[await producer.send(topic, value, partition=partition)] = (partition, number)
                if len(waiting) >= AT_ONCE:
                    await answered(asyncio.FIRST_COMPLETED)
        await answered(asyncio.ALL_COMPLETED)


async def _recovers(gateway: GatewayProcess, log: Log, since: int, wanted: int) -> bool:
    """Wait until Kafka recovers; False if it is ready before."""
    async with beside(gateway.wait_ready(None)) as (ready,):
        while not ready.done():
            if log.recovered(since) >= wanted:
                return True
            await asyncio.wait({ready}, timeout=POLL_S)
    return False


def _waits(log: Path) -> int:
    """Return how often the gateway said that it waits."""
    return log.read_bytes().count(b"the embedded broker is starting for")


SCENARIOS = (
    Scenario(
        "recovery",
        "kill the embedded Kafka with many GB that it has not flushed",
        Plan(),
        run,
        lines=False,
        own_kafka=True,
    ),
)
