"""Makes aiohttp responses: always with one of the dialect's media types, never an HTML page."""

from __future__ import annotations

import functools
import time
from email.utils import formatdate
from typing import Final

from aiohttp import web

from gateway.net.http.http_server import SERVER
from gateway.security.throttle import peer_of
from protocols.rest.errors import RestError
from protocols.rest.media import CONTROL_TYPE, RECORD_TYPES, Format
from protocols.rest.responses import encode_error

_CONTROL: Final = {"Content-Type": CONTROL_TYPE, "Server": SERVER}
_EMPTY: Final = {"Server": SERVER}


def control_answer(body: bytes, status: int = 200) -> web.Response:
    """Make an answer with the control media type."""
    return web.Response(body=body, status=status, headers=_CONTROL)


def direct_answer(body: bytes) -> bytes:
    """Return the bytes of a 200 answer with the control media type, for requests that are served without a task."""
    return b"%b%d\r\n\r\n%b" % (_head(int(time.time())), len(body), body)


@functools.lru_cache(maxsize=1)
def _head(second: int) -> bytes:
    """Return the head of `direct_answer` up to the length of its body, with this Date (RFC 9110 section 6.6.1)."""
    lines = {**_CONTROL, "Date": formatdate(second, usegmt=True)}
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 200 OK\r\n{text}Content-Length: ".encode("ascii")


def records_answer(body: bytes, embedded: Format) -> web.Response:
    """Make an answer with a list of records."""
    headers = {"Content-Type": RECORD_TYPES[embedded], "Server": SERVER, "Cache-Control": "no-store"}
    return web.Response(body=body, headers=headers)


def no_content() -> web.Response:
    """Make a 204 answer."""
    return web.Response(status=204, headers=_EMPTY)


def error_answer(
    error: RestError, body: bytes | None = None, status: int | None = None, media: str = CONTROL_TYPE
) -> web.Response:
    """Make an error answer; `body`, `status` and `media` replace the Strimzi dialect's for other dialects."""
    headers = {"Content-Type": media, "Server": SERVER}
    answer = web.Response(body=body or encode_error(error), status=status or error.status, headers=headers)
    for name, value in error.headers:
        answer.headers.add(name, value)
    if error.close:
        answer.force_close()
    return answer


def own_address(request: web.BaseRequest) -> str:
    """Return our address as the client's connection has it, for requests without a Host field."""
    transport = request.transport
    name = None if transport is None else transport.get_extra_info("sockname")
    return peer_of(name) if isinstance(name, tuple) else "localhost"
