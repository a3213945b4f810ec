"""Decodes bodies with a content coding (RFC 9110 section 8.4.1), in pieces. Pure.

A coded body is complete only when its coding says so: gzip (RFC 1952) and zstd (RFC 8878) may have several members or
frames, deflate (RFC 1950) is one stream, and each must end, with its checksum, where the body ends.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CODINGS: Final = ("zstd", "gzip", "deflate")
"""The supported codings, in the order of our preference."""
PIECE: Final = 64 * 1024
"""The largest piece of decoded bytes."""
_STEP: Final = 4 * 1024  # input bytes of a step: each end of a member copies the rest, and members may be tiny
_GZIP: Final = 16 + zlib.MAX_WBITS
_WINDOW_LOG: Final = 23  # a window of 8 MB, the maximum of RFC 9659; the decoder allocates it
_ALIASES: Final = {"x-gzip": "gzip"}  # RFC 9110 section 8.4.1.3
_NONE: Final = frozenset({"identity", ""})


class CodingError(Exception):
    """The body violates its coding, or the coding is unknown; the text says why."""


def coding_of(fields: Sequence[str]) -> str | None:
    """Return the coding of a body from its fields `Content-Encoding`, or None.

    Raises:
        CodingError: It is none of `CODINGS`, or several were applied.
    """
    names = [name.strip().lower() for field in fields for name in field.split(",")]
    codings = [_ALIASES.get(name, name) for name in names if name not in _NONE]
    if not codings:
        return None
    if len(codings) > 1 or codings[0] not in CODINGS:
        raise CodingError(f"The coding of the body is not supported; supported are {', '.join(CODINGS)}")
    return codings[0]


class BodyDecoder:
    """Decodes one body."""

    def __init__(self, coding: str) -> None:
        """`coding` is one of `CODINGS`."""
        self._coding = coding
        self._stream: Any = None  # of one member, stream or frame; None before the first, and between two
        self._begun = False
        self._head = b""  # of a deflate stream: its first byte, if it came alone

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield decoded pieces of at most `PIECE` bytes, none empty. Consume all of them before the next call.

        Raises:
            CodingError: The body is malformed. Pieces before the error may not have been covered by a checksum yet.
        """
        try:
            for start in range(0, len(data), _STEP):
                left = self._head + data[start : start + _STEP]
                self._head = b""
                while left:
                    if self._stream is None and not self._begin(left):
                        break
                    stream = self._stream
                    yield from _zstd_pieces(stream, left) if self._coding == "zstd" else _zlib_pieces(stream, left)
                    left = b""
                    if stream.eof:
                        left = stream.unused_data
                        self._stream = None
        except (zlib.error, zstd.ZstdError) as error:
            raise CodingError(self._broken(str(error))) from error

    def _begin(self, data: bytes) -> bool:
        """Begin a member, stream or frame. False means that more data is needed."""
        if self._coding == "zstd":
            self._stream = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})
        elif self._coding == "gzip":
            self._stream = zlib.decompressobj(_GZIP)
        elif self._begun:
            raise CodingError(self._broken("it has data after its end"))
        elif len(data) < 2:
            self._head = data
            return False
        else:  # some clients send deflate without zlib's header (RFC 9110 section 8.4.1.2, note)
            framed = data[0] & 0x0F == 8 and int.from_bytes(data[:2], "big") % 31 == 0
            self._stream = zlib.decompressobj(zlib.MAX_WBITS if framed else -zlib.MAX_WBITS)
        self._begun = True
        return True

    def finish(self) -> None:
        """Check at the end of the body that its coding has ended too; else CodingError."""
        if self._stream is not None or not self._begun:
            raise CodingError(self._broken("it is truncated"))

    def _broken(self, reason: str) -> str:
        return f"The request body is not {self._coding}: {reason}"


def _zlib_pieces(stream: Any, data: bytes) -> Iterator[bytes]:
    while True:
        piece = stream.decompress(data, PIECE)
        if piece:
            yield piece
        data = stream.unconsumed_tail
        if stream.eof or (not data and len(piece) < PIECE):
            return


def _zstd_pieces(stream: zstd.ZstdDecompressor, data: bytes) -> Iterator[bytes]:
    while True:
        piece = stream.decompress(data, PIECE)
        if piece:
            yield piece
        data = b""
        if stream.eof or stream.needs_input:
            return
