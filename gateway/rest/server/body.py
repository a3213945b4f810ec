"""Receiving a request's body: never more than the limit, never slower than a client may be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.rest.server.content_coding import check_coding
from gateway.rest.server.overload import OverloadGuard
from protocols.rest.content_coding import BodyDecoder, CodingError
from protocols.rest.errors import RestError, too_large

MIN_RATE: Final = 16 * 1024
"""Bytes a second that a body must make on average after the first time limit: a slow-loris gets no slot for long."""
TURN: Final = 16
"""Pieces of a coded body that are decoded before others have their turn."""
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class BodyReader:
    """Reads bodies under one set of limits."""

    def __init__(self, overload: OverloadGuard, max_bytes: int, timeout_s: float, min_rate: int = MIN_RATE) -> None:
        """Refuse bodies over `max_bytes`; wait `timeout_s` seconds, and longer for what comes at `min_rate`."""
        self.max_bytes = max_bytes
        self._overload = overload
        self._timeout_s = timeout_s
        self._min_rate = min_rate

    async def read(self, request: web.BaseRequest, limit: int | None = None) -> bytes:
        """The whole body, decoded; at most `limit` bytes, where that is not `max_bytes`.

        Raises:
            RestError: 400 for a body that breaks off in its own framing or coding, 408 too slow, 413 too large (before
                it is read where its length is announced), 415 for a coding that we do not know.
        """
        max_bytes = self.max_bytes if limit is None else limit
        content = request.content
        coding = check_coding(request)
        if coding is None and content.is_eof():  # it came together with the head: the usual case
            body = content.read_nowait()
            if len(body) > max_bytes:
                raise too_large(max_bytes)
            return body
        announced = request.content_length or 0
        if announced > max_bytes:
            raise too_large(max_bytes)
        self._overload.receive_body(announced)
        counted = announced
        try:
            if not content.is_eof():
                answer_expectation(request)
            decoder = None if coding is None else BodyDecoder(coding)
            parts: list[bytes] = []
            received = size = 0  # on the wire; and what it is
            loop = asyncio.get_running_loop()
            began = loop.time()
            async with asyncio.timeout(self._timeout_s) as timer:
                while received <= max_bytes:  # a coding can also be longer than what it says
                    part = await content.readany()
                    if not part:
                        if decoder is not None:
                            decoder.finish()
                        return b"".join(parts)
                    received += len(part)
                    for piece in (part,) if decoder is None else decoder.feed(part):
                        size += len(piece)
                        if size > max_bytes:
                            raise too_large(max_bytes)
                        if size > counted:  # chunked, or larger than announced once decoded
                            self._overload.receive_body(size - counted)
                            counted = size
                        parts.append(piece)
                        if decoder is not None and len(parts) % TURN == 0:
                            await asyncio.sleep(0)
                    timer.reschedule(began + self._timeout_s + received / self._min_rate)
                raise too_large(max_bytes)
        except TimeoutError as error:
            raise RestError(408, "The request body came too slowly", close=True) from error
        except CodingError as error:
            raise RestError(400, str(error), close=True) from error
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise RestError(400, "The request body is broken", close=True) from error
        finally:
            self._overload.release_body(counted)

    async def pieces(self, request: web.BaseRequest, idle_s: float) -> AsyncIterator[bytes]:
        """The body as it comes, decoded; for who deals with each part before the next is there.

        `answer_expectation` must have been called, before an answer was begun. Nothing is read ahead beyond what
        aiohttp holds (twice 64 KiB): who is slow is not sent more. Parts come within `idle_s`.

        Raises:
            RestError: 400 for a body that breaks off in its own framing or coding, 408 for a pause that is too long.
        """
        content = request.content
        coding = check_coding(request)
        decoder = None if coding is None else BodyDecoder(coding)
        while True:
            try:
                async with asyncio.timeout(idle_s):
                    part = await content.readany()
            except TimeoutError as error:
                raise RestError(408, "The request body came too slowly", close=True) from error
            except (web.RequestPayloadError, HttpProcessingError) as error:
                raise RestError(400, "The request body is broken", close=True) from error
            if decoder is None:
                if not part:
                    return
                yield part
                continue
            try:
                if not part:
                    decoder.finish()
                    return
                for piece in decoder.feed(part):
                    yield piece
                    await asyncio.sleep(0)  # one part may be a thousand pieces: others have their turn
            except CodingError as error:
                raise RestError(400, str(error), close=True) from error


def answer_expectation(request: web.BaseRequest) -> None:
    """`Expect: 100-continue` (RFC 9110 section 10.1.1): to be said last, when everything else let the request in.

    Any other expectation was refused with the request's head (`net.heads`).

    Raises:
        RestError: 415 for a body in a coding that we do not know.
    """
    check_coding(request)
    if "Expect" in request.headers and request.transport is not None and request.version >= (1, 1):
        request.transport.write(CONTINUE)
