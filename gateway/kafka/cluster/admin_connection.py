"""One connection for questions to Kafka that belong to no producer and no consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

import aiokafka.errors as kafka_errors
from aiokafka.admin import AIOKafkaAdminClient

from gateway.kafka.contracts import Refused
from gateway.kafka.driver.client_settings import start_client
from gateway.kafka.driver.kafka_consumer import ConsumerOptions
from gateway.spawn import Spawn
from mapping.outcomes import Outcome

TIMEOUT_S = 10.0
RETRY_S: Final = 0.1
T = TypeVar("T")

_DENIED = (
    kafka_errors.GroupAuthorizationFailedError,
    kafka_errors.TopicAuthorizationFailedError,
    kafka_errors.ClusterAuthorizationFailedError,
)
_MOVING: Final = (
    kafka_errors.GroupCoordinatorNotAvailableError,
    kafka_errors.GroupLoadInProgressError,
    kafka_errors.NotCoordinatorForGroupError,
)


class AdminConnection:
    """Connects with the first question."""

    def __init__(self, kafka: ConsumerOptions, spawn: Spawn) -> None:
        """`kafka`: see `ConsumerOptions`; `spawn` starts background work."""
        self._kafka = dict(kafka)
        self._spawn = spawn
        self._client: AIOKafkaAdminClient | None = None
        self._opening = asyncio.Lock()

    async def stop(self) -> None:
        """Close the connection."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def answer(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` has found out, in time.

        Raises:
            Refused: DENIED, or BUSY when Kafka does not answer.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await work
        except _DENIED as error:
            raise Refused(Outcome.DENIED, f"{error!r}") from error
        except (TimeoutError, kafka_errors.KafkaError) as error:
            raise Refused(Outcome.BUSY, f"Kafka does not answer: {error!r}") from error

    async def open(self) -> AIOKafkaAdminClient:
        """The client; aiokafka's errors when there is no connection."""
        async with self._opening:
            if self._client is None:
                client = AIOKafkaAdminClient(**self._kafka)
                await start_client(client.start, client.close, self._spawn)
                self._client = client
            return self._client


async def settled(ask: Callable[[], Awaitable[T]]) -> T:
    """What `ask` finds out, asked again while a group has no coordinator: the first question makes their topic."""
    while True:
        try:
            return await ask()
        except _MOVING:
            await asyncio.sleep(RETRY_S)
