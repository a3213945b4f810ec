"""Throughput and CPU time of the publisher, compared with bare aiokafka batches in alternating rounds.

    python -m loadtest.bench.publisher BOOTSTRAP [--seconds 4] [--rounds 3] [--headers 0]

"bare" is `loadtest.bare`. "publisher" calls `submit` with an owner and a token for every record, in bursts of 100 (the
content of one read from a busy socket), with at most `--window` unsettled records. Both use the same batch size and
partitions. "lz4" and "zstd" are the publisher with compressed batches.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
import uuid
from collections.abc import Sequence
from typing import Any

import uvloop
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from gateway.kafka.cluster.topics import Topics
from gateway.kafka.contracts import Owner, Result
from gateway.kafka.publish.publisher import Publisher
from gateway.settings.config import BudgetConfig, KafkaConfig
from loadtest.bare import BATCH_BYTES, Stored, store
from mapping.record import Record

PARTITIONS = 3
BURST = 100
TELEMETRY = (
    b'{"device": "sensor-%02d", "temperature": %05.2f, "humidity": %02d, "state": "ok", "firmware": "1.4.2-rc3"}'
)
"""A typical device message of 100 bytes."""


class Counter(Owner):
    """An owner that counts settled records."""

    def __init__(self) -> None:
        self.settled = 0
        self.room = asyncio.Event()

    def settle(self, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        """Count the records, and check the offsets as a session would."""
        assert len(offsets) == len(tokens), result
        self.settled += len(tokens)
        self.room.set()


async def store_record(bootstrap: str, topic: str, record: Record, seconds: float) -> Stored:
    """Store a record repeatedly with bare aiokafka."""
    headers = [(name, value or b"") for name, value in record.headers]
    return await store(bootstrap, topic, seconds, key=record.key, value=record.value or b"", headers=headers)


async def ours(
    bootstrap: str, topic: str, records: Sequence[Record], seconds: float, window: int, *, compression: str
) -> tuple[float, float]:
    """Run the publisher; return records per second and CPU microseconds per record."""
    loop = asyncio.get_running_loop()
    settings = {"bootstrap_servers": bootstrap, "batch_bytes": BATCH_BYTES, "compression": compression}
    config = KafkaConfig.model_validate(settings)
    async with asyncio.TaskGroup() as group:
        topics = Topics(config, create=False, spawn=group.create_task, clock=loop.time)
        publisher = Publisher(
            config,
            BudgetConfig(),
            topics,
            spawn=group.create_task,
            clock=loop.time,
            wall_clock=lambda: int(time.time() * 1000),
            rng=random.Random(1),
        )
        await publisher.start()
        await publisher.topic(topic)
        owner = Counter()
        submitted = 0
        submit = publisher.submit
        began, cpu = time.perf_counter(), time.process_time()
        while time.perf_counter() - began < seconds:
            for record in records:
                submit(record, owner, submitted)
            submitted += len(records)
            await asyncio.sleep(0)
            while submitted - owner.settled > window:
                owner.room.clear()
                await owner.room.wait()
        assert await publisher.drain(30)
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        assert owner.settled == submitted
        await publisher.stop()
        await topics.stop()
    return submitted / took, cpu / submitted * 1e6


async def run(arguments: argparse.Namespace) -> None:
    """Run alternating rounds, then print the medians and their ratio."""
    admin = AIOKafkaAdminClient(bootstrap_servers=arguments.bootstrap)
    await admin.start()
    topic = f"bench-{uuid.uuid4().hex[:8]}"
    await admin.create_topics([NewTopic(topic, PARTITIONS, 1, topic_configs={"retention.bytes": "268435456"})])
    headers = tuple((f"header-{number}", b"value") for number in range(arguments.headers))
    rng = random.Random(2)
    records = [
        Record(
            topic, b"key-%d" % (number % 60), TELEMETRY % (number % 60, rng.uniform(15, 30), rng.randrange(90)), headers
        )
        for number in range(BURST)
    ]
    rates: dict[str, list[float]] = {"bare": [], "publisher": [], "lz4": [], "zstd": []}
    try:
        for number in range(arguments.rounds):
            for name, rate_list in rates.items():
                if name == "bare":
                    stored = await store_record(arguments.bootstrap, topic, records[0], arguments.seconds)
                    rate, cpu = stored.rate, stored.cpu_us
                else:
                    compression = "none" if name == "publisher" else name
                    rate, cpu = await ours(
                        arguments.bootstrap,
                        topic,
                        records,
                        arguments.seconds,
                        arguments.window,
                        compression=compression,
                    )
                rate_list.append(rate)
                print(f"round {number + 1} {name:9} {rate:11,.0f} records/s, {cpu:.2f} us CPU per record")
    finally:
        await admin.delete_topics([topic])
        await admin.close()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(
        f"median: bare {medians['bare']:,.0f}, publisher {medians['publisher']:,.0f} records/s,"
        f" ratio {medians['publisher'] / medians['bare']:.2f}"
    )


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bootstrap", help="HOST:PORT of the broker")
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of a round")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds")
    parser.add_argument("--headers", type=int, default=0, help="headers per record")
    parser.add_argument("--window", type=int, default=10_000, help="maximum number of unsettled records")
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
