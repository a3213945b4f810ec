"""A real HTTP listener over a real broker, and a client for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.structs import ConsumerRecord
from msgspec.structs import replace

from gateway.kafka.log import Log
from gateway.observe.tracing import Tracing
from gateway.process.assembly import ListenerSecurity
from gateway.process.listeners import make_rest
from gateway.rest.rest_server import RestServer
from gateway.security.identity import Identity
from gateway.security.rights.access_rules import ListedRules
from gateway.settings.config import AccessRule, Address, BudgetConfig, SecurityConfig
from tests.support.assembled import assembled

LOCAL = Address("127.0.0.1:0")


class ChangingRules(ListedRules):
    """Rules that may differ from those before."""

    def may_change_for(self, identity: Identity) -> bool:
        return True


class Gateway:
    """The gateway of a test, and clients for it."""

    def __init__(self, listener: RestServer, log: Log, security: ListenerSecurity) -> None:
        self.listener = listener
        self.authenticator = security.authenticator
        self.access_list = security.access_list
        self.tenants = security.tenants
        self.publisher = log.publisher
        self.topics = log.topics
        self.live_reader = log.live_reader

    def tail_topics(self) -> set[str]:
        """What is read at its end."""
        return set(self.live_reader.statistics().positions)

    def counts(self, operations: str) -> Any:
        """The counts of a set of operations, by its name in the metrics."""
        return dict(self.listener.sources())[f"http_{operations}"]()

    def use_rules(self, *rules: AccessRule) -> None:
        """Change the rights of all clients, as a change of Kafka's ACLs does."""
        self.access_list.use(ChangingRules(rules))

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
    tracing: Tracing | None = None,
    data_dir: Path | None = None,
) -> AsyncIterator[Gateway]:
    """With the same `data_dir` it is the same gateway started again."""
    async with assembled(
        bootstrap,
        create=create,
        wait=wait,
        data_dir=data_dir,
        kafka=kafka,
        http={"address": LOCAL, **(http or {})},
        budget=budget,
        security=security,
    ) as made:
        shared = made.security
        shared = replace(shared, tracing=tracing or shared.tracing)
        listener = make_rest(made.process, shared, made.log, made.state)
        await listener.start()
        try:
            yield Gateway(listener, made.log, shared)
        finally:
            listener.stop_receiving()
            await made.log.publisher.drain(1.0)
            await listener.stop(4.0)


@pytest.fixture(scope="module")  # not the session: its loop does not run during other tests
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
