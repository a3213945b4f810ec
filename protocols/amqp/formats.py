"""Transfers whose message-format (part 2.7.5) is not 0: proton does not report them, `_native_formats.c` finds them.

A message-format says how the payload is to be read: Azure's clients send several messages in one so (0x80013700).
"""

from __future__ import annotations

from typing import Final

AMQP_HEADER: Final = 8
"""The size of the protocol header, which comes first."""

State = tuple[int, int, bytes]
"""How many bytes of the current frame are still to come, its message-format, and the start of a frame that is cut."""
START: Final[State] = (AMQP_HEADER, 0, b"")

Foreign = list[tuple[int, int, int]]
"""Of each transfer of a foreign format that is whole now: where in the data its bytes begin and end, and the format."""
