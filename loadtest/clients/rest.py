"""A windowed HTTP producer on a bare keep-alive socket: batches of records as JSON, one request in flight."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Final

from loadtest.clients.pace import Pace
from loadtest.clients.sender import OnAck, Sender

TEXT_RECORDS: Final = "application/vnd.kafka.text.v2+json"  # the stored value is the payload as it is


class Producer(Sender):
    """Posts prepared payloads, `batch` records a request; one request is in flight on a connection at a time.

    Latencies are those of requests; refusals are counted by status.
    """

    def __init__(
        self,
        host: str,
        topic: str,
        payloads: Sequence[bytes],
        pace: Pace,
        on_ack: OnAck,
        *,
        batch: int = 1,
        key: str | None = None,
    ) -> None:
        super().__init__(len(payloads), pace, on_ack)
        self._payloads = payloads
        self._batch = batch
        self._head = f"POST /topics/{topic} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {TEXT_RECORDS}\r\n"
        self._key = key
        self._requests = [self._request(at) for at in range(0, len(payloads), batch)]
        self._buffer = b""
        self._next = 0
        self._waiting = False
        self._sent_at = 0.0

    @property
    def sent(self) -> int:
        """Records posted."""
        return min(self._next * self._batch, self.total)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Nothing is said before the first request."""
        super().connection_made(transport)
        self._is_connected()

    def data_received(self, data: bytes) -> None:
        """Responses."""
        self._buffer += data
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        length = next(
            int(line.split(b":", 1)[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
        )
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        self._respond(int(head.split(b" ", 2)[1]), rest[:length])
        self.push()

    def push(self) -> None:
        """Post the next batch when none is in flight and the pace allows it."""
        assert self._transport is not None
        if self._waiting or self._next >= len(self._requests) or self._transport.is_closing():
            return
        if self.pace.room(self.sent, self.answered) < min(self._batch, self.total - self.sent):
            return
        self._waiting = True
        self._sent_at = time.perf_counter()
        self._transport.write(self._requests[self._next])
        self._next += 1

    def _request(self, at: int) -> bytes:
        records = [{"value": payload.decode()} for payload in self._payloads[at : at + self._batch]]
        if self._key is not None:
            records = [{"key": self._key, **record} for record in records]
        body = json.dumps({"records": records}).encode()
        return f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def _respond(self, status: int, body: bytes) -> None:
        self._waiting = False
        at = (self._next - 1) * self._batch
        self.latencies.record(time.perf_counter() - self._sent_at)
        results = json.loads(body)["offsets"] if status == 200 else [{"error_code": status}] * self._batch
        for index, result in zip(range(at, min(at + self._batch, self.total)), results, strict=False):
            self._answer(index, None if "offset" in result else result["error_code"])
