"""A real HTTP listener over a real broker, and a client for it."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.structs import ConsumerRecord

from gateway.config import Address, BudgetConfig, ConfigError, HttpConfig, KafkaConfig, SecurityConfig
from gateway.kafka.cluster.lookup import Lookup
from gateway.kafka.cluster.topics import Topics
from gateway.kafka.driver.client_settings import client_settings
from gateway.kafka.groups.membership import Groups
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.read.catch_up_reader import CatchUpReader
from gateway.kafka.read.live_reader import LiveReader
from gateway.kafka.state import StateTopics
from gateway.observe.tracing import Tracing
from gateway.rest.listener import RestListener
from gateway.rest.produce.idempotency import KeyedRequests
from gateway.rest.produce.idempotency_table import RequestTable
from gateway.rest.services import RestServices
from gateway.security.authentication import Authenticator
from gateway.security.authorization import AccessList
from gateway.security.group_names import GroupNames
from gateway.security.origins import Hosts, Origins
from mapping.rules import Rules

LOCAL = Address("127.0.0.1:0")


def wall_clock() -> int:
    return time.time_ns() // 1_000_000


class Gateway:
    """What a test talks to."""

    def __init__(self, listener: RestListener, services: RestServices) -> None:
        self.listener = listener
        self.publisher = services.publisher
        self.topics = services.topics
        self.live_reader = services.live_reader
        self.keyed = services.keyed

    def tail_topics(self) -> set[str]:
        """What is read at its end."""
        return set(self.live_reader.statistics().positions)

    @property
    def url(self) -> str:
        return f"http://{self.listener.bound}"


@asynccontextmanager
async def running_gateway(
    bootstrap: str,
    *,
    http: dict[str, Any] | None = None,
    kafka: dict[str, Any] | None = None,
    budget: BudgetConfig | None = None,
    security: SecurityConfig | None = None,
    create: bool = True,
    wait: bool = True,
    tls: ssl.SSLContext | None = None,
    tracing: Tracing | None = None,
    name: str = "",
) -> AsyncIterator[Gateway]:
    """`name`: of the gateway; one with a name keeps the answers to requests with a key."""
    failures: list[ConfigError] = []
    loop = asyncio.get_running_loop()
    kafka_config = KafkaConfig(bootstrap_servers=bootstrap, **(kafka or {}))
    security = security or SecurityConfig()
    async with asyncio.TaskGroup() as group:
        background: list[asyncio.Task[Any]] = []

        def spawn(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
            return group.create_task(work)

        topics = Topics(kafka_config, create=create, spawn=spawn, clock=loop.time)
        publisher = Publisher(
            kafka_config,
            budget or BudgetConfig(),
            topics,
            spawn=spawn,
            clock=loop.time,
            wall_clock=wall_clock,
            rng=random.Random(1),
        )
        authenticator = Authenticator(security)
        await authenticator.start()
        lookup = Lookup(client_settings(kafka_config, "lookup"), spawn=spawn, ensure=topics.get)
        catch_up_reader = CatchUpReader(client_settings(kafka_config, "replay"), spawn, lookup)
        live_reader = LiveReader(client_settings(kafka_config, "tail"), spawn, lookup, catch_up_reader)
        groups = Groups(
            client_settings(kafka_config, "group"),
            spawn,
            lookup,
            catch_up_reader,
            random=random.Random(2).random,
            patience=topics.queries.patience.bound,
        )
        state = StateTopics(
            client_settings(kafka_config, "state"),
            topics,
            publisher,
            lookup,
            spawn=spawn,
            partitions=1,
            largest_bytes=1 << 20,
            failed=failures.append,
        )
        http_config = HttpConfig(**{"address": LOCAL, **(http or {})})
        table = RequestTable(
            gateway=name,
            window_s=http_config.idempotency_window_s,
            max_keys=http_config.max_idempotency_keys,
            wall_clock=wall_clock,
        )
        table.bind(state)
        names = GroupNames(
            groups,
            topics,
            anonymous=security.allow_anonymous,
            wall_clock=wall_clock,
            random_id=partial(secrets.token_hex, 8),
        )
        names.bind(state)
        keyed = KeyedRequests(
            table,
            state,
            publisher,
            lookup,
            client_settings(kafka_config, "requests"),
            delivery_timeout_s=kafka_config.delivery_timeout_s,
            spawn=spawn,
            wall_clock=wall_clock,
            random_id=partial(secrets.token_hex, 8),
        )
        services = RestServices(
            config=http_config,
            publisher=publisher,
            topics=topics,
            lookup=lookup,
            live_reader=live_reader,
            catch_up_reader=catch_up_reader,
            groups=groups,
            names=names,
            authenticator=authenticator,
            access_list=AccessList(security.access),
            origins=Origins(security, more=http_config.cors_origins),
            hosts=Hosts(security),
            rules=Rules(()),
            keyed=keyed,
            kafka=client_settings(kafka_config, "http"),
            spawn=spawn,
            clock=loop.time,
            wall_clock=wall_clock,
            random_id=partial(secrets.token_hex, 16),
            tracing=tracing,
        )
        listener = RestListener(services, tls=tls)
        try:
            started = await publisher.start()
            background.append(spawn(topics.run()))
            if wait and not started:  # a broker that goes on after a pause is not there at once
                await until(lambda: publisher.reachable)
                started = True
            await live_reader.start()
            if started:
                await state.start()
                await state.loaded.wait()
            await listener.start()
            yield Gateway(listener, services)
        finally:
            await listener.stop(4.0)
            await publisher.drain(1.0)
            await groups.stop()
            await state.stop()
            await live_reader.stop()
            await catch_up_reader.stop()
            await lookup.stop()
            await publisher.stop()
            await topics.stop()
            await authenticator.stop()
            for task in background:
                task.cancel()


@pytest.fixture(scope="session")
async def gateway(bootstrap: str) -> AsyncIterator[Gateway]:
    """One listener for all tests that do not need their own."""
    ready: asyncio.Queue[Gateway] = asyncio.Queue()
    over = asyncio.Event()

    async def serve() -> None:
        async with running_gateway(bootstrap) as made:
            ready.put_nowait(made)
            await over.wait()

    # In a task of its own: a fixture is entered and left in different tasks, a task group must not be.
    async with asyncio.TaskGroup() as group:
        group.create_task(serve())
        yield await ready.get()
        over.set()


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(gateway.url) as session:
        yield session


async def read_topic(bootstrap: str, topic: str, count: int) -> list[ConsumerRecord]:
    """The first `count` records of a topic, sorted by partition and offset; read by a plain Kafka client."""
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    try:
        async with asyncio.timeout(60):
            records = [await consumer.getone() for _ in range(count)]
    finally:
        await consumer.stop()
    return sorted(records, key=lambda record: (record.partition, record.offset))


async def until(condition: Callable[[], Any], limit_s: float = 60.0) -> None:
    """Wait for a condition, with a deadline."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - counters have no events
            await asyncio.sleep(0.005)


JSON_RECORDS = {"Content-Type": "application/vnd.kafka.json.v2+json"}
BINARY_RECORDS = {"Content-Type": "application/vnd.kafka.binary.v2+json"}
TEXT_RECORDS = {"Content-Type": "application/vnd.kafka.text.v2+json"}
CONTROL = {"Content-Type": "application/vnd.kafka.v2+json"}


async def ask(session: aiohttp.ClientSession, method: str, path: str, body: Any = None, **options: Any) -> Any:
    """Status and JSON body (None when there is none) of one request; every error has the dialect's body."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    async with session.request(method, path, data=data, **options) as response:
        raw = await response.read()
        content = json.loads(raw) if raw else None
        if response.status >= 400:
            assert response.content_type == "application/vnd.kafka.v2+json"
            assert content["error_code"] == response.status
            assert content["message"]
        return response.status, content


async def raw_exchange(address: str, data: bytes) -> bytes:
    """Send bytes, and read all that comes until the gateway closes."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        async with asyncio.timeout(60):
            return await reader.read()
    finally:
        writer.close()
