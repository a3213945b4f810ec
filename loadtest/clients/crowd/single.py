"""An MQTT publisher without a window: each message is published at QoS 1 when its caller says so."""

from __future__ import annotations

import asyncio
import time
from typing import cast

from loadtest.clients.mqtt_wire import Splitter, connect_packet, publish_packet
from loadtest.report import Latencies


class SinglePublisher(asyncio.Protocol):
    """One connection.

    Attributes:
        connected: done after CONNACK; has the error if the connection fails before.
        latencies: from PUBLISH to PUBACK.
        refused: number of refused messages, and of failures of the connection.
    """

    def __init__(self, client_id: str) -> None:
        self.connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.latencies = Latencies()
        self.refused = 0
        self._greeting = connect_packet(client_id)
        self._splitter = Splitter()
        self._sent: dict[int, float] = {}  # by packet identifier, the time
        self._packet_id = 0
        self._transport: asyncio.Transport

    @property
    def unanswered(self) -> int:
        """The number of messages without PUBACK."""
        return len(self._sent)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send CONNECT."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport does not inherit from it
        self._transport.write(self._greeting)

    def data_received(self, data: bytes) -> None:
        """Handle CONNACK and PUBACK."""
        for first, body in self._splitter.feed(data):
            if first == 0x40:
                self.latencies.record(time.perf_counter() - self._sent.pop(int.from_bytes(body[:2])))
                self.refused += len(body) > 2 and body[2] >= 0x80
            elif first == 0x20 and not body[1]:
                self.connected.set_result(None)
            else:
                self._fail(f"packet 0x{first:02x} {body.hex()}")

    def connection_lost(self, exc: Exception | None) -> None:
        """Count the lost connection as a failure."""
        self._fail(f"connection lost: {exc}")

    def _fail(self, why: str) -> None:
        self.refused += 1
        if not self.connected.done():
            self.connected.set_exception(ConnectionError(why))

    def publish(self, topic: str, payload: bytes) -> None:
        """Publish one message; on a closed connection it stays unanswered."""
        self._packet_id = self._packet_id % 65_535 + 1
        self._sent[self._packet_id] = time.perf_counter()
        if not self._transport.is_closing():
            self._transport.write(publish_packet(topic, payload, 1, self._packet_id))

    def close(self) -> None:
        """Send DISCONNECT and close."""
        self._transport.write(b"\xe0\x00")
        self._transport.close()
