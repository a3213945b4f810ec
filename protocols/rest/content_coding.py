"""Decodes bodies with a content coding (RFC 9110 section 8.4.1), in pieces. Pure.

A coded body is complete only when its coding says so: gzip (RFC 1952) and zstd (RFC 8878) may have several members or
frames, deflate (RFC 1950) is one stream, and each must end, with its checksum, where the body ends.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

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
        self._begin = _BEGIN[coding]
        self._one = coding == "deflate"
        self._stream: _Zlib | _Zstd | None = None  # None before the first member, and between two
        self._begun = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield decoded pieces of at most `PIECE` bytes, none empty. Consume all of them before the next call.

        Raises:
            CodingError: The body is malformed. Pieces before the error may not have been covered by a checksum yet.
        """
        try:
            for start in range(0, len(data), _STEP):
                left = data[start : start + _STEP]
                while left:
                    if self._stream is None:
                        if self._begun and self._one:
                            raise CodingError(self._broken("it has data after its end"))
                        self._stream = self._begin()
                        self._begun = True
                    stream = self._stream
                    yield from stream.pieces(left)
                    left = b""
                    if stream.ended:
                        left = stream.unused
                        self._stream = None
        except (zlib.error, zstd.ZstdError) as error:
            raise CodingError(self._broken(str(error))) from error

    def finish(self) -> None:
        """Check at the end of the body that its coding has ended too; else CodingError."""
        if self._stream is not None or not self._begun:
            raise CodingError(self._broken("it is truncated"))

    def _broken(self, reason: str) -> str:
        return f"The request body is not {self._coding}: {reason}"


class _Zlib:
    def __init__(self, wbits: int | None) -> None:
        """`wbits` is zlib's argument. None means deflate, whose first two bytes show whether it has zlib's header."""
        self._object = None if wbits is None else zlib.decompressobj(wbits)
        self._head = b""

    @property
    def ended(self) -> bool:
        return self._object is not None and self._object.eof

    @property
    def unused(self) -> bytes:
        return b"" if self._object is None else self._object.unused_data

    def pieces(self, data: bytes) -> Iterator[bytes]:
        if self._object is None:
            data = self._head + data
            if len(data) < 2:
                self._head = data
                return
            # Some clients send deflate without the header (RFC 9110 section 8.4.1.2, note).
            framed = data[0] & 0x0F == 8 and int.from_bytes(data[:2], "big") % 31 == 0
            self._object = zlib.decompressobj(zlib.MAX_WBITS if framed else -zlib.MAX_WBITS)
        while True:
            piece = self._object.decompress(data, PIECE)
            if piece:
                yield piece
            data = self._object.unconsumed_tail
            if self._object.eof or (not data and len(piece) < PIECE):
                return


class _Zstd:
    def __init__(self) -> None:
        self._object = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})

    @property
    def ended(self) -> bool:
        return self._object.eof

    @property
    def unused(self) -> bytes:
        return self._object.unused_data

    def pieces(self, data: bytes) -> Iterator[bytes]:
        while True:
            piece = self._object.decompress(data, PIECE)
            if piece:
                yield piece
            data = b""
            if self._object.eof or self._object.needs_input:
                return


_BEGIN: Final[dict[str, Callable[[], _Zlib | _Zstd]]] = {
    "gzip": partial(_Zlib, _GZIP),
    "deflate": partial(_Zlib, None),
    "zstd": _Zstd,
}
"""Makes the decoder of one member, stream or frame."""
