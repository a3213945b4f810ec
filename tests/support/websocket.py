"""WebSocket frames by hand (RFC 6455 sections 4.1 and 5.2), for tests that send what no client library allows."""

from __future__ import annotations

import base64
import struct

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
MASK = b"\x37\xfa\x21\x3d"
KEY = base64.b64encode(b"sixteen  letters").decode()


def frame(payload: bytes = b"", opcode: int = BINARY, *, fin: bool = True, masked: bool = True) -> bytes:
    """Encode one frame, masked as a client's must be."""
    size = len(payload)
    mask_bit = 0x80 if masked else 0
    if size < 126:
        head = struct.pack("!BB", fin << 7 | opcode, mask_bit | size)
    elif size < 65536:
        head = struct.pack("!BBH", fin << 7 | opcode, mask_bit | 126, size)
    else:
        head = struct.pack("!BBQ", fin << 7 | opcode, mask_bit | 127, size)
    if not masked:
        return head + payload
    keys = MASK * (size // 4 + 1)
    return head + MASK + bytes(a ^ b for a, b in zip(payload, keys, strict=False))


def close_frame(code: int, reason: str = "") -> bytes:
    """A client's Close frame."""
    return frame(struct.pack("!H", code) + reason.encode(), CLOSE)


def parse(data: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """Return a server's frames as (opcode, payload), and the rest, which is an incomplete frame."""
    frames = []
    while len(data) >= 2:
        size, at = data[1], 2
        assert data[0] & 0x70 == 0
        assert size < 0x80, "a server does not mask"
        if size == 126:
            size, at = int.from_bytes(data[2:4]), 4
        elif size == 127:
            size, at = int.from_bytes(data[2:10]), 10
        if len(data) < at + size:
            break
        frames.append((data[0] & 0x0F, data[at : at + size]))
        data = data[at + size :]
    return frames, data


def handshake(path: str = "/", **fields: str | None) -> bytes:
    """Make an opening handshake for subprotocol `mqtt`; `fields` replace headers (`_` for `-`), None removes one."""
    headers: dict[str, str | None] = {
        "Host": "gateway",
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": KEY,
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Protocol": "mqtt",
    }
    known = {name.lower().replace("-", "_"): name for name in headers}
    for name, value in fields.items():
        headers[known.get(name, name.replace("_", "-"))] = value
    lines = [f"{name}: {value}" for name, value in headers.items() if value is not None]
    return "\r\n".join([f"GET {path} HTTP/1.1", *lines, "", ""]).encode()
