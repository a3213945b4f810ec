"""Bare aiokafka as a baseline: fills and sends batches, without clients or a gateway.

    python -m loadtest.bare BOOTSTRAP TOPIC --seconds 4

One batch per partition is in flight, and the next is filled when it is acknowledged; `acks=all`, idempotent. The last
line is JSON with the number of stored records, the seconds, and the CPU time of this process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Collection
from typing import Any, Final, NamedTuple

import uvloop
from aiokafka import AIOKafkaProducer

from loadtest.child import command_line
from loadtest.start import start_process

BATCH_BYTES: Final = 65536
SIZE: Final = 100


class Stored(NamedTuple):
    """The result."""

    records: int
    seconds: float
    cpu_s: float

    @property
    def rate(self) -> float:
        """Records per second."""
        return self.records / self.seconds

    @property
    def cpu_us(self) -> float:
        """CPU microseconds per record."""
        return self.cpu_s / self.records * 1e6

    def row(self) -> dict[str, Any]:
        """Return the columns of a report."""
        return {"per second": round(self.rate), "cpu us": round(self.cpu_us, 2), "load": round(os.getloadavg()[0], 1)}


async def store(bootstrap: str, topic: str, seconds: float) -> Stored:
    """Store the same record for `seconds` in each of the topic's partitions."""
    sent = 0
    async with AIOKafkaProducer(
        bootstrap_servers=bootstrap, acks="all", enable_idempotence=True, max_batch_size=BATCH_BYTES, linger_ms=0
    ) as producer:
        partitions = await producer.partitions_for(topic)
        began, cpu = time.perf_counter(), time.process_time()

        async def fill(partition: int) -> None:
            nonlocal sent
            while time.perf_counter() - began < seconds:
                batch = producer.create_batch()
                append = batch.append
                count = 0
                while append(key=None, value=bytes(SIZE), timestamp=None) is not None:
                    count += 1
                await (await producer.send_batch(batch, topic, partition=partition))
                sent += count

        async with asyncio.TaskGroup() as group:
            for partition in partitions:
                group.create_task(fill(partition))
        return Stored(sent, time.perf_counter() - began, time.process_time() - cpu)


async def store_beside(bootstrap: str, topic: str, seconds: float, processors: Collection[int]) -> Stored:
    """Do the same in another process, on these processors."""
    process = await start_process(
        *command_line(sys.executable, "-m", "loadtest.bare", bootstrap, topic, "--seconds", str(seconds)),
        stdout=asyncio.subprocess.PIPE,
    )
    os.sched_setaffinity(process.pid, processors)
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"bare aiokafka ended with {process.returncode}")
    return Stored(**json.loads(output))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bootstrap", help="HOST:PORT of the broker")
    parser.add_argument("topic")
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    print(json.dumps(uvloop.run(store(options.bootstrap, options.topic, options.seconds))._asdict()))


if __name__ == "__main__":
    main()
