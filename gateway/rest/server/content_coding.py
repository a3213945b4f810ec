"""Compresses answers as the client accepts, and checks the coding of bodies (RFC 9110 sections 8.4 and 12.5.3)."""

from __future__ import annotations

import asyncio
import gzip
import sys
import zlib
from collections.abc import Callable
from typing import Final

from aiohttp import web

from protocols.rest.content_coding import CODINGS, CodingError, coding_of
from protocols.rest.errors import RestError
from protocols.rest.media import preferred_coding

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_LEVEL: Final = 1  # a higher one costs more CPU time than the smaller answer saves
_IN_LOOP: Final = 64 * 1024  # bytes; more is compressed in a thread
_COMPRESS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "zstd": lambda body: zstd.compress(body, _LEVEL),
    "gzip": lambda body: gzip.compress(body, _LEVEL, mtime=0),
    "deflate": lambda body: zlib.compress(body, _LEVEL),
}


def check_coding(request: web.BaseRequest) -> str | None:
    """Return the coding of a body or None; RestError 415 with `Accept-Encoding` for an unknown one."""
    if "Content-Encoding" not in request.headers:
        return None
    try:
        return coding_of(request.headers.getall("Content-Encoding"))
    except CodingError as error:
        accepted = (("Accept-Encoding", ", ".join(CODINGS)),)
        raise RestError(415, str(error), headers=accepted, close=True) from error


async def compress(request: web.BaseRequest, answer: web.StreamResponse, smallest: int) -> None:
    """Compress an answer of at least `smallest` bytes with the coding that the client prefers.

    An entity tag becomes a weak one: it identifies the content, not the compressed bytes.
    """
    body = answer.body if isinstance(answer, web.Response) else None
    if not isinstance(body, bytes) or len(body) < smallest or "Content-Encoding" in answer.headers:
        return
    answer.headers.add("Vary", "Accept-Encoding")
    coding = preferred_coding(request.headers.get("Accept-Encoding"), CODINGS)
    if coding is None:
        return
    if len(body) <= _IN_LOOP:
        compressed = _COMPRESS[coding](body)
    else:
        compressed = await asyncio.to_thread(_COMPRESS[coding], body)
    assert isinstance(answer, web.Response)
    answer.body = compressed
    answer.headers["Content-Encoding"] = coding
    tag = answer.headers.get("ETag")
    if tag is not None and not tag.startswith("W/"):
        answer.headers["ETag"] = f"W/{tag}"
