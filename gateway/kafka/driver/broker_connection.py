"""aiokafka's connection to a broker, for which a socket that uvloop has closed is a broken connection.

For some turns of the loop after a socket was lost, until whoever reads it has learned of that, uvloop raises
RuntimeError for what is written; asyncio's own transports say nothing. aiokafka foresees OSError. The task that keeps a
client's metadata would end by the other, in silence, and whoever waits for metadata would wait for ever.
"""

from __future__ import annotations

from typing import Any

import aiokafka.conn
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.errors import KafkaConnectionError


class BrokerConnection(AIOKafkaConnection):  # type: ignore[misc]  # aiokafka carries no types
    """As aiokafka's, but for the errors."""

    def send(self, request: Any, expect_response: bool = True) -> Any:
        """Send a request; an awaitable of its answer. KafkaConnectionError when the connection is broken."""
        try:
            return super().send(request, expect_response)
        except RuntimeError as error:
            raise self._broken(error) from error

    def _send_sasl_token(self, payload: bytes, expect_response: bool = True) -> Any:
        try:
            return super()._send_sasl_token(payload, expect_response)
        except RuntimeError as error:
            raise self._broken(error) from error

    def _broken(self, error: RuntimeError) -> KafkaConnectionError:
        self.close(reason=CloseReason.CONNECTION_BROKEN, exc=error)
        return KafkaConnectionError(f"Connection at {self.host}:{self.port} broken: {error}")


def use_broker_connections() -> None:
    """Have each client of aiokafka in this process connect so; it has no parameter for it."""
    aiokafka.conn.AIOKafkaConnection = BrokerConnection
