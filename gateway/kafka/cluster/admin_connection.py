"""A connection for administrative requests, which belong to no producer and no consumer."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import aiokafka.errors as kafka_errors

from gateway.kafka.contracts import Refused
from gateway.kafka.driver.admin_client import AdminClient
from gateway.kafka.driver.kafka_consumer import ConsumerOptions
from gateway.kafka.driver.lifecycle import OnDemand
from gateway.spawn import Spawn
from mapping.outcomes import Outcome

TIMEOUT_S = 10.0
RETRY_S: Final = 0.1
T = TypeVar("T")
P = ParamSpec("P")
A = TypeVar("A", bound="AdminConnection")

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
    """Connects with the first request."""

    def __init__(self, kafka: ConsumerOptions, spawn: Spawn) -> None:
        """`spawn` starts background tasks."""
        options = {name: value for name, value in kafka.items() if name != "client_rack"}  # only for consumers
        self._client: OnDemand[AdminClient] = OnDemand(
            lambda: AdminClient(**options), lambda client: client.start(), spawn
        )

    async def stop(self) -> None:
        """Close the connection."""
        await self._client.stop()

    async def run(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Run `ask` with a time limit and translate its errors.

        It is repeated while a group has no coordinator: the first request for one makes Kafka create
        `__consumer_offsets`.

        Raises:
            Refused: DENIED, or BUSY when Kafka does not answer.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    try:
                        return await ask()
                    except _MOVING:
                        await asyncio.sleep(RETRY_S)
        except _DENIED as error:
            raise Refused(Outcome.DENIED, f"{error!r}") from error
        except (TimeoutError, kafka_errors.KafkaError) as error:
            raise Refused(Outcome.BUSY, f"Kafka does not answer: {error!r}") from error

    async def open(self) -> AdminClient:
        """Return the connected client. Raises aiokafka's KafkaError when it cannot connect."""
        return await self._client.get()


def admin_request(
    ask: Callable[Concatenate[A, P], Awaitable[T]],
) -> Callable[Concatenate[A, P], Coroutine[Any, Any, T]]:
    """Decorate a subclass's request to run by `AdminConnection.run`, with its time limit and errors."""

    @functools.wraps(ask)
    async def asked(admin: A, /, *arguments: P.args, **options: P.kwargs) -> T:
        return await admin.run(lambda: ask(admin, *arguments, **options))

    return asked
