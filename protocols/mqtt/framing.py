"""Buffers incomplete packets of the byte stream; each packet is copied only once."""

from __future__ import annotations

from typing import Final

SMALLEST: Final = 2  # the first byte and a remaining length of 0


class FrameBuffer:
    """The bytes of an incomplete packet.

    A large packet that arrives in many pieces is joined once, when all `needed` bytes are there.
    """

    __slots__ = ("_needed", "_waiting")

    def __init__(self) -> None:
        self._waiting = bytearray()
        self._needed = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> bytes:
        """A copy of the buffered bytes."""
        return bytes(self._waiting)

    def join(self, data: bytes) -> bytes:
        """Append `data`; return and clear the buffer, or return b"" while the first packet is incomplete."""
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
        """Buffer `data` until there are `needed` bytes (0: until `take`)."""
        self._waiting += data
        self._needed = needed

    def take(self) -> bytes:
        """Return and clear the buffer."""
        data = bytes(self._waiting)
        self.clear()
        return data

    def clear(self) -> None:
        """Discard the buffered bytes."""
        self._waiting = bytearray()  # a new object, to free the memory of a large buffer
        self._needed = 0
