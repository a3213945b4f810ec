"""Transfers of foreign message-formats in Python, as `protocols/amqp/_native_formats.c` finds them."""

from __future__ import annotations

from typing import Final

from protocols.amqp.formats import Foreign, State

HEAD: Final = 96
"""The first fields of a transfer, with the frame's header, are in so many bytes."""
UNREADABLE: Final = -1
"""In place of the bytes that are left: a frame with an impossible size, at which proton gives up."""
TRANSFER: Final = 0x14


def scan(data: bytes, state: State) -> tuple[State, Foreign | None]:
    """Read on in a stream of frames; the second result is None where no foreign format is."""
    left, format_, head = state
    if left == UNREADABLE:
        return state, None
    buffer, base = head + data, len(head)
    at = begin = 0
    found: Foreign = []
    while at < len(buffer):
        if not left:
            begin = at
            size = int.from_bytes(buffer[at : at + 4]) if len(buffer) - at >= 4 else HEAD
            if size < 8:
                return (UNREADABLE, 0, b""), found or None
            if len(buffer) - at < min(size, HEAD):
                return (0, 0, buffer[at:]), found or None
            left, format_ = size, _format_of(buffer[at : at + min(size, HEAD)])
        step = min(left, len(buffer) - at)
        at, left = at + step, left - step
        if not left and format_:
            found.append((max(0, begin - base), at - base, format_))
    return (left, format_ if left else 0, b""), found or None


def _format_of(frame: bytes) -> int:
    """Return the message-format of a frame of which these are the first bytes; 0 if it is no readable transfer."""
    at = 4 * frame[4]
    if frame[5] or at < 8:
        return 0
    if frame[at : at + 3] == bytes((0, 0x53, TRANSFER)):
        at += 3
    elif frame[at : at + 10] == bytes((0, 0x80, 0, 0, 0, 0, 0, 0, 0, TRANSFER)):
        at += 10
    else:
        return 0
    head = {0xC0: 3, 0xD0: 9}.get(frame[at], 0) if at < len(frame) else 0  # of a list8 or list32
    if not head:
        return 0
    at += head
    for width in (_uint, _uint, _binary):  # handle, delivery-id, delivery-tag
        size = width(frame, at)
        if not size:
            return 0
        at += size
    size = _uint(frame, at)
    return int.from_bytes(frame[at + 1 : at + size]) if size and at + size <= len(frame) else 0


def _uint(frame: bytes, at: int) -> int:
    """Return the size of a uint or null at `at`, or 0."""
    return {0x40: 1, 0x43: 1, 0x52: 2, 0x70: 5}.get(frame[at], 0) if at < len(frame) else 0


def _binary(frame: bytes, at: int) -> int:
    """Return the size of a binary or null at `at`, or 0."""
    there = len(frame) - at
    kind = frame[at] if there > 0 else 0
    if kind == 0x40:
        return 1
    if kind == 0xA0 and there >= 2:
        return 2 + frame[at + 1]
    return 5 + int.from_bytes(frame[at + 1 : at + 5]) if kind == 0xB0 and there >= 5 else 0
