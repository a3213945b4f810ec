"""aiokafka's connection to a broker, for which a socket that uvloop has closed is a broken connection.

A connection that is made while its client closes is closed with it; aiokafka forgets it, open.

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
    """As aiokafka's, but for the errors, and for a client that is closed while it connects."""

    async def connect(self) -> Any:
        """Connect. KafkaConnectionError when the client was closed meanwhile: nobody would close the connection."""
        streams = await super().connect()
        client = getattr(self._on_close_cb, "__self__", None)  # none while a client makes its first connection
        if client is not None and client._sync_task is None:
            self.close(reason=CloseReason.SHUTDOWN)
            raise KafkaConnectionError(f"the client of {self.host}:{self.port} is closed")
        return streams

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
