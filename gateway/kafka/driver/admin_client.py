"""aiokafka's client for administration, which can also send what it has no verb for."""

from __future__ import annotations

from typing import Any

from aiokafka.admin import AIOKafkaAdminClient


class AdminClient(AIOKafkaAdminClient):  # type: ignore[misc]  # aiokafka carries no types
    """As its base class."""

    async def request(self, request: Any, node: int | None = None) -> Any:
        """Send to one broker; without `node` to the cluster's controller where Kafka asks for it, or to any broker.

        Raises:
            KafkaError: it does not answer.
        """
        return await self._send_request(request, node)
