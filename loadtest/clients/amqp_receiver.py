"""An AMQP 1.0 receiver on a plain socket that takes all it can get, cheap enough not to affect measurements."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from loadtest.clients.amqp_wire import (
    CLOSE,
    CLOSING,
    DETACH,
    END,
    SASL_OUTCOME,
    Splitter,
    accept,
    attach_receiver,
    credit,
    greeting,
    opening,
    read_value,
)
from loadtest.clients.connection import Connection

_TRANSFER_START: Final = b"\x00\x53\x14"
_ATTACH_START: Final = b"\x00\x53\x12"


class Receiver(Connection):
    """Receives messages whose last `size` bytes are the payload, and accepts them in batches.

    Attributes:
        attached: done when the link is attached; has the error if the connection fails before.
        payloads: the received payloads in order, if they are kept.
        count: number of received messages.
        last: time of the last read (`time.perf_counter`).
    """

    closing = CLOSING

    def __init__(
        self,
        container: str,
        address: str,
        *,
        size: int,
        window: int = 1000,
        settled: bool = False,
        first: bool = False,
        on_message: Callable[[bytes, float], None] | None = None,
        keep: bool = True,
        login: tuple[str | None, str | None] = (None, None),
    ) -> None:
        """Prepare a receiver.

        Args:
            container: its name.
            address: the source's address.
            size: bytes of a payload. 0 means the whole frame.
            window: credit, which is renewed when half of it is used.
            settled: whether the peer should send settled messages.
            first: whether to start with the first stored record.
            on_message: called with each payload and its arrival time.
            keep: whether to keep the payloads.
            login: user and password for PLAIN.
        """
        super().__init__()
        self.greeting = greeting(*login)
        self.payloads: list[bytes] = []
        self.count = 0
        self.last = 0.0
        self.attached = self.promise()
        self._container = container
        self._address = address
        self._size = size
        self._window = window
        self._settled = settled
        self._first = first
        self._on_message = on_message
        self._keep = keep
        self._splitter = Splitter()
        self._accepted = 0
        self._granted = 0

    def data_received(self, data: bytes) -> None:
        """Handle frames."""
        payloads: list[bytes] = []
        size = self._size
        for body in self._splitter.feed(data):
            if body.startswith(_TRANSFER_START):
                payloads.append(body[-size:])
            else:
                self._control(body)
        if not payloads:
            return
        self.count = count = self.count + len(payloads)
        self.last = time.perf_counter()
        if self._keep:
            self.payloads += payloads
        if self._on_message is not None:
            for payload in payloads:
                self._on_message(payload, self.last)
        out = b""
        if not self._settled:
            out = accept(self._accepted, count - 1)  # delivery-ids count transfers, since the session has one link
            self._accepted = count
        if self._granted - count <= self._window // 2:
            self._granted = count + self._window
            out += credit(count, count, self._window)
        if out:
            self.write(out)

    def _control(self, body: bytes) -> None:
        (code, fields), _ = read_value(body, 0)
        if code == SASL_OUTCOME:
            attach = attach_receiver("load", self._container, self._address, settled=self._settled, first=self._first)
            self.write(opening(self._container) + attach)
        elif body.startswith(_ATTACH_START):
            self._granted = self._window
            self.write(credit(0, 0, self._window))
            if not self.attached.done():
                self.attached.set_result(None)
        elif code in (DETACH, END, CLOSE) and self.is_open:
            self.fail(ConnectionAbortedError(f"peer sent 0x{code:02x}: {fields}"))
            self.close()
