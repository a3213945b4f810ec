"""What one asks and tells Kafka about consumer groups without being a member: what they have committed, their end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

import aiokafka.errors as kafka_errors
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.admin import DeleteGroupsRequest

from gateway.kafka.consumers import ConsumerOptions
from gateway.kafka.contracts import Refused
from mapping.outcomes import Outcome

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
T = TypeVar("T")


class GroupAdmin:
    """Connects with the first question."""

    def __init__(self, kafka: ConsumerOptions) -> None:
        """`kafka`: see `ConsumerOptions`."""
        self._kafka = dict(kafka)
        self._client: AIOKafkaAdminClient | None = None
        self._opening = asyncio.Lock()

    async def topics(self, group: str) -> frozenset[str]:
        """The topics in which a group has committed something; empty when there is no such group.

        Raises:
            Refused: DENIED, or BUSY when Kafka does not answer.
        """
        return await self._answer(self._topics(group))

    async def delete(self, group: str, topic: str) -> bool:
        """Delete a group that has committed in `topic` and nowhere else.

        Returns:
            False when it is left alone: it has members, or is for other topics too.

        Raises:
            Refused: DENIED, or BUSY when Kafka does not answer.
        """
        return await self._answer(self._delete(group, topic))

    async def stop(self) -> None:
        """Close the connection."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _answer(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await work
        except (kafka_errors.GroupAuthorizationFailedError, kafka_errors.TopicAuthorizationFailedError) as error:
            raise Refused(Outcome.DENIED, f"{error!r}") from error
        except (TimeoutError, kafka_errors.KafkaError) as error:
            raise Refused(Outcome.BUSY, f"Kafka does not answer: {error!r}") from error

    async def _topics(self, group: str) -> frozenset[str]:
        client = await self._open()
        return frozenset(partition.topic for partition in await client.list_consumer_group_offsets(group))

    async def _delete(self, group: str, topic: str) -> bool:
        client = await self._open()
        coordinator = await client.find_coordinator(group)
        offsets = await client.list_consumer_group_offsets(group, coordinator)
        if {partition.topic for partition in offsets} - {topic}:
            return False
        response = await client._send_request(DeleteGroupsRequest([group]), coordinator)
        ((_, code),) = response.results
        kind = kafka_errors.for_code(code)
        if kind is kafka_errors.NonEmptyGroup:
            return False
        if code and kind is not kafka_errors.GroupIdNotFound:
            raise kind(group)
        log.info("deleted group %s", group)
        return True

    async def _open(self) -> AIOKafkaAdminClient:
        async with self._opening:
            if self._client is None:
                client = AIOKafkaAdminClient(**self._kafka)
                try:
                    await client.start()
                except BaseException:
                    await client.close()
                    raise
                self._client = client
            return self._client
