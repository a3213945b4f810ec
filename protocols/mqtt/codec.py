"""The data types of MQTT (section 1.5): integers, variable byte integers, UTF-8 strings, binary data.

`Reader` is a cursor over the bytes of one packet. It never reads beyond the packet's end; an incomplete field is a
malformed packet.
"""

from __future__ import annotations

import re
from typing import Final

from protocols.errors import UsageError
from protocols.mqtt.reasons import malformed

MAX_VARINT: Final = 268_435_455  # 4 bytes of 7 bits (section 1.5.5)
MAX_FIELD: Final = 65_535  # the length prefix of strings and binary data has two bytes

# Section 1.5.4 lets a receiver treat control characters and non-characters as malformed. Like in other servers, names
# (topics, filters, client identifiers, user names) with them are refused; free text (user properties, reason strings)
# may contain line breaks.
_UNFIT_IN_NAMES: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\ufdd0-\ufdef"
    + "".join(chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF))
    + "]"
)


def decode_text(data: bytes) -> str:
    """Decode a UTF-8 string of free text; U+FEFF is kept [MQTT-1.5.4-3].

    Raises:
        PeerError: ill-formed UTF-8, an encoded surrogate [MQTT-1.5.4-1], or U+0000 [MQTT-1.5.4-2].
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise malformed("a string is not well-formed UTF-8") from None
    if "\0" in text:
        raise malformed("a string contains U+0000")
    return text


def decode_name(data: bytes) -> str:
    """Decode a UTF-8 string that is a name; control characters and non-characters are refused too."""
    text = decode_text(data)
    if _UNFIT_IN_NAMES.search(text) is not None:
        raise malformed("a name contains a control character or a non-character")
    return text


def read_varint(data: bytes, position: int, end: int) -> tuple[int, int, bool] | None:
    """Read a variable byte integer that may be incomplete or longer than needed.

    Returns:
        Its value, the position behind it, and whether it has more bytes than needed; None if it is incomplete.

    Raises:
        PeerError: it has more than four bytes.
    """
    value = 0
    for shift in (0, 7, 14, 21):
        if position >= end:
            return None
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position, byte == 0 and shift > 0
    raise malformed("a variable byte integer has more than four bytes")


def decode_varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """Read a variable byte integer; return its value and the position behind it.

    Raises:
        PeerError: it is incomplete, has more than four bytes, or more bytes than needed [MQTT-1.5.5-1].
    """
    decoded = read_varint(data, position, end)
    if decoded is None:
        raise malformed("the packet ends inside a variable byte integer")
    value, position, overlong = decoded
    if overlong:
        raise malformed("a variable byte integer has more bytes than needed")
    return value, position


def split_packets(data: bytes) -> list[bytes]:
    """Return the single packets of `data`, which holds complete packets only."""
    packets, position, size = [], 0, len(data)
    while position < size:
        length, start = data[position + 1], position + 2
        if length > 0x7F:
            length, start = decode_varint(data, position + 1, size)
        packets.append(data[position : start + length])
        position = start + length
    return packets


def encode_varint(value: int) -> bytes:
    """Encode a variable byte integer in the fewest possible bytes [MQTT-1.5.5-1]."""
    if 0 <= value < 0x80:
        return bytes((value,))
    if not 0 <= value <= MAX_VARINT:
        raise UsageError(f"a variable byte integer holds 0..{MAX_VARINT}, got {value}")
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_text(text: str) -> bytes:
    """Encode a UTF-8 string with its length prefix.

    Raises:
        UsageError: it is longer than 65,535 bytes or contains U+0000 or a surrogate.
    """
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise UsageError("a string with a surrogate cannot be sent") from None
    if len(data) > MAX_FIELD:
        raise UsageError(f"a string of {len(data)} bytes cannot be sent: the maximum is {MAX_FIELD}")
    if b"\0" in data:
        raise UsageError("a string with U+0000 cannot be sent")
    return len(data).to_bytes(2) + data


def encode_binary(data: bytes) -> bytes:
    """Encode binary data with its length prefix; raise UsageError if it is longer than 65,535 bytes."""
    if len(data) > MAX_FIELD:
        raise UsageError(f"a binary field of {len(data)} bytes cannot be sent: the maximum is {MAX_FIELD}")
    return len(data).to_bytes(2) + data


def is_text(payload: bytes) -> bool:
    """Whether a payload is well-formed UTF-8, as payload format indicator 1 requires (section 3.3.2.3.2)."""
    if payload.isascii():
        return True
    try:
        payload.decode()
    except UnicodeDecodeError:
        return False
    return True


UNLIMITED: Final = 1 << 31


class Reader:
    """A cursor over `data[position:end]`, a packet or the rest of one."""

    __slots__ = ("data", "end", "field", "most_pairs", "position")

    def __init__(self, data: bytes, position: int = 0, end: int | None = None) -> None:
        self.data = data
        self.position = position
        self.end = len(data) if end is None else end
        self.field = "a field"  # what is being read, for errors
        self.most_pairs = UNLIMITED  # of user properties

    @property
    def left(self) -> int:
        """Number of bytes left."""
        return self.end - self.position

    def integer(self, size: int) -> int:
        """Read a big-endian integer of `size` bytes."""
        return int.from_bytes(self.take(size))

    def varint(self) -> int:
        """Read a variable byte integer."""
        value, self.position = decode_varint(self.data, self.position, self.end)
        return value

    def text(self) -> str:
        """Read a string of free text."""
        return decode_text(self.binary())

    def name(self) -> str:
        """Read a string that is a name."""
        return decode_name(self.binary())

    def binary(self) -> bytes:
        """Read binary data with its length prefix."""
        return self.take(self.integer(2))

    def take(self, size: int) -> bytes:
        """Read the next `size` bytes."""
        position = self.position
        if position + size > self.end:
            raise malformed(f"the packet ends inside {self.field}")
        self.position = position + size
        return self.data[position : position + size]

    def finish(self) -> None:
        """Check that all bytes were read."""
        if self.position != self.end:
            raise malformed(f"{self.left} bytes too many")
