"""aiokafka's admin client, which can also send requests that it has no method for."""

from __future__ import annotations

from typing import Any

from aiokafka.admin import AIOKafkaAdminClient


class AdminClient(AIOKafkaAdminClient):  # type: ignore[misc]  # aiokafka carries no types
    """aiokafka's admin client with `request`."""

    async def request(self, request: Any, node: int | None = None) -> Any:
        """Send to broker `node`; without it to the controller if the request needs that, or else to any broker.

        Raises:
            KafkaError: the broker does not answer.
        """
        return await self._send_request(request, node)
