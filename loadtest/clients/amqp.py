"""A windowed AMQP 1.0 sender on a plain socket. It obeys link credit and matches dispositions by delivery-id."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Any

from loadtest.clients.amqp_messages import Kind, minimal
from loadtest.clients.amqp_wire import (
    ACCEPTED,
    CLOSE,
    CLOSING,
    DETACH,
    DISPOSITION,
    END,
    FLOW,
    SASL_OUTCOME,
    Splitter,
    attach_sender,
    greeting,
    opening,
    read_value,
    transfer,
)
from loadtest.clients.pace import Pace
from loadtest.clients.sender import OnAck, WindowedSender, ignore


def transfers(payloads: Sequence[bytes], kind: Kind = minimal) -> list[bytes]:
    """Return the packets of a `Sender`: one message of this kind for each payload."""
    return [transfer(index, struct.pack(">I", index), kind(index, payload)) for index, payload in enumerate(payloads)]


class Sender(WindowedSender):
    """Sends unsettled transfers over one link within the peer's credit; packet `index` has that delivery-id.

    Refusals are counted by the descriptor code of the delivery state. `login` is user and password for PLAIN.
    """

    closing = CLOSING

    def __init__(
        self,
        container: str,
        address: str,
        packets: Sequence[bytes],
        pace: Pace,
        on_ack: OnAck = ignore,
        *,
        login: tuple[str | None, str | None] = (None, None),
    ) -> None:
        super().__init__(packets, pace, on_ack)
        self.greeting = greeting(*login)
        self._container = container
        self._address = address
        self._splitter = Splitter()
        self._settled = bytearray()
        self._limit = 0  # until the first credit

    def data_received(self, data: bytes) -> None:
        """Handle frames."""
        for body in self._splitter.feed(data):
            self._received(body)
        if self.connected.done():
            self.push()

    def _received(self, body: bytes) -> None:
        (code, fields), _ = read_value(body, 0)
        if code == SASL_OUTCOME:
            if fields[0]:
                self.fail(ConnectionRefusedError(f"SASL outcome {fields[0]}"))
                return
            self.write(opening(self._container) + attach_sender("load", self._container, self._address))
        elif code == FLOW and len(fields) > 6 and fields[4] is not None:
            self._limit = (fields[5] or 0) + (fields[6] or 0)
            self._is_connected()
        elif code == DISPOSITION:
            self._disposed(fields)
        elif code in (DETACH, END, CLOSE):
            self.fail(ConnectionAbortedError(f"peer sent 0x{code:02x}: {fields}"))

    def _disposed(self, fields: list[Any]) -> None:
        first = fields[1]
        last = fields[2] if len(fields) > 2 and fields[2] is not None else first
        state = fields[4][0] if len(fields) > 4 and fields[4] is not None else 0
        now, behind = time.perf_counter(), last + 1
        self._settled.extend(bytes(self.sent - len(self._settled)))
        if state == ACCEPTED and self._settled.find(1, first, behind) < 0:
            self._settled[first:behind] = b"\x01" * (behind - first)
            self._timed_run(first, behind, now)
            self._answer_run(first, behind)
            return
        for index in range(first, behind):
            if not self._settled[index]:
                self._settled[index] = 1
                self._timed_run(index, index + 1, now)
                self._answer(index, None if state == ACCEPTED else state)
