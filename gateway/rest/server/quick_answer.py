"""The usual 200 answer, made and written with as little work as possible.

aiohttp makes a multidict for every answer's head, completes and serialises it, and writes head and body through four
coroutines: more work than all the rest of a small request. Here the head is a byte string that is made once a second.
"""

from __future__ import annotations

import time
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.compression_utils import MAX_SYNC_CHUNK_SIZE
from aiohttp.http import HttpVersion11
from multidict import CIMultiDict

MAX_COPIED_BYTES: Final = 64 * 1024
"""The longest body that is copied behind its head; a longer one would be in memory twice until it is read."""


class Head:
    """The head of all answers of one kind, up to the length of the body."""

    __slots__ = ("_bytes", "_second", "fields")

    def __init__(self, fields: dict[str, str]) -> None:
        """`fields` are the header fields without Date and Content-Length."""
        self.fields: Final = fields
        self._second = -1
        self._bytes = b""

    def now(self) -> bytes:
        """Return the bytes with the current Date (RFC 9110 section 6.6.1)."""
        second = int(time.time())
        if second != self._second:
            self._second = second
            lines = {**self.fields, "Date": formatdate(second, usegmt=True)}
            text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
            self._bytes = f"HTTP/1.1 200 OK\r\n{text}Content-Length: ".encode("ascii")
        return self._bytes

    def with_body(self, body: bytes) -> bytes:
        """Return the whole answer."""
        return b"%b%d\r\n\r\n%b" % (self.now(), len(body), body)


class QuickAnswer(web.Response):
    """An answer with a ready head. It behaves like aiohttp's own as soon as anything in it is changed."""

    def __init__(self, body: bytes, head: Head) -> None:
        self._body = body  # from here on like aiohttp's constructors, but without the multidict
        self._state = {}
        self._status = int(HTTPStatus.OK)
        self._reason = "OK"
        self._zlib_executor_size = MAX_SYNC_CHUNK_SIZE
        self._zlib_executor = None
        self._head = head
        self._fields: CIMultiDict[str] | None = None

    @property
    def _headers(self) -> CIMultiDict[str]:  # type: ignore[override]  # made on first use
        if self._fields is None:
            self._fields = CIMultiDict(self._head.fields)
        return self._fields

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Write head and body in one call if the answer is a usual one; else let aiohttp do it."""
        body = self._body
        assert isinstance(body, bytes)
        if (
            self._fields is not None
            or self._status != HTTPStatus.OK
            or self._keep_alive is not None
            or self._compression
            or self._chunked
            or self._cookies
            or self._eof_sent
            or self._payload_writer is not None
            or len(body) > MAX_COPIED_BYTES
            or not request.keep_alive
            or request.version != HttpVersion11
            or request.method == "HEAD"
        ):
            return await super().prepare(request)
        self._keep_alive = True
        self._eof_sent = True
        self._body_length = len(body)
        await request.writer.write_eof(self._head.with_body(body))
        return None
