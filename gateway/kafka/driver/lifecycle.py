"""How a client of aiokafka begins, is tried again while Kafka does not answer, and ends: the one place for all of them.

`start_client` starts one client for a caller that may be cancelled. `started` tries until one is started (producers).
`OnDemand` holds a client that is made with the first question (lookups, administration). `keep_consumer` lends a
started consumer to a reader, and another one after each failure; `open_consumer` lends one, once (log scans). A group's
member has more states than these: it calls `start_consumer` and `close_consumer` itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final, Generic, TypeVar

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaConnectionError, KafkaError

from gateway.failures import failures
from gateway.kafka.driver.broker_connection import use_broker_connections
from gateway.kafka.driver.fetching import convert_arrivals, use_paced_fetchers
from gateway.kafka.driver.kafka_consumer import close_consumer
from gateway.kafka.driver.outage import outage
from gateway.spawn import Spawn

C = TypeVar("C")

use_broker_connections()
use_paced_fetchers()

RETRY_S: Final = 0.5
"""Pause between attempts to reach Kafka; a frequent attempt costs little and finds Kafka soon after it is back."""


async def start_client(
    start: Callable[[], Awaitable[object]],
    close: Callable[[], Coroutine[Any, Any, None]],
    spawn: Spawn,
) -> None:
    """Start a client for somebody who may be cancelled; it is closed when it was not started, or for nobody.

    Cancelled in its bootstrap, aiokafka forgets a connection that is open. So it goes on to the end by itself. `close`
    ends what was started, or half started.

    Raises:
        KafkaError: Kafka is away, or refuses us.
    """
    started = given_up = False
    failed: Exception | None = None

    async def run() -> None:
        nonlocal failed, started
        try:
            await start()
            started = True
        except Exception as error:  # it is told to whoever waits
            failed = error
        finally:
            if given_up or not started:
                await close()

    try:
        await asyncio.shield(spawn(run()))
    except BaseException:
        given_up = True
        if started:  # in this very turn
            spawn(close())
        raise
    if failed is not None:
        raise failed


async def started(
    make: Callable[[], C], start: Callable[[C], Awaitable[None]], part: str, *, longest_pause_s: float = RETRY_S
) -> C:
    """A client that is started, tried with a new one until Kafka answers.

    `part` is who needs it: the name in the log, and the place of unforeseen failures. The pause between attempts
    doubles up to `longest_pause_s`.
    """
    pause = RETRY_S
    while True:
        client = make()
        try:
            await start(client)
        except (KafkaError, OSError) as error:
            outage.notice(part, type(error).__name__)
        except Exception as error:  # the callers that wait for a client must not wait for ever
            failures.tell(part, error)
        else:
            return client
        await asyncio.sleep(pause)
        pause = min(2 * pause, longest_pause_s)


class OnDemand(Generic[C]):
    """One client, made and started with the first `get`, and shared by all callers."""

    def __init__(self, make: Callable[[], C], start: Callable[[C], Awaitable[object]], spawn: Spawn) -> None:
        """`make` makes a client, which has aiokafka's `close`; `start` starts it."""
        self._make = make
        self._start = start
        self._spawn = spawn
        self._client: C | None = None
        self._opening = asyncio.Lock()
        self._stopped = False

    async def get(self) -> C:
        """The started client; KafkaError: Kafka is away or refuses us, or `stop` was called."""
        async with self._opening:
            if self._client is None:
                if self._stopped:
                    raise KafkaConnectionError("stopped")
                client: Any = self._make()
                await start_client(lambda: self._start(client), client.close, self._spawn)
                self._client = client
            return self._client

    async def drop(self, client: C | None) -> None:
        """Close a client that has failed; the next `get` begins with the bootstrap servers again."""
        if client is not None and client is self._client:
            await self._close()

    async def stop(self) -> None:
        """Close the client; there is no other afterwards."""
        self._stopped = True
        await self._close()

    async def _close(self) -> None:
        client: Any = self._client
        self._client = None
        if client is not None:
            await client.close()


async def start_consumer(consumer: AIOKafkaConsumer, spawn: Spawn) -> None:
    """Start a consumer as `start_client` does. Its `getmany` brings `Received`.

    Raises:
        KafkaError: Kafka is away, or refuses us.
    """

    async def start() -> None:
        await consumer.start()
        if not consumer._client.cluster.brokers():  # a member of a group would end by it: nobody to ask
            raise KafkaConnectionError("Kafka names no broker: it has just started")

    async def close() -> None:
        await close_consumer(consumer)

    await start_client(start, close, spawn)
    convert_arrivals(consumer)


@contextlib.asynccontextmanager
async def open_consumer(consumer: AIOKafkaConsumer, spawn: Spawn) -> AsyncIterator[AIOKafkaConsumer]:
    """A consumer that is started at the beginning of the block and closed at its end.

    Raises:
        KafkaError: Kafka is away, or refuses us.
    """
    await start_consumer(consumer, spawn)
    try:
        yield consumer
    finally:
        await close_consumer(consumer)


async def keep_consumer(
    make: Callable[[], AIOKafkaConsumer], use: Callable[[AIOKafkaConsumer], Awaitable[None]], part: str, spawn: Spawn
) -> None:
    """Let `use` work with a started consumer until it returns, and with another one after each of Kafka's errors.

    It reads on from the place that the attempts before have reached. `part` of the gateway is its name in the log.
    """
    while True:
        try:
            async with open_consumer(make(), spawn) as consumer:
                await use(consumer)
                return
        except KafkaError as error:
            outage.notice(part, repr(error))
        await asyncio.sleep(RETRY_S)
