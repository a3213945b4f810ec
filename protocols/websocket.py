"""The server's side of WebSocket framing (RFC 6455 section 5), for messages of one kind: binary or text. Sans-io.

Payloads are a stream: a part of a frame is handed on as soon as it arrives, so no message is buffered and none is too
long. Nothing is kept between two frames, so an idle connection costs next to nothing.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Iterator
from typing import Final

import msgspec

# opcodes (section 5.2)
CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
_CONTROL: Final = 0x8
_KNOWN: Final = frozenset({CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG})

# status codes (section 7.4.1)
NORMAL_CLOSURE: Final = 1000
GOING_AWAY: Final = 1001
PROTOCOL_ERROR: Final = 1002
UNSUPPORTED_DATA: Final = 1003
NO_STATUS: Final = 1005  # never in a frame: the peer gave no code
ABNORMAL_CLOSURE: Final = 1006  # never in a frame: the peer closed without a Close frame
INVALID_PAYLOAD: Final = 1007
POLICY_VIOLATION: Final = 1008
MESSAGE_TOO_BIG: Final = 1009
INTERNAL_ERROR: Final = 1011
SERVICE_RESTART: Final = 1012  # from the IANA registry: the client may reconnect
_FOR_FRAMES: Final = frozenset({*range(1000, 1004), *range(1007, 1015)})
"""Registered codes that are allowed in a frame; 3000 to 4999 are allowed too (section 7.4.2)."""

SHORT: Final = 125  # bytes of a control frame at most, and of a frame without a longer length
_NAMES: Final = {BINARY: "binary", TEXT: "text"}
_ACCEPT_KEY: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # section 1.3
_HEAD_BYTES: Final = {126: 4, 127: 10}  # before the masking key; 2 for all other lengths


class FrameFault(msgspec.Struct, frozen=True, gc=False):
    """A protocol violation of the peer: the status code and the reason for our Close frame."""

    code: int
    reason: str


class ReceivedMessage(msgspec.Struct, frozen=True):
    """The contents of one read of the socket."""

    payload: bytes  # of the messages, as a stream
    ends: tuple[int, ...] = ()  # positions in `payload` where messages end
    ping: bytes | None = None  # the payload of the newest Ping; None if there was none
    close: bytes | None = None  # the payload of the peer's Close frame; the bytes after it are ignored
    fault: FrameFault | None = None  # the bytes after it are ignored too


class FrameReader:
    """Reads a client's frames. After a `close` or a `fault` it must not be used any more."""

    __slots__ = ("_buffer", "_key", "_kind", "_left", "_unfinished")

    def __init__(self, kind: int = BINARY) -> None:
        """`kind` is the opcode of the messages to accept, BINARY or TEXT."""
        self._kind = kind
        self._buffer = b""  # of a frame's head, or of a control frame
        self._left = 0  # bytes of a data frame's payload that are missing
        self._key = b""  # its masking key, rotated for the next of these bytes
        self._unfinished = False  # between the frames of a message

    def receive(self, data: bytes) -> ReceivedMessage:
        """Parse bytes, split anywhere."""
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        payloads: list[bytes] = []
        ends: list[int] = []
        ping: bytes | None = None
        close: bytes | None = None
        fault: FrameFault | None = None
        at, end, size = 0, len(data), 0
        while at < end:
            if self._left:
                part = data[at : at + self._left]
                at += len(part)
                size += len(part)
                self._left -= len(part)
                payloads.append(_unmask(part, self._key))
                turn = len(part) % 4
                self._key = self._key[turn:] + self._key[:turn]
                if not self._left and not self._unfinished:
                    ends.append(size)
                continue
            fault = self._check(data[at : at + 10])
            if fault is not None:
                break
            body = _body(data, at)
            opcode = data[at] & 0x0F
            if body > end or (opcode & _CONTROL and body + (data[at + 1] & 0x7F) > end):
                self._buffer = data[at:]
                break
            key = data[body - 4 : body]
            if not opcode & _CONTROL:
                self._unfinished = not data[at] & 0x80
                self._left, self._key = _size(data, at), key
                if not self._left and not self._unfinished:
                    ends.append(size)
                at = body
                continue
            at = body + (data[at + 1] & 0x7F)
            said = _unmask(data[body:at], key)
            if opcode == PING:
                ping = said
            elif opcode == CLOSE:
                fault = _check_close(said)
                close = said if fault is None else None
                break
        payload = payloads[0] if len(payloads) == 1 else b"".join(payloads)
        return ReceivedMessage(payload, tuple(ends), ping, close, fault)

    def _check(self, head: bytes) -> FrameFault | None:
        """Return the fault of a frame's possibly incomplete header (section 5.2), or None."""
        first = head[0]
        opcode = first & 0x0F
        if first & 0x70:
            return FrameFault(PROTOCOL_ERROR, "a reserved bit is set")
        if opcode not in _KNOWN:
            return FrameFault(PROTOCOL_ERROR, f"unknown opcode {opcode}")
        if opcode & _CONTROL:
            if not first & 0x80:
                return FrameFault(PROTOCOL_ERROR, "a fragmented control frame")
        elif (opcode == CONTINUATION) is not self._unfinished:
            return FrameFault(
                PROTOCOL_ERROR, "a message within another" if opcode else "a continuation without a message"
            )
        elif opcode not in (CONTINUATION, self._kind):
            return FrameFault(UNSUPPORTED_DATA, f"{_NAMES[self._kind]} frames only")  # of binary ones: [MQTT-6.0.0-1]
        if len(head) < 2:
            return None
        if not head[1] & 0x80:
            return FrameFault(PROTOCOL_ERROR, "a client's frame must be masked")  # section 5.1
        short = head[1] & 0x7F
        if short <= SHORT:
            return None
        if opcode & _CONTROL:
            return FrameFault(PROTOCOL_ERROR, f"a control frame of more than {SHORT} bytes")
        if len(head) >= _HEAD_BYTES[short]:
            size = _size(head, 0)
            if size >> 63 or size <= (SHORT if short == 126 else 0xFFFF):
                return FrameFault(PROTOCOL_ERROR, "an invalid length")
        return None


def accept_token(key: str) -> str:
    """Return the Sec-WebSocket-Accept for the key of an opening handshake (section 4.2.2)."""
    return base64.b64encode(hashlib.sha1(key.encode() + _ACCEPT_KEY, usedforsecurity=False).digest()).decode()


def write_frame(opcode: int, payload: bytes | bytearray | memoryview = b"") -> bytes:
    """Return one complete message or control frame; a server does not mask (section 5.1)."""
    size = len(payload)
    if size <= SHORT:
        head = bytes((0x80 | opcode, size))
    elif size <= 0xFFFF:
        head = struct.pack("!BBH", 0x80 | opcode, 126, size)
    else:
        head = struct.pack("!BBQ", 0x80 | opcode, 127, size)
    return head + payload


def close_frame(code: int, reason: str = "") -> bytes:
    """Return a Close frame (section 5.5.1); the reason must be short."""
    return write_frame(CLOSE, struct.pack("!H", code) + reason.encode())


def unmasked_frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield opcode and payload of the text and Close frames in `data`, complete frames from `write_frame`."""
    at = 0
    while at + 2 <= len(data):
        start = at + _HEAD_BYTES.get(data[at + 1] & 0x7F, 2)
        end = start + _size(data, at)
        opcode = data[at] & 0x0F
        if opcode in (TEXT, CLOSE):
            yield opcode, data[start:end]
        at = end


def _body(data: bytes, at: int) -> int:
    """Return where the payload of the frame at `at` starts; beyond the data if the header is incomplete."""
    if len(data) < at + 2:
        return at + 6
    return at + _HEAD_BYTES.get(data[at + 1] & 0x7F, 2) + 4


def _size(data: bytes, at: int) -> int:
    """Return the payload length of a complete frame header."""
    short = data[at + 1] & 0x7F
    return short if short <= SHORT else int.from_bytes(data[at + 2 : at + _HEAD_BYTES[short]], "big")


def _unmask(data: bytes, key: bytes) -> bytes:
    """Unmask (section 5.3) with a single XOR of two large integers."""
    size = len(data)
    keys = (key * (size // 4 + 1))[:size]
    return (int.from_bytes(data, "little") ^ int.from_bytes(keys, "little")).to_bytes(size, "little")


def _check_close(payload: bytes) -> FrameFault | None:
    """Return the fault of a Close frame's payload (section 5.5.1), or None."""
    if not payload:
        return None
    if len(payload) == 1:
        return FrameFault(PROTOCOL_ERROR, "a truncated status code")
    code = int.from_bytes(payload[:2], "big")
    if code not in _FOR_FRAMES and not 3000 <= code < 5000:
        return FrameFault(PROTOCOL_ERROR, f"status code {code}")
    try:
        payload[2:].decode()
    except UnicodeDecodeError:
        return FrameFault(INVALID_PAYLOAD, "a reason that is not UTF-8")
    return None
