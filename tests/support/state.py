"""The state topics of one gateway process on a real Kafka."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from typing import Any

from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.cluster.topics import Topics
from gateway.kafka.contracts import Owner
from gateway.kafka.driver.client_settings import client_settings
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.state import StateTopics
from gateway.settings.config import BudgetConfig, ConfigError, KafkaConfig
from mapping.outcomes import Outcome
from mapping.record import Received


class StateProcess:
    """The parts of a gateway process that state topics need."""

    def __init__(self, group: asyncio.TaskGroup, bootstrap: str, *, create: bool, partitions: int) -> None:
        loop = asyncio.get_running_loop()
        config = KafkaConfig(
            bootstrap_servers=bootstrap, metadata_max_age_s=1.0, request_timeout_s=5.0, delivery_timeout_s=60.0
        )
        self.kafka = client_settings(config, "state")
        self.spawn = group.create_task
        self.failures: list[ConfigError] = []
        self.topics = Topics(config, create=create, spawn=self.spawn, clock=loop.time)
        self.publisher = Publisher(
            config,
            BudgetConfig(),
            self.topics,
            spawn=self.spawn,
            clock=loop.time,
            wall_clock=lambda: time.time_ns() // 1_000_000,
            rng=random.Random(7),
        )
        self.lookup = Lookup(client_settings(config, "lookup"), spawn=self.spawn)
        self.state = StateTopics(
            self.kafka,
            self.topics,
            self.publisher,
            self.lookup,
            spawn=self.spawn,
            partitions=partitions,
            largest_bytes=config.max_request_bytes,
            failed=self.failures.append,
        )


@contextlib.asynccontextmanager
async def state_process(bootstrap: str, *, create: bool = False, partitions: int = 4) -> AsyncIterator[StateProcess]:
    """Make a process with its state topics, not started; everything is stopped at the end."""
    async with asyncio.TaskGroup() as group:
        process = StateProcess(group, bootstrap, create=create, partitions=partitions)
        refreshing = group.create_task(process.topics.run())
        await process.publisher.start()
        try:
            yield process
        finally:
            await process.publisher.drain(0)
            await process.state.stop()
            await process.publisher.stop()
            refreshing.cancel()
            await process.lookup.stop()
            await process.topics.stop()


class Table:
    """The simplest table: the last value of each key, and every received record."""

    def __init__(self, process: StateProcess, name: str) -> None:
        self.seen: list[Received] = []
        self.values: dict[bytes | None, bytes] = {}
        self.restarted: list[int] = []
        self.topic = process.state.open(name, self.apply, self.restarted.append)

    def apply(self, record: Received) -> None:
        self.seen.append(record)
        if record.value is None:
            self.values.pop(record.key, None)
        else:
            self.values[record.key] = record.value


class Answers(Owner):
    """An owner that records the outcome of each token."""

    def __init__(self) -> None:
        self.outcomes: dict[Any, Outcome] = {}
        self.offsets: dict[Any, int] = {}
        self.reasons: dict[Any, str] = {}

    def settle(self, tokens: Any, offsets: Any, result: Any) -> None:
        for token in tokens:
            assert token not in self.outcomes, f"{token} was settled twice"
            self.outcomes[token] = result.outcome
            self.reasons[token] = result.reason
        self.offsets |= dict(zip(tokens, offsets, strict=False))
