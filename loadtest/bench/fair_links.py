"""Fairness among senders of records without keys: ten senders write to three partitions of a real broker at once.

    python -m loadtest.bench.fair_links BOOTSTRAP [--senders 10] [--records 1000] [--window 250] [--rounds 5]

Each sender submits its records like an AMQP link with limited credit. Each row is one round: the longest queue of full
batches per partition, the throughput, and the time from submitting a record to its acknowledgement, over all senders.
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
from gateway.kafka.publish.sender_partitions import RememberedSender
from gateway.settings.config import BudgetConfig, KafkaConfig
from mapping.record import Record

PARTITIONS = 3


class Link(Owner):
    """A sender with a limited number of unsettled records."""

    def __init__(self, publisher: Publisher, topic: str, records: int, window: int) -> None:
        self.waited: list[float] = []
        self.done = asyncio.get_running_loop().create_future()
        self._publisher, self._records, self._window = publisher, records, window
        self._record = Record(topic, None, b"x" * 1000)
        self._sender = RememberedSender(lasting=True)
        self._sent = 0

    def go_on(self) -> None:
        """Send as many records as the window allows."""
        now = time.perf_counter()
        while self._sent < self._records and self._sent - len(self.waited) < self._window:
            self._sent += 1
            self._publisher.submit(self._record, self, now, self._sender)

    def settle(self, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        """See `contracts.Owner`."""
        assert len(offsets) == len(tokens), result
        now = time.perf_counter()
        self.waited += [now - began for began in tokens]
        self.go_on()
        if len(self.waited) == self._records:
            self._sender.leave()
            self.done.set_result(None)


async def watch(publisher: Publisher, topic: str, deepest: list[int]) -> None:
    """Record the longest queues until cancelled."""
    writer = publisher._writers[topic]
    while True:
        deepest[:] = [max(most, len(queue.full)) for most, queue in zip(deepest, writer.queues, strict=True)]
        await asyncio.sleep(0.0005)


async def run(arguments: argparse.Namespace) -> None:
    """Run all rounds, after a warm-up round."""
    admin = AIOKafkaAdminClient(bootstrap_servers=arguments.bootstrap)
    await admin.start()
    topic = f"bench-{uuid.uuid4().hex[:8]}"
    await admin.create_topics([NewTopic(topic, PARTITIONS, 1)])
    loop = asyncio.get_running_loop()
    config = KafkaConfig(bootstrap_servers=arguments.bootstrap)
    ratios: list[float] = []
    rates: list[float] = []
    async with asyncio.TaskGroup() as group:
        topics = Topics(config, create=False, spawn=group.create_task, clock=loop.time)
        publisher = Publisher(
            config,
            BudgetConfig(),
            topics,
            spawn=group.create_task,
            clock=loop.time,
            wall_clock=lambda: int(time.time() * 1000),
            rng=random.Random(arguments.seed),
        )
        await publisher.start()
        await publisher.topic(topic)
        for number in range(arguments.rounds + 1):
            deepest = [0] * PARTITIONS
            watching = group.create_task(watch(publisher, topic, deepest))
            links = [Link(publisher, topic, arguments.records, arguments.window) for _ in range(arguments.senders)]
            began, cpu = time.perf_counter(), time.process_time()
            for link in links:
                link.go_on()
            await asyncio.wait([link.done for link in links])
            took, cpu = time.perf_counter() - began, time.process_time() - cpu
            watching.cancel()
            if not number:
                continue
            waited = sorted(one for link in links for one in link.waited)
            middle, high = waited[len(waited) // 2], waited[len(waited) * 9 // 10]
            ratios.append(high / middle)
            rates.append(len(waited) / took)
            print(
                f"queues {deepest}, {rates[-1]:8,.0f} records/s, p50 {middle * 1e3:6.1f} ms, p90 {high * 1e3:6.1f} ms,"
                f" p90/p50 {ratios[-1]:.2f}, {cpu / len(waited) * 1e6:.1f} us CPU/record"
            )
        await publisher.stop()
        await topics.stop()
    await admin.delete_topics([topic])
    await admin.close()
    print(f"median: {statistics.median(rates):,.0f} records/s, p90/p50 {statistics.median(ratios):.2f}")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bootstrap", help="HOST:PORT of the broker")
    parser.add_argument("--senders", type=int, default=10, help="number of senders")
    parser.add_argument("--records", type=int, default=1000, help="records per sender")
    parser.add_argument("--window", type=int, default=250, help="maximum number of unsettled records per sender")
    parser.add_argument("--rounds", type=int, default=5, help="rounds after the warm-up round")
    parser.add_argument("--seed", type=int, default=1, help="random seed")
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
