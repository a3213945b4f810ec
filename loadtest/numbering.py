"""Numbered messages: sender and sequence number can be read from the stored payload."""

from __future__ import annotations

import secrets
from typing import Final, NamedTuple

_LAYOUT: Final = "{run}.{sender:05d}.{sequence:010d}."
HEADER_BYTES: Final = 8 + 1 + 5 + 1 + 10 + 1


class Number(NamedTuple):
    """The sender and sequence number of a payload."""

    sender: int
    sequence: int


class Numbering:
    """Numbers the messages of one run; the run's random id separates them from other traffic on the topic."""

    def __init__(self, run: str | None = None) -> None:
        self.run = run if run is not None else secrets.token_hex(4)

    def payload(self, sender: int, sequence: int, size: int) -> bytes:
        """Return message `sequence` of `sender`, padded with x to `size` bytes (at least `HEADER_BYTES`)."""
        return _LAYOUT.format(run=self.run, sender=sender, sequence=sequence).encode().ljust(size, b"x")

    def read(self, payload: bytes | None) -> Number | None:
        """Return the number in a payload, or None if it is not of this run."""
        if payload is None or not payload.startswith(self.run.encode() + b"."):
            return None
        parts = payload[:HEADER_BYTES].split(b".")
        return Number(int(parts[1]), int(parts[2]))
