"""Readers of a real broker, subscribers with a given capacity, and waiting with a deadline."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.contracts import Fanout, Subscriber
from gateway.kafka.groups.membership import Groups
from gateway.kafka.groups.times import GroupTimes
from gateway.kafka.read.catch_up_reader import CatchUpReader
from gateway.kafka.read.live_reader import LiveReader
from mapping.record import Received
from tests.support.waiting import wait_until


class Sink(Subscriber):
    """A subscriber that accepts `capacity` more records, or all if `capacity` is None."""

    lossy = False

    def __init__(self, capacity: int | None = None, *, lossy: bool = False) -> None:
        self.capacity = capacity
        self.lossy = lossy
        self.got: list[Received] = []
        self.refused = 0

    def offer_nowait(self, record: Received, context: object = None) -> bool:
        if self.capacity is not None:
            if self.capacity == 0:
                self.refused += 1
                return False
            self.capacity -= 1
        self.got.append(record)
        return True

    def offer_run(self, records: Sequence[Received], context: object) -> int:
        """Accept as many of the records as fit; this is how a lossy subscriber is offered records."""
        return sum(1 for _ in itertools.takewhile(self.offer_nowait, records))

    @property
    def demand(self) -> int:
        return 1_000_000 if self.capacity is None else self.capacity

    @property
    def values(self) -> list[bytes | None]:
        return [record.value for record in self.got]

    def by_partition(self) -> dict[tuple[str, int], list[int]]:
        offsets: dict[tuple[str, int], list[int]] = defaultdict(list)
        for record in self.got:
            offsets[record.topic, record.partition].append(record.offset)
        return offsets

    def check_complete(self, count: int) -> None:
        """Assert that exactly `count` records came, in order and without a gap in each partition."""
        assert len(self.got) == count
        for partition, offsets in self.by_partition().items():
            assert offsets == list(range(offsets[0], offsets[0] + len(offsets))), partition


class Holder(Sink):
    """A subscriber of a group that holds the records it accepted until the test settles them."""

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(capacity)
        self.held: list[Received] = []
        self.membership: Any = None

    def offer_nowait(self, record: Received, context: object = None) -> bool:
        if not super().offer_nowait(record, context):
            return False
        self.held.append(record)
        return True

    def settle(self, count: int | None = None) -> list[Received]:
        """Settle the oldest `count` held records, or all, and add their number to the capacity."""
        settled = self.held[:count]
        del self.held[: len(settled)]
        for record in settled:
            self.membership.done(record)
        if self.capacity is not None:
            self.capacity += len(settled)
        self.membership.wake()
        return settled


class Fan(Fanout):
    """A fan-out to a fixed set of subscribers."""

    def __init__(self, *subscribers: Any) -> None:
        self.subscribers = subscribers

    def select(self, records: Sequence[Received], at: int) -> tuple[tuple[Any, ...], int]:
        return tuple((subscriber, None) for subscriber in self.subscribers), len(records) - at


class Shell:
    """The readers of one gateway process, wired as in the application, and the classes above for the tests."""

    Sink, Holder, Fan, wait_until = Sink, Holder, Fan, staticmethod(wait_until)

    def __init__(self, bootstrap: str, **options: Any) -> None:
        self.bootstrap = bootstrap
        requests_ms = options.pop("request_timeout_ms", 10_000)
        self.kafka = {"bootstrap_servers": bootstrap, "metadata_max_age_ms": 1000, "request_timeout_ms": requests_ms}
        self.tasks: set[asyncio.Task[None]] = set()
        self.lookup = Lookup(self.kafka, spawn=self.spawn, timeout_s=options.pop("lookup_timeout_s", 60.0))
        self.catch_up_reader = CatchUpReader(self.kafka, self.spawn, self.lookup, consumers=options.pop("consumers", 2))
        self.live_reader = LiveReader(self.kafka, self.spawn, self.lookup, self.catch_up_reader)
        times = GroupTimes(**options)
        self.groups = Groups(
            self.kafka, self.spawn, self.lookup, self.catch_up_reader, random=random.random, times=times
        )

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        return task

    def another(self, **options: Any) -> Shell:
        """Make a second process on the same broker; the test must stop it."""
        return Shell(self.bootstrap, **options)

    async def stop(self) -> None:
        await self.groups.stop()
        await self.live_reader.stop()
        await self.catch_up_reader.stop()
        await self.lookup.stop()
        if self.tasks:  # a task that was cancelled while it connected finishes by itself
            await asyncio.wait(self.tasks, timeout=60)
        for task in self.tasks:
            assert task.done(), task
            if not task.cancelled():
                task.result()


@pytest.fixture
async def readers(bootstrap: str) -> AsyncIterator[Shell]:
    shell = Shell(bootstrap)
    await shell.live_reader.start()
    yield shell
    await shell.stop()


@pytest.fixture
async def producer(bootstrap: str) -> AsyncIterator[AIOKafkaProducer]:
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", linger_ms=1) as client:
        yield client
