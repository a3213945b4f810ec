"""Requests that any broker can answer: one connection, which begins again with the bootstrap servers when it breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiokafka import errors
from aiokafka.client import AIOKafkaClient

from gateway.config import KafkaConfig
from gateway.kafka.contracts import Refused
from gateway.kafka.driver.client_settings import client_settings
from gateway.kafka.driver.lifecycle import OnDemand
from gateway.spawn import Spawn
from mapping.outcomes import Outcome


class AnyBroker:
    """A client of aiokafka, made with the first request."""

    def __init__(self, config: KafkaConfig, role: str, spawn: Spawn, heard: Callable[[], None]) -> None:
        """`heard` is called with each answer."""
        self._heard = heard
        self._client: OnDemand[Any] = OnDemand(
            lambda: AIOKafkaClient(**client_settings(config, role)), lambda client: client.bootstrap(), spawn
        )

    async def request(self, request: Any) -> Any:
        """Send to any broker; Refused: BUSY, none answers."""
        client: Any = None
        try:
            client = await self._client.get()
            response = await client.send(client.get_random_node(), request)
        except (errors.KafkaError, OSError) as error:
            await self._client.drop(client)
            raise Refused(Outcome.BUSY, f"Kafka does not answer ({type(error).__name__})") from error
        self._heard()
        return response

    async def stop(self) -> None:
        """Close the connection; a request from now on is refused."""
        await self._client.stop()
