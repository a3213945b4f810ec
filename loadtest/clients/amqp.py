"""A windowed AMQP 1.0 sender on a bare socket: frames written down once more, from the standard (parts 1, 2 and 3).

It obeys link credit, matches dispositions by delivery id, and sends each payload as one Data section.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Any, Final

from loadtest.clients.pace import Pace
from loadtest.clients.sender import OnAck, WindowedSender

NULL: Final = b"\x40"
ZERO: Final = b"\x43"
FALSE: Final = b"\x42"
ACCEPTED: Final = 0x24
_SASL, _AMQP = 1, 0
_FIXED_WIDTHS: Final = {0x4: 0, 0x5: 1, 0x6: 2, 0x7: 4, 0x8: 8, 0x9: 16}


def _string(value: str) -> bytes:
    raw = value.encode()
    return b"\xa1" + bytes((len(raw),)) + raw


def _symbol(value: str) -> bytes:
    return b"\xa3" + bytes((len(value),)) + value.encode()


def _uint(value: int) -> bytes:
    return b"\x70" + struct.pack(">I", value)


def _list(items: Sequence[bytes]) -> bytes:
    body = b"".join(items)
    return b"\xd0" + struct.pack(">II", len(body) + 4, len(items)) + body


def _performative(code: int, *items: bytes) -> bytes:
    return b"\x00\x53" + bytes((code,)) + _list(items)


def _frame(body: bytes, kind: int = _AMQP) -> bytes:
    return struct.pack(">IBBH", len(body) + 8, 2, kind, 0) + body


def _value(data: bytes, at: int) -> tuple[Any, int]:
    """The value at `at` and where the next begins; compound values come as lists, descriptors as their code."""
    code = data[at]
    at += 1
    width = code >> 4
    if code == 0x00:
        descriptor, at = _value(data, at)
        value, at = _value(data, at)
        return (descriptor, value), at
    if width in _FIXED_WIDTHS:
        size = _FIXED_WIDTHS[width]
        constant: Any = {0x40: None, 0x41: True, 0x42: False, 0x45: []}.get(code, 0)
        return (int.from_bytes(data[at : at + size], "big") if size else constant), at + size
    if width in (0xA, 0xB):
        size, at = (data[at], at + 1) if width == 0xA else (struct.unpack_from(">I", data, at)[0], at + 4)
        return data[at : at + size], at + size
    small = width in (0xC, 0xE)
    size, start = (data[at], at + 1) if small else (struct.unpack_from(">I", data, at)[0], at + 4)
    end = start + size
    items: list[Any] = []
    if width in (0xC, 0xD):
        cursor = start + (1 if small else 4)
        while cursor < end:
            item, cursor = _value(data, cursor)
            items.append(item)
    return items, end


class Sender(WindowedSender):
    """Sends prepared payloads unsettled over one link, within the peer's credit.

    Refusals are counted by the descriptor code of the delivery's outcome.
    """

    greeting = b"AMQP\x03\x01\x00\x00" + _frame(_performative(0x41, _symbol("ANONYMOUS"), b"\xa0\x04load"), _SASL)
    goodbye = _frame(_performative(0x18))

    def __init__(
        self,
        container: str,
        address: str,
        payloads: Sequence[bytes],
        pace: Pace,
        on_ack: OnAck,
        *,
        key: str | None = None,
    ) -> None:
        annotations = b"" if key is None else _annotations(key)
        frames = [_frame(_transfer(index) + annotations + _data(payload)) for index, payload in enumerate(payloads)]
        super().__init__(frames, pace, on_ack)
        self._container = container
        self._address = address
        self._buffer = b""
        self._expect_header = True
        self._settled = bytearray(self.total)
        self._limit = 0  # until credit comes

    def data_received(self, data: bytes) -> None:
        """Headers and frames."""
        buffer = self._buffer + data
        at = 0
        while len(buffer) - at >= 8:
            if self._expect_header:
                self._expect_header = False
                at += 8
                continue
            size = struct.unpack_from(">I", buffer, at)[0]
            if len(buffer) - at < size:
                break
            offset = buffer[at + 4] * 4
            if size > offset:
                self._received(buffer[at + offset : at + size])
            at += size
        self._buffer = buffer[at:]
        if self.connected.done():
            self.push()

    def _received(self, body: bytes) -> None:
        (code, fields), _ = _value(body, 0)
        if code == 0x44:
            if fields[0]:
                self._fail(ConnectionRefusedError(f"SASL outcome {fields[0]}"))
                return
            self._expect_header = True
            self._open()
        elif code == 0x13 and len(fields) > 6 and fields[4] is not None:
            self._limit = min(self.total, (fields[5] or 0) + (fields[6] or 0))
            self._is_connected()
        elif code == 0x15:
            self._disposed(fields)
        elif code in (0x16, 0x17, 0x18):
            self._fail(ConnectionAbortedError(f"peer sent 0x{code:02x}: {fields}"))

    def _open(self) -> None:
        assert self._transport is not None
        source = b"\x00\x53\x28" + _list([_string(self._container)])
        target = b"\x00\x53\x29" + _list([_string(self._address)])
        self._transport.write(
            b"AMQP\x00\x01\x00\x00"
            + _frame(_performative(0x10, _string(self._container), _string("localhost"), _uint(65536)))
            + _frame(_performative(0x11, NULL, ZERO, _uint(2**31 - 1), _uint(2**31 - 1)))
            + _frame(_performative(0x12, _string("load"), ZERO, FALSE, NULL, NULL, source, target, NULL, NULL, ZERO))
        )

    def _disposed(self, fields: list[Any]) -> None:
        first = fields[1]
        last = fields[2] if len(fields) > 2 and fields[2] is not None else first
        state = fields[4][0] if len(fields) > 4 and fields[4] is not None else 0
        now = time.perf_counter()
        for index in range(first, last + 1):
            if not self._settled[index]:
                self._settled[index] = 1
                self._timed(index, now)
                self._answer(index, None if state == ACCEPTED else state)


def _transfer(index: int) -> bytes:
    return _performative(0x14, ZERO, _uint(index), b"\xa0\x04" + struct.pack(">I", index), ZERO, FALSE, FALSE)


def _annotations(key: str) -> bytes:
    pairs = _symbol("x-opt-bridge.key") + _string(key)
    return b"\x00\x53\x72\xc1" + bytes((len(pairs) + 1, 2)) + pairs


def _data(payload: bytes) -> bytes:
    if len(payload) < 256:
        return b"\x00\x53\x75\xa0" + bytes((len(payload),)) + payload
    return b"\x00\x53\x75\xb0" + struct.pack(">I", len(payload)) + payload
