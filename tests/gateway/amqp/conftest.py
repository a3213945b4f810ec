"""The AMQP listener over a real Kafka, and proton's blocking client against it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.amqp.server import AmqpServer
from gateway.process.assembly import Process, open_listener_security
from gateway.process.listeners import make_amqp
from gateway.runtime.identity import GatewayIdentity
from gateway.settings.config import Address, AmqpConfig, SecurityConfig
from tests.support.assembled import Assembled, assembled

LOCAL = Address("127.0.0.1:0")
StartListener = Callable[..., Awaitable[AmqpServer]]


@contextlib.asynccontextmanager
async def amqp_listener(
    backend: Assembled,
    *,
    amqp: dict[str, Any] | None = None,
    security: SecurityConfig | None = None,
) -> AsyncIterator[AmqpServer]:
    """The AMQP side with its own settings, on services that it may share with other protocols."""
    settings = {"amqp": AmqpConfig(address=LOCAL, **(amqp or {})), "security": security or SecurityConfig()}
    async with contextlib.AsyncExitStack() as stack:
        made = backend.process
        process = Process(made.config.model_copy(update=settings), made.tasks, stack, made.loop, made.rng)
        shared = await open_listener_security(process)
        identity = GatewayIdentity(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        stack.callback(identity.close)
        listener = make_amqp(
            process,
            shared,
            backend.log,
            replace(backend.state, identity=identity),
        )
        await listener.start()
        stack.push_async_callback(listener.stop, 2.0)
        stack.callback(listener.stop_receiving)
        yield listener


@pytest.fixture(scope="module")  # the session's loop stops between tests, which looks like a freeze
async def backend(bootstrap: str) -> AsyncIterator[Assembled]:
    async with assembled(bootstrap, create=False) as backend:
        yield backend


@pytest.fixture
async def start_listener(backend: Assembled) -> AsyncIterator[StartListener]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(**options: Any) -> AmqpServer:
            return await stack.enter_async_context(amqp_listener(backend, **options))

        yield start
    backend.check()


@pytest.fixture
async def listener(start_listener: StartListener) -> AmqpServer:
    return await start_listener()


@pytest.fixture
def own_listener() -> Callable[[str], contextlib.AbstractAsyncContextManager[AmqpServer]]:
    """A listener with a broker for this test only."""

    @contextlib.asynccontextmanager
    async def make(bootstrap: str) -> AsyncIterator[AmqpServer]:
        async with assembled(bootstrap, create=True) as backend, amqp_listener(backend) as listener:
            yield listener

    return make
