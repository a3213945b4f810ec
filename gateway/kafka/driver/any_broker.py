"""Requests that any broker can answer: one connection, which begins again with the bootstrap servers when it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiokafka import errors
from aiokafka.client import AIOKafkaClient

from gateway.config import KafkaConfig
from gateway.kafka.contracts import Refused
from gateway.kafka.driver.client_settings import client_settings, start_client
from gateway.spawn import Spawn
from mapping.outcomes import Outcome


class AnyBroker:
    """A client of aiokafka, made with the first request."""

    def __init__(self, config: KafkaConfig, role: str, spawn: Spawn, heard: Callable[[], None]) -> None:
        """`heard` is called with each answer."""
        self._config = config
        self._role = role
        self._spawn = spawn
        self._heard = heard
        self._client: Any = None  # AIOKafkaClient; aiokafka carries no types
        self._connecting = asyncio.Lock()
        self._stopped = False

    async def request(self, request: Any) -> Any:
        """Send to any broker.

        Raises:
            Refused: BUSY, none answers.
        """
        client: Any = None
        try:
            client = await self._connected()
            response = await client.send(client.get_random_node(), request)
        except (errors.KafkaError, OSError) as error:
            await self._drop(client)
            raise Refused(Outcome.BUSY, f"Kafka does not answer ({type(error).__name__})") from error
        self._heard()
        return response

    async def stop(self) -> None:
        """Close the connection; a request from now on is refused."""
        self._stopped = True
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _drop(self, client: Any) -> None:
        """Begin again with the bootstrap servers at the next request: the brokers that we know may all have moved."""
        if client is None or client is not self._client:
            return
        self._client = None
        await client.close()

    async def _connected(self) -> AIOKafkaClient:
        async with self._connecting:
            if self._client is None:
                if self._stopped:
                    raise errors.ProducerClosed("stopped")
                client = AIOKafkaClient(**client_settings(self._config, self._role))
                await start_client(client.bootstrap, client.close, self._spawn)
                self._client = client
            return self._client
