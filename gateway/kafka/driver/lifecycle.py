"""Start, retry and close aiokafka clients: the only place that does.

`start_client` starts one client for a caller that may be cancelled. `started` retries until a client is started
(producers). `OnDemand` creates a client on first use (lookups, administration). `keep_consumer` runs a reader or a log
scan with a started consumer and replaces the consumer after each failure. A group member has more states than these, so
it calls `start_consumer` and `close_consumer` itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final, Generic, TypeVar

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaConnectionError, KafkaError

from gateway.kafka.driver.fetch.fetching import use_paced_fetchers
from gateway.kafka.driver.fetch.unreadable import unreadable
from gateway.kafka.driver.kafka_consumer import close_consumer, use_own_coordinator
from gateway.kafka.driver.outage import outage
from gateway.runtime.failures import failures
from gateway.runtime.spawn import Spawn
from kafka_records.fetched_records import convert_arrivals

C = TypeVar("C")

use_paced_fetchers()

RETRY_S: Final = 0.5
"""Pause between attempts to reach Kafka: attempts are cheap, and a short pause notices soon that Kafka is back."""


async def start_client(
    start: Callable[[], Awaitable[object]],
    close: Callable[[], Coroutine[Any, Any, None]],
    spawn: Spawn,
) -> None:
    """Start a client for a caller that may be cancelled.

    aiokafka leaks an open connection when it is cancelled during bootstrap. So the start always runs to its end in a
    task of its own, and `close` is called if the start fails or the caller was cancelled.

    Raises:
        KafkaError: Kafka cannot be reached or rejects the login.
    """
    started = given_up = False
    failed: Exception | None = None

    async def run() -> None:
        nonlocal failed, started
        try:
            await start()
            started = True
        except Exception as error:  # raised again in the caller, below
            failed = error
        finally:
            if given_up or not started:
                await close()

    try:
        await asyncio.shield(spawn(run()))
    except BaseException:
        given_up = True
        if started:  # in this turn of the event loop, so that `run` did not see `given_up`
            await close()  # not spawned: at the end of the process, a new task is cancelled before its first step
        raise
    if failed is not None:
        try:
            raise failed
        finally:
            failed = None  # its traceback refers to this frame: avoids a reference cycle


async def started(
    make: Callable[[], C], start: Callable[[C], Awaitable[None]], part: str, *, longest_pause_s: float = RETRY_S
) -> C:
    """Create and start clients until one has started, and return it.

    `part` names the caller in the log and in reports of unexpected exceptions. The pause between attempts doubles up
    to `longest_pause_s`.
    """
    pause = RETRY_S
    while True:
        client = make()
        try:
            await start(client)
        except (KafkaError, OSError) as error:
            outage.notice(part, type(error).__name__)
        except Exception as error:  # go on trying: callers are waiting for a client
            failures.report(part, error)
        else:
            return client
        await asyncio.sleep(pause)
        pause = min(2 * pause, longest_pause_s)


class OnDemand(Generic[C]):
    """One client, created and started by the first `get` and shared by all callers."""

    def __init__(self, make: Callable[[], C], start: Callable[[C], Awaitable[object]], spawn: Spawn) -> None:
        """`make` creates a client that has aiokafka's `close`; `start` starts it."""
        self._make = make
        self._start = start
        self._spawn = spawn
        self._client: C | None = None
        self._opening = asyncio.Lock()
        self._stopped = False

    async def get(self) -> C:
        """Return the started client.

        Raises:
            KafkaError: Kafka cannot be reached or rejects the login, or `stop` was called.
        """
        async with self._opening:
            if self._client is None:
                if self._stopped:
                    raise KafkaConnectionError("stopped")
                client: Any = self._make()
                await start_client(lambda: self._start(client), client.close, self._spawn)
                if self._stopped:  # meanwhile
                    await client.close()
                    raise KafkaConnectionError("stopped")
                self._client = client
            return self._client

    async def drop(self, client: C | None) -> None:
        """Close a client that has failed; the next `get` starts again from the bootstrap servers."""
        if client is not None and client is self._client:
            await self._close()

    async def stop(self) -> None:
        """Close the client. Later calls of `get` fail."""
        self._stopped = True
        await self._close()

    async def _close(self) -> None:
        client: Any = self._client
        self._client = None
        if client is not None:
            await client.close()


async def start_consumer(consumer: AIOKafkaConsumer, spawn: Spawn) -> None:
    """Start a consumer as `start_client` does. Its `getmany` returns `Received` records.

    Raises:
        KafkaError: Kafka cannot be reached or rejects the login.
    """

    async def start() -> None:
        await consumer.start()
        if not consumer._client.cluster.brokers():  # a group member would fail without a broker to ask
            raise KafkaConnectionError("Kafka lists no brokers: it has just started")

    async def close() -> None:
        await close_consumer(consumer)

    await start_client(start, close, spawn)
    use_own_coordinator(consumer)
    convert_arrivals(consumer, unreadable.note, unreadable.most_headers)


@contextlib.asynccontextmanager
async def open_consumer(consumer: AIOKafkaConsumer, spawn: Spawn) -> AsyncIterator[AIOKafkaConsumer]:
    """Start the consumer for the `async with` block and close it at the end.

    Raises:
        KafkaError: Kafka cannot be reached or rejects the login.
    """
    await start_consumer(consumer, spawn)
    try:
        yield consumer
    finally:
        await close_consumer(consumer)


async def keep_consumer(
    make: Callable[[], AIOKafkaConsumer], use: Callable[[AIOKafkaConsumer], Awaitable[None]], part: str, spawn: Spawn
) -> None:
    """Run `use` with a started consumer until it returns; after each KafkaError run it again with a new consumer.

    `use` continues from the position that its former runs have reached. `part` names it in the log.
    """
    while True:
        try:
            async with open_consumer(make(), spawn) as consumer:
                await use(consumer)
                return
        except KafkaError as error:
            outage.notice(part, repr(error))
        await asyncio.sleep(RETRY_S)
