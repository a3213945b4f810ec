"""The foreign AMQP clients as fixtures: each driver starts once, with the first test that needs it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.interop.amqp.clients import DRIVERS, QPID_JMS, Kind
from tests.interop.amqp.drivers import Client
from tests.interop.amqp.jms import JmsClient
from tests.interop.driver import Drivers, Wire, started
from tests.support.gateway import GatewayProcess

NewClient = Callable[..., Awaitable[Client]]
NewJms = Callable[..., Awaitable[JmsClient]]
CONFIG = """
[kafka]
create_topics = true
[amqp]
dead_letter_topic = "{topic}-dlq"
max_attempts = 3
max_message_bytes = 900000
"""


@pytest.fixture(scope="session")
async def amqp_drivers() -> AsyncIterator[Drivers]:
    async with started(DRIVERS) as drivers:
        yield drivers


@pytest.fixture(scope="session")
async def amqp_gateway(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcess]:
    """A gateway with a dead-letter topic, temporary nodes and few attempts."""
    process = await GatewayProcess(tmp_path_factory.mktemp("amqp-gateway"), bootstrap, config=CONFIG).start()
    yield process
    assert await process.stop() == 0


@pytest.fixture
async def new_client(amqp_drivers: Drivers, amqp_gateway: GatewayProcess) -> AsyncIterator[NewClient]:
    """Make foreign clients (`await new_client(GO, **fields of connect)`), connected unless `connected=False`."""
    made: list[Client] = []

    async def make(
        kind: Kind,
        *,
        at: GatewayProcess | None = None,
        through: Wire | None = None,
        connected: bool = True,
        **fields: object,
    ) -> Client:
        listener = "http" if kind.transport == "ws" else "amqp"
        address = through.address if through is not None else (at or amqp_gateway).address(listener)
        path = "/amqp" if kind.transport == "ws" else None
        client = Client(await amqp_drivers(kind.library), address, path=path)
        made.append(client)
        if connected:
            await client.connect(**fields)
        return client

    yield make
    for client in made:
        await client.release()


@pytest.fixture
def own() -> str:
    """A topic name for this test only; the gateway creates the topic."""
    return f"t-{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def new_jms(amqp_drivers: Drivers, amqp_gateway: GatewayProcess) -> AsyncIterator[NewJms]:
    """Make JMS connections: `await new_jms("option=value", id=JMS's ClientID)`."""
    made: list[JmsClient] = []

    async def make(
        *options: str, at: GatewayProcess | None = None, connected: bool = True, **fields: object
    ) -> JmsClient:
        host, port = (at or amqp_gateway).address("amqp")
        uri = f"amqp://{host}:{port}?" + "&".join(options)
        client = JmsClient(await amqp_drivers(QPID_JMS), uri)
        made.append(client)
        return await client.connect(**fields) if connected else client

    yield make
    for client in made:
        await client.release()
