"""AMQP 1.0 frames, implemented independently of the gateway, for the clients of this package."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

NULL: Final = b"\x40"
TRUE: Final = b"\x41"
FALSE: Final = b"\x42"
ZERO: Final = b"\x43"
OPEN, BEGIN, ATTACH, FLOW, TRANSFER, DISPOSITION, DETACH, END, CLOSE = range(0x10, 0x19)
SASL_OUTCOME: Final = 0x44
ACCEPTED: Final = 0x24
AMQP_HEADER: Final = b"AMQP\x00\x01\x00\x00"
IDLE: Final = b"\x00\x00\x00\x08\x02\x00\x00\x00"  # an empty frame (2.4.5) as heartbeat
_SASL, _AMQP = 1, 0
_FIXED_WIDTHS: Final = {0x4: 0, 0x5: 1, 0x6: 2, 0x7: 4, 0x8: 8, 0x9: 16}


def string(value: str) -> bytes:
    """Encode a string shorter than 256 bytes."""
    raw = value.encode()
    return b"\xa1" + bytes((len(raw),)) + raw


def symbol(value: str) -> bytes:
    """Encode a symbol shorter than 256 bytes."""
    return b"\xa3" + bytes((len(value),)) + value.encode()


def uint(value: int) -> bytes:
    """Encode an unsigned integer."""
    return b"\x70" + struct.pack(">I", value)


def listed(items: Sequence[bytes]) -> bytes:
    """Encode a list."""
    body = b"".join(items)
    return b"\xd0" + struct.pack(">II", len(body) + 4, len(items)) + body


def symbols(values: Sequence[str]) -> bytes:
    """Encode an array of symbols."""
    body = b"".join(bytes((len(value),)) + value.encode() for value in values)
    return b"\xf0" + struct.pack(">IIB", len(body) + 5, len(values), 0xA3) + body


def performative(code: int, *items: bytes) -> bytes:
    """Encode a performative or another described list."""
    return b"\x00\x53" + bytes((code,)) + listed(items)


def frame(body: bytes, kind: int = _AMQP) -> bytes:
    """Encode a frame on channel 0."""
    return struct.pack(">IBBH", len(body) + 8, 2, kind, 0) + body


def greeting(user: str | None = None, password: str | None = None) -> bytes:
    """Return the SASL header and init, ANONYMOUS or PLAIN; the AMQP layer follows the peer's outcome."""
    name, said = ("ANONYMOUS", b"load") if user is None else ("PLAIN", f"\0{user}\0{password or ''}".encode())
    first = performative(0x41, symbol(name), b"\xb0" + struct.pack(">I", len(said)) + said)
    return b"AMQP\x03\x01\x00\x00" + frame(first, _SASL)


GREETING: Final = greeting()

CLOSING: Final = frame(performative(CLOSE))


def opening(container: str) -> bytes:
    """Return the AMQP header, an open, and the begin of one session."""
    return (
        AMQP_HEADER
        + frame(performative(OPEN, string(container), string("localhost"), uint(65536)))
        + frame(performative(BEGIN, NULL, ZERO, uint(2**31 - 1), uint(2**31 - 1)))
    )


def mapped(*items: bytes) -> bytes:
    """Encode a map of alternating keys and values."""
    body = b"".join(items)
    return b"\xd1" + struct.pack(">II", len(body) + 4, len(items)) + body


_OFFSET_SPEC: Final = symbol("rabbitmq:stream-offset-spec")
_FROM_THE_FIRST: Final = mapped(_OFFSET_SPEC, b"\x00" + _OFFSET_SPEC + string("first"))


def attach_sender(name: str, container: str, address: str) -> bytes:
    """Attach a sender link with handle 0."""
    source = b"\x00\x53\x28" + listed([string(container)])
    target = b"\x00\x53\x29" + listed([string(address)])
    return frame(performative(ATTACH, string(name), ZERO, FALSE, NULL, NULL, source, target, NULL, NULL, ZERO))


def attach_receiver(
    name: str,
    container: str,
    address: str,
    *,
    durable: bool = False,
    capabilities: Sequence[str] = (),
    settled: bool = False,
    first: bool = False,
) -> bytes:
    """Attach a receiver link with handle 0; `first` starts with the first stored record."""
    terms = [uint(2), symbol("never")] if durable else [NULL, NULL]
    offered = symbols(capabilities) if capabilities else NULL
    filters = _FROM_THE_FIRST if first else NULL
    source = listed([string(address), *terms, NULL, NULL, NULL, NULL, filters, NULL, NULL, offered])
    target = b"\x00\x53\x29" + listed([string(container)])
    mode = b"\x50\x01" if settled else NULL
    return frame(performative(ATTACH, string(name), ZERO, TRUE, mode, NULL, b"\x00\x53\x28" + source, target))


def credit(next_incoming: int, delivery_count: int, amount: int) -> bytes:
    """Return a flow that grants handle 0 `amount` credit after `delivery_count`, for a session that only receives."""
    window = uint(2**31 - 1)
    counts = (uint(next_incoming), window, ZERO, window, ZERO, uint(delivery_count), uint(amount))
    return frame(performative(FLOW, *counts))


def transfer(delivery_id: int, tag: bytes, message: bytes) -> bytes:
    """Return an unsettled transfer on handle 0 with a whole message."""
    binary = b"\xa0" + bytes((len(tag),)) + tag
    return frame(performative(TRANSFER, ZERO, uint(delivery_id), binary, ZERO, FALSE, FALSE) + message)


def accept(first: int, last: int) -> bytes:
    """Accept and settle a range of deliveries."""
    return frame(performative(DISPOSITION, TRUE, uint(first), uint(last), TRUE, b"\x00\x53\x24\x45"))


def key_annotation(key: str) -> bytes:
    """Return the message annotations that set a record's key."""
    pairs = symbol("x-opt-bridge.key") + string(key)
    return b"\x00\x53\x72\xc1" + bytes((len(pairs) + 1, 2)) + pairs


def data_section(payload: bytes) -> bytes:
    """Return one Data section."""
    if len(payload) < 256:
        return b"\x00\x53\x75\xa0" + bytes((len(payload),)) + payload
    return b"\x00\x53\x75\xb0" + struct.pack(">I", len(payload)) + payload


def read_value(data: bytes, at: int) -> tuple[Any, int]:
    """Decode the value at `at`; return it and its end. Compound values become lists, descriptors their code."""
    code = data[at]
    at += 1
    width = code >> 4
    if code == 0x00:
        descriptor, at = read_value(data, at)
        value, at = read_value(data, at)
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
            item, cursor = read_value(data, cursor)
            items.append(item)
    return items, end


class Splitter:
    """Splits a byte stream into frame bodies, without protocol headers and empty frames."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the bodies of the frames that are now complete."""
        buffer = self._buffer + data
        at = 0
        while len(buffer) - at >= 8:
            if buffer[at : at + 4] == b"AMQP":
                at += 8
                continue
            size = struct.unpack_from(">I", buffer, at)[0]
            if len(buffer) - at < size:
                break
            offset = buffer[at + 4] * 4
            if size > offset:
                yield buffer[at + offset : at + size]
            at += size
        self._buffer = buffer[at:]
