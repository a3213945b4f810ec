"""From a stream of bytes to whole packets: what is not whole yet waits here, in one buffer, copied once."""

from __future__ import annotations

from typing import Final

from protocols.mqtt.reasons import malformed

SMALLEST: Final = 2  # the first byte and a remaining length of 0


class FrameBuffer:
    """Bytes of a packet that is not whole yet.

    A large packet that comes in many pieces is joined once, when it is whole: `needed` remembers how long it is.
    """

    __slots__ = ("_needed", "_waiting")

    def __init__(self) -> None:
        self._waiting = bytearray()
        self._needed = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> bytes:
        """What waits, which stays."""
        return bytes(self._waiting)

    def join(self, data: bytes) -> bytes:
        """Put `data` behind what waits; give both, or b"" while the first packet is still not whole."""
        waiting = self._waiting
        if not waiting:
            return data
        waiting += data
        if len(waiting) < self._needed:
            return b""
        whole = bytes(waiting)
        self.clear()
        return whole

    def keep(self, data: bytes, needed: int = SMALLEST) -> None:
        """Let `data` wait until `needed` bytes are there (0: until it is taken)."""
        self._waiting += data
        self._needed = needed

    def take(self) -> bytes:
        """Take everything that waits."""
        data = bytes(self._waiting)
        self.clear()
        return data

    def clear(self) -> None:
        """Throw away what waits."""
        self._waiting = bytearray()  # a new one: a buffer that once was large gives its memory back
        self._needed = 0


def read_length(buffer: bytes, position: int, size: int) -> tuple[int, int, bool] | None:
    """Read a remaining length of two bytes or more at `position` (section 2.1.4).

    Returns:
        The length, the position behind it, and whether it is longer than it needs to be; None when it is not whole
        yet.

    Raises:
        PeerError: it has more than four bytes.
    """
    length = shift = 0
    while position < size:
        byte = buffer[position]
        position += 1
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            return length, position, byte == 0 and shift > 0
        shift += 7
        if shift == 28:
            raise malformed("a remaining length of more than four bytes")
    return None
