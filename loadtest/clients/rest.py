"""A windowed HTTP producer on a plain keep-alive socket: batches of JSON records, one request in flight."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Final

from loadtest.clients.http_wire import Splitter, request
from loadtest.clients.pace import Pace
from loadtest.clients.sender import OnAck, Sender, ignore

TEXT_RECORDS: Final = "application/vnd.kafka.text.v2+json"  # the stored value equals the payload


def requests(topic: str, payloads: Sequence[bytes], *, batch: int = 1, key: str | None = None) -> list[bytes]:
    """Return the requests of a `Producer`: `batch` payloads each, as text, all with one key."""
    keyed = {} if key is None else {"key": key}
    records = [{**keyed, "value": payload.decode()} for payload in payloads]
    return [
        request("POST", f"/topics/{topic}", TEXT_RECORDS, json.dumps({"records": records[at : at + batch]}).encode())
        for at in range(0, len(records), batch)
    ]


class Producer(Sender):
    """Posts requests of `batch` records each, one at a time on a connection.

    Latencies are those of requests; refusals are counted by status. `total` counts records.
    """

    def __init__(
        self, requests: Sequence[bytes], total: int, pace: Pace, on_ack: OnAck = ignore, *, batch: int = 1
    ) -> None:
        super().__init__(total, pace, on_ack)
        self._batch = batch
        self._requests = requests
        self._splitter = Splitter()
        self._next = 0
        self._waiting = False
        self._due_at = 0.0

    @property
    def sent(self) -> int:
        """The number of records posted."""
        return min(self._next * self._batch, self.total)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Become connected; there is no handshake."""
        super().connection_made(transport)
        self._is_connected()

    def data_received(self, data: bytes) -> None:
        """Handle responses."""
        for answer in self._splitter.feed(data):
            self._respond(answer.status, answer.body)
            self.push()

    def push(self) -> None:
        """Post the next batch if none is in flight and the pace allows it."""
        due = min(self._batch, self.total - self.sent)
        if due <= 0 or not self.is_open or self.pace.capacity(self.sent, self.answered) < due:
            return
        if self._waiting:
            self._held = True
            return
        self._waiting = True
        self._due_at = self.pace.due(self.sent + due - 1)
        self.write(self._requests[self._next])
        self._next += 1
        self._wrote(self.sent - due)

    def _respond(self, status: int, body: bytes) -> None:
        self._waiting = False
        at = (self._next - 1) * self._batch
        self.latencies.record(time.perf_counter() - self._due_at)
        results = json.loads(body)["offsets"] if status == 200 else [{"error_code": status}] * self._batch
        for index, result in zip(range(at, min(at + self._batch, self.total)), results, strict=False):
            self._answer(index, None if "offset" in result else result["error_code"])
