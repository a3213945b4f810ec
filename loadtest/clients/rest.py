"""A windowed HTTP producer on a bare keep-alive socket: batches of records as JSON, one request in flight."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Final, cast

from loadtest.clients.pace import Pace
from loadtest.report import Latencies

TEXT_RECORDS: Final = "application/vnd.kafka.text.v2+json"  # the stored value is the payload as it is


class Producer(asyncio.Protocol):
    """Posts prepared payloads, `batch` records a request; one request is in flight on a connection at a time.

    `on_ack(index)` is called for each stored record; other answers are counted in `refused` by status.
    """

    def __init__(
        self,
        host: str,
        topic: str,
        payloads: Sequence[bytes],
        pace: Pace,
        on_ack: Callable[[int], None],
        *,
        batch: int = 1,
        key: str | None = None,
    ) -> None:
        self._payloads = payloads
        self._batch = batch
        self.pace = pace
        self._on_ack = on_ack
        self._head = f"POST /topics/{topic} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {TEXT_RECORDS}\r\n"
        self._key = key
        self._requests = [self._request(at) for at in range(0, len(payloads), batch)]
        self._buffer = b""
        self._next = 0
        self._waiting = False
        self._sent_at = 0.0
        self._answered = 0
        self._transport: asyncio.Transport | None = None
        self.latencies = Latencies()
        self.refused: dict[int, int] = {}
        loop = asyncio.get_running_loop()
        self.connected: asyncio.Future[None] = loop.create_future()
        self.finished: asyncio.Future[None] = loop.create_future()

    @property
    def sent(self) -> int:
        """Records posted."""
        return min(self._next * self._batch, len(self._payloads))

    @property
    def answered(self) -> int:
        """Records with an answer, well or ill."""
        return self._answered

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Nothing is said before the first request."""
        transport = cast("asyncio.Transport", transport)  # uvloop's is one without saying so
        self._transport = transport
        self.connected.set_result(None)

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

    def connection_lost(self, exc: Exception | None) -> None:
        """The gateway closed the socket."""
        if self._answered < len(self._payloads) and not self.finished.done():
            self.finished.set_exception(exc or ConnectionResetError("connection closed"))

    def push(self) -> None:
        """Post the next batch when none is in flight and the pace allows it."""
        assert self._transport is not None
        if self._waiting or self._next >= len(self._requests) or self._transport.is_closing():
            return
        if self.pace.room(self.sent, self._answered) < min(self._batch, len(self._payloads) - self.sent):
            return
        self._waiting = True
        self._sent_at = time.perf_counter()
        self._transport.write(self._requests[self._next])
        self._next += 1

    def close(self) -> None:
        """Close the socket."""
        if self._transport is not None:
            self._transport.close()

    def _request(self, at: int) -> bytes:
        records = [{"value": payload.decode()} for payload in self._payloads[at : at + self._batch]]
        if self._key is not None:
            records = [{"key": self._key, **record} for record in records]
        body = json.dumps({"records": records}).encode()
        return f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def _respond(self, status: int, body: bytes) -> None:
        self._waiting = False
        at = (self._next - 1) * self._batch
        count = min(self._batch, len(self._payloads) - at)
        self._answered += count
        self.latencies.record(time.perf_counter() - self._sent_at)
        if status == 200:
            for index, result in enumerate(json.loads(body)["offsets"], at):
                if "offset" in result:
                    self._on_ack(index)
                else:
                    code = result["error_code"]
                    self.refused[code] = self.refused.get(code, 0) + 1
        else:
            self.refused[status] = self.refused.get(status, 0) + count
        if self._answered == len(self._payloads) and not self.finished.done():
            self.finished.set_result(None)
