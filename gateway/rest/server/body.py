"""Reads request bodies within limits of size and time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.rest.server.content_coding import check_coding
from gateway.rest.server.overload import OverloadGuard
from protocols.rest.content_coding import BodyDecoder, CodingError
from protocols.rest.errors import RestError, too_large

TURN: Final = 16
"""Pieces of a coded body that are decoded before the loop gets control back."""
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class BodyReader:
    """Reads bodies within one set of limits."""

    def __init__(self, overload: OverloadGuard, max_bytes: int, timeout_s: float, min_rate: int) -> None:
        """Refuse bodies over `max_bytes`. Wait `timeout_s` seconds, and longer for bodies that come at `min_rate`.

        That is the average in bytes a second after the first time limit: a slowloris does not keep a slot for long.
        """
        self._max_bytes = max_bytes
        self._overload = overload
        self._timeout_s = timeout_s
        self._min_rate = min_rate

    async def read(self, request: web.BaseRequest) -> bytes:
        """Return the whole decoded body, of at most `max_bytes`.

        Raises:
            RestError: 400 for a body that is truncated in its framing or coding, 408 if it is too slow, 413 if it is
                too large (before reading if its length is announced), 415 for an unknown coding.
        """
        max_bytes = self._max_bytes
        content = request.content
        coding = check_coding(request)
        if coding is None and content.is_eof():  # the usual case: it came together with the head
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
            received = size = 0  # bytes on the wire, and decoded
            loop = asyncio.get_running_loop()
            began = loop.time()
            with _refused():
                async with asyncio.timeout(self._timeout_s) as timer:
                    while received <= max_bytes:  # a coded body can be longer than the decoded one
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
        finally:
            self._overload.release_body(counted)

    async def pieces(self, request: web.BaseRequest, idle_s: float) -> AsyncIterator[bytes]:
        """Yield the decoded body as it arrives, for a caller that processes it piece by piece.

        `answer_expectation` must have been called, before an answer was started. Nothing is read ahead beyond aiohttp's
        buffer (twice 64 KiB), so a slow caller slows the client down. Each part must arrive within `idle_s`.

        Raises:
            RestError: 400 for a body that is truncated in its framing or coding, 408 for a pause that is too long.
        """
        content = request.content
        coding = check_coding(request)
        decoder = None if coding is None else BodyDecoder(coding)
        with _refused():
            while True:
                async with asyncio.timeout(idle_s):
                    part = await content.readany()
                if not part:
                    break
                if decoder is None:
                    yield part
                    continue
                for piece in decoder.feed(part):
                    yield piece
                    await asyncio.sleep(0)  # a part may be a thousand pieces: let the loop run others
            if decoder is not None:
                decoder.finish()


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Turn what can be wrong with a body into the answer."""
    try:
        yield
    except TimeoutError as error:
        raise RestError(408, "The request body came too slowly", close=True) from error
    except CodingError as error:
        raise RestError(400, str(error), close=True) from error
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise RestError(400, "The request body is broken", close=True) from error


def answer_expectation(request: web.BaseRequest) -> None:
    """Answer `Expect: 100-continue` (RFC 9110 section 10.1.1). Call it last, after all other checks of the request.

    `net.heads` has refused any other expectation.

    Raises:
        RestError: 415 for a body in an unknown coding.
    """
    check_coding(request)
    if "Expect" in request.headers and request.transport is not None and request.version >= (1, 1):
        request.transport.write(CONTINUE)
