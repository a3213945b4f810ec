"""A publisher with its dependencies, an owner that records its calls, and a reader of whole topics."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from gateway.embedded.broker import EmbeddedBroker
from gateway.kafka.cluster.topics import Topics
from gateway.kafka.contracts import Owner
from gateway.kafka.publish.publisher import Publisher
from gateway.settings.config import BudgetConfig, KafkaConfig
from mapping.outcomes import Outcome
from tests.support.frozen import freeze as freeze_process
from tests.support.topics import create_topic, read_all
from tests.support.waiting import wait_until


class Recorder(Owner):
    """An owner that records each call and each token's outcome; settling a token twice fails the test."""

    def __init__(self, budget: Any = None) -> None:
        self.budget = budget
        self.calls: list[tuple[list[Any], list[int], Any]] = []
        self.fates: dict[Any, Any] = {}
        self.offsets: dict[Any, tuple[int, int]] = {}
        self.faults: list[str] = []
        self.submitting = False

    def settle(self, tokens: Any, offsets: Any, result: Any) -> None:
        tokens, offsets = list(tokens), list(offsets)
        if self.submitting:
            self.faults.append("settled from inside submit")
        if len(offsets) != (len(tokens) if result.outcome is Outcome.STORED else 0):
            self.faults.append(f"{len(tokens)} tokens, {len(offsets)} offsets, {result}")
        self.calls.append((tokens, offsets, result))
        for token in tokens:
            if token in self.fates:
                self.faults.append(f"{token} was settled twice")
            self.fates[token] = result
        for token, offset in zip(tokens, offsets, strict=False):
            self.offsets[token] = (result.partition, offset)

    def outcomes(self) -> dict[Any, Outcome]:
        return {token: result.outcome for token, result in self.fates.items()}


class Kit:
    """The publisher and its dependencies, for a test."""

    def __init__(self, publisher: Publisher, topics: Topics, ahead: list[float], slept: list[float]) -> None:
        self.publisher = publisher
        self.topics = topics
        self.ahead = ahead  # one element: how far the clock of `topics` is ahead of the loop's
        self.slept = slept  # one element: how long the process was stopped, as the publisher sees it
        self.until = wait_until
        self.recorders: list[Recorder] = []

    def recorder(self, budget: Any = None) -> Recorder:
        self.recorders.append(Recorder(budget))
        return self.recorders[-1]

    def submit(self, record: Any, owner: Any, token: Any = None) -> None:
        for recorder in self.recorders:
            recorder.submitting = True
        self.publisher.submit(record, owner, token)
        for recorder in self.recorders:
            recorder.submitting = False


@contextlib.asynccontextmanager
async def open_kit(
    bootstrap: str, *, create: bool = False, limits: BudgetConfig | None = None, **options: Any
) -> AsyncIterator[Kit]:
    loop = asyncio.get_running_loop()
    config = KafkaConfig(bootstrap_servers=bootstrap, **options)
    async with asyncio.TaskGroup() as group:
        ahead, slept = [0.0], [0.0]
        topics = Topics(config, create=create, spawn=group.create_task, clock=lambda: loop.time() + ahead[0])
        publisher = Publisher(
            config,
            limits or BudgetConfig(),
            topics,
            spawn=group.create_task,
            clock=lambda: loop.time() + slept[0],
            wall_clock=lambda: int(time.time() * 1000),
            rng=random.Random(7),
        )
        refreshing = group.create_task(topics.run())
        await publisher.start()
        kit = Kit(publisher, topics, ahead, slept)
        try:
            yield kit
        finally:
            await publisher.drain(0)
            await publisher.stop()
            refreshing.cancel()
            await topics.stop()
    assert (publisher.budget.bytes, publisher.budget.records, publisher.gate.is_open) == (0, 0, True)
    for recorder in kit.recorders:
        assert not recorder.faults
        assert recorder.budget is None or (recorder.budget.bytes, recorder.budget.records) == (0, 0)


@pytest.fixture
def kit() -> Callable[..., contextlib.AbstractAsyncContextManager[Kit]]:
    """`async with kit(bootstrap, create=..., **KafkaConfig options) as k:`; at the end no record may be in flight."""
    return open_kit


@pytest.fixture
def frozen(stoppable: EmbeddedBroker) -> Callable[..., contextlib.AbstractContextManager[None]]:
    """`with frozen():` the broker's process is stopped (SIGSTOP) inside and continues afterwards."""

    @contextlib.contextmanager
    def freeze() -> Iterator[None]:
        freeze_process(stoppable.pid)
        try:
            yield
        finally:
            os.kill(stoppable.pid, signal.SIGCONT)

    return freeze


@pytest.fixture
async def own_topic(stoppable: EmbeddedBroker) -> Callable[..., Awaitable[str]]:
    """`await own_topic(partitions)`: a new topic of the stoppable broker."""

    async def create(partitions: int = 3) -> str:
        admin = AIOKafkaAdminClient(bootstrap_servers=stoppable.bootstrap_servers)
        await admin.start()
        try:
            return await create_topic(admin, partitions)
        finally:
            await admin.close()

    return create


@pytest.fixture
def read_topic() -> Callable[..., Any]:
    """`await read_topic(bootstrap, topic)`: every record, as a dictionary from partition to the list."""

    async def read(bootstrap: str, topic: str) -> dict[int, list[Any]]:
        found: defaultdict[int, list[Any]] = defaultdict(list)
        for record in await read_all(bootstrap, topic):
            found[record.partition].append(record)
        return found

    return read
