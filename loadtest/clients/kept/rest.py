"""An HTTP producer that outlives its connections: batches of JSON records, one request at a time, so in order.

A request without a response is sent again; refused records are given up, and the next batch follows.
"""

from __future__ import annotations

import asyncio
import json
from typing import Final

from loadtest.clients.http_wire import Splitter, request
from loadtest.clients.kept.lasting import LastingClient, Messages, NumberedSender
from loadtest.clients.rest import TEXT_RECORDS

PAUSE_S: Final = 1.0  # after a refusal, or longer by its Retry-After


class KeptProducer(NumberedSender, LastingClient):
    """Posts numbered records with one key."""

    sign_of_life = b""

    def __init__(self, address: tuple[str, int], client_id: str, topic: str, messages: Messages) -> None:
        super().__init__(address, client_id)
        self.messages = messages
        self._path = f"/topics/{topic}"
        self._asked = range(0)  # records of the pending request
        self._pausing = False
        self._splitter = Splitter()

    def push(self) -> None:
        """Post the next batch if none is in flight."""
        if self._asked or self._pausing or self._next >= self.total or not self.connected.is_set():
            return
        self._asked = range(self._next, min(self.total, self._next + self.messages.window))
        self._next = self._asked.stop
        self._post()

    def _post(self) -> None:
        key, payload, *_ = self.messages
        records = [{"key": key, "value": payload(sequence).decode()} for sequence in self._asked]
        body = json.dumps({"records": records}).encode()
        self.write(request("POST", self._path, TEXT_RECORDS, body))

    def _begin(self) -> None:
        """Repeat a request that has no response; there is no handshake."""
        self._splitter = Splitter()
        self.connects += 1
        self._served()
        if self._asked:
            self._post()

    def data_received(self, data: bytes) -> None:
        """Handle responses."""
        for status, fields, body in self._splitter.feed(data):
            self._answered(status, float(fields.get("retry-after", "0")), body)
            if fields.get("connection", "").lower() == "close" and self._transport is not None:
                self._transport.close()  # a further request would get no response (RFC 9112 section 9.6)
            else:
                self.push()

    def _answered(self, status: int, retry_after_s: float, body: bytes) -> None:
        if not self._asked:
            self.refusals[str(status)] += 1
            if status < 400:
                self.faults.append(f"an unexpected response: {status}")
            return
        results = json.loads(body)["offsets"] if status == 200 else [{"error_code": status}] * len(self._asked)
        if len(results) != len(self._asked):
            self.faults.append(f"{len(results)} results for {len(self._asked)} records")
        refused = 0
        for sequence, result in zip(self._asked, results, strict=False):
            if "offset" in result:
                self.acknowledge(sequence)
            else:
                refused += 1
                self.refusals[str(result["error_code"])] += 1
        self.given_up += refused
        self._asked = range(0)
        if refused:
            self._pausing = True
            asyncio.get_running_loop().call_later(max(PAUSE_S, retry_after_s), self._resume)

    def _resume(self) -> None:
        self._pausing = False
        self.push()
