"""The AMQP front over a real Kafka, and proton's blocking client against it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import pytest

from gateway.amqp.front import AmqpFront
from gateway.amqp.services import Services
from gateway.config import Address, AmqpConfig, BudgetConfig, ConfigError, KafkaConfig, SecurityConfig
from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.cluster.topics import Topics
from gateway.kafka.driver.client_settings import client_settings
from gateway.kafka.groups.membership import Groups
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.read.catch_up_reader import CatchUpReader
from gateway.kafka.read.live_reader import LiveReader
from gateway.kafka.state import StateTopics
from gateway.kafka.transactions.kafka_transaction import Transactions
from gateway.kafka.transactions.transactional_producers import TransactionalProducerPool
from gateway.security.authentication import Authenticator
from gateway.security.authorization import AccessList
from gateway.security.group_names import GroupNames

StartFront = Callable[..., Awaitable[AmqpFront]]


class Backend:
    """The Kafka side that every front of the run shares.

    A crash in its background work would end a gateway, whose tasks are of one group: `check` makes a test of it.
    """

    crashes: list[BaseException]
    config: KafkaConfig
    publisher: Publisher
    lookup: Lookup
    live_reader: LiveReader
    groups: Groups
    names: GroupNames
    spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]

    def check(self) -> None:
        crashes, self.crashes[:] = list(self.crashes), []
        if crashes:
            raise BaseExceptionGroup("background work crashed", crashes)


@contextlib.asynccontextmanager
async def kafka_side(
    bootstrap: str, *, create: bool = False, budget: BudgetConfig | None = None
) -> AsyncIterator[Backend]:
    loop = asyncio.get_running_loop()
    backend = Backend()
    backend.crashes = []
    tasks: set[asyncio.Task[Any]] = set()

    def ended(task: asyncio.Task[Any]) -> None:
        tasks.discard(task)
        crash = None if task.cancelled() else task.exception()
        if crash is not None:
            backend.crashes.append(crash)

    def spawn(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(ended)
        return task

    config = KafkaConfig(bootstrap_servers=bootstrap)
    topics = Topics(config, create=create, spawn=spawn, clock=loop.time)
    refreshing = spawn(topics.run())
    publisher = Publisher(
        config,
        budget or BudgetConfig(),
        topics,
        spawn=spawn,
        clock=loop.time,
        wall_clock=lambda: time.time_ns() // 1_000_000,
        rng=random.Random(7),
    )
    await publisher.start()
    lookup = Lookup(client_settings(config, "lookup"), spawn=spawn, ensure=topics.get)
    catch_up_reader = CatchUpReader(client_settings(config, "replay"), spawn, lookup)
    live_reader = LiveReader(client_settings(config, "tail"), spawn, lookup, catch_up_reader)
    await live_reader.start()
    groups = Groups(
        client_settings(config, "group"),
        spawn,
        lookup,
        catch_up_reader,
        random=random.Random(7).random,
        patience=topics.queries.patience.bound,
    )
    failures: list[ConfigError] = []
    state = StateTopics(
        client_settings(config, "state"),
        topics,
        publisher,
        lookup,
        spawn=spawn,
        partitions=1,
        largest_bytes=1 << 20,
        failed=failures.append,
    )
    names = GroupNames(
        groups,
        topics,
        anonymous=True,
        wall_clock=lambda: time.time_ns() // 1_000_000,
        random_id=lambda: secrets.token_hex(8),
    )
    names.bind(state)
    await state.start()
    backend.names = names
    backend.lookup = lookup
    backend.config = config
    backend.publisher, backend.live_reader, backend.groups, backend.spawn = publisher, live_reader, groups, spawn
    try:
        yield backend
    finally:
        await publisher.drain(5)
        await groups.stop()
        await state.stop()
        await live_reader.stop()
        await catch_up_reader.stop()
        await lookup.stop()
        await publisher.stop()
        refreshing.cancel()
        await topics.stop()
        await asyncio.gather(*tasks, return_exceptions=True)
    backend.check()


@contextlib.asynccontextmanager
async def amqp_front(
    backend: Backend,
    *,
    amqp: dict[str, Any] | None = None,
    security: SecurityConfig | None = None,
    tls: Any = None,
) -> AsyncIterator[AmqpFront]:
    secured = security or SecurityConfig()
    authenticator = Authenticator(secured)
    await authenticator.start()
    config = AmqpConfig(**{"address": Address("127.0.0.1:0"), **(amqp or {})})
    producer_pool = TransactionalProducerPool(
        backend.config,
        name=secrets.token_hex(8),
        limit=config.transaction_producers,
        timeout_s=config.transaction_timeout_s,
        marks=None,
        spawn=backend.spawn,
        clock=asyncio.get_running_loop().time,
    )

    def wall_clock() -> int:
        return time.time_ns() // 1_000_000

    transactions = Transactions(
        backend.config,
        producer_pool,
        backend.publisher,
        spawn=backend.spawn,
        wall_clock=wall_clock,
    )
    services = Services(
        config,
        container_id="trivium-test",
        publisher=backend.publisher,
        live_reader=backend.live_reader,
        groups=backend.groups,
        names=backend.names,
        transactions=transactions,
        authenticator=authenticator,
        access=AccessList(secured.access),
        wall_clock=wall_clock,
        random_id=lambda: secrets.token_hex(16),
    )
    front = AmqpFront(services, backend.spawn, tls)
    await front.start()
    try:
        yield front
    finally:
        front.stop_taking()
        await front.stop(2.0)
        await producer_pool.stop()
        await authenticator.stop()


@pytest.fixture(scope="session")
async def backend(bootstrap: str) -> AsyncIterator[Backend]:
    async with kafka_side(bootstrap) as backend:
        yield backend


@pytest.fixture
async def start_front(backend: Backend) -> AsyncIterator[StartFront]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(**options: Any) -> AmqpFront:
            return await stack.enter_async_context(amqp_front(backend, **options))

        yield start
    backend.check()


@pytest.fixture
async def front(start_front: StartFront) -> AmqpFront:
    return await start_front()


@pytest.fixture
def own_front() -> Callable[[str], contextlib.AbstractAsyncContextManager[AmqpFront]]:
    """A front over a broker of the test's own."""

    @contextlib.asynccontextmanager
    async def make(bootstrap: str) -> AsyncIterator[AmqpFront]:
        async with kafka_side(bootstrap, create=True) as backend, amqp_front(backend) as front:
            yield front

    return make
