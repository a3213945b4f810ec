"""The AMQP front over a real Kafka, and proton's blocking client against it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.amqp.front import AmqpFront
from gateway.assembly import Process, open_listener_security
from gateway.config import Address, AmqpConfig, SecurityConfig
from gateway.fronts import make_amqp
from gateway.identity import GatewayIdentity
from tests.support.assembled import Assembled, assembled

LOCAL = Address("127.0.0.1:0")
StartFront = Callable[..., Awaitable[AmqpFront]]


@contextlib.asynccontextmanager
async def amqp_front(
    backend: Assembled,
    *,
    amqp: dict[str, Any] | None = None,
    security: SecurityConfig | None = None,
    tls: Any = None,
) -> AsyncIterator[AmqpFront]:
    """AMQP's side with settings of its own, over parts that it may share with others."""
    settings = {"amqp": AmqpConfig(address=LOCAL, **(amqp or {})), "security": security or SecurityConfig()}
    async with contextlib.AsyncExitStack() as stack:
        made = backend.process
        process = Process(made.config.model_copy(update=settings), made.tasks, stack, made.loop, made.rng)
        shared = await open_listener_security(process)
        identity = GatewayIdentity(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        stack.callback(identity.close)
        front = make_amqp(
            process,
            replace(shared, tls_context=tls or shared.tls_context),
            backend.log,
            replace(backend.state, identity=identity),
        )
        await front.start()
        stack.push_async_callback(front.stop, 2.0)
        stack.callback(front.stop_taking)
        yield front


@pytest.fixture(scope="session")
async def backend(bootstrap: str) -> AsyncIterator[Assembled]:
    async with assembled(bootstrap, create=False) as backend:
        yield backend


@pytest.fixture
async def start_front(backend: Assembled) -> AsyncIterator[StartFront]:
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
        async with assembled(bootstrap, create=True) as backend, amqp_front(backend) as front:
            yield front

    return make
