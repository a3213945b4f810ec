"""Makes aiohttp responses: always with one of the dialect's media types, never an HTML page."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from gateway.net.http_server import SERVER
from gateway.rest.server.quick_answer import Head, QuickAnswer
from gateway.security.throttle import peer_of
from protocols.rest.errors import RestError
from protocols.rest.media import CONTROL_TYPE, RECORD_TYPES, Format
from protocols.rest.responses import encode_error

_CONTROL: Final = {"Content-Type": CONTROL_TYPE, "Server": SERVER}
_EMPTY: Final = {"Server": SERVER}
CONTROL_HEAD: Final = Head(_CONTROL)
_RECORDS: Final = {
    embedded: Head({"Content-Type": media, "Server": SERVER, "Cache-Control": "no-store"})
    for embedded, media in RECORD_TYPES.items()
}


def control_answer(body: bytes, status: int = 200) -> web.Response:
    """Make an answer with the control media type."""
    if status == 200:
        return QuickAnswer(body, CONTROL_HEAD)
    return web.Response(body=body, status=status, headers=_CONTROL)


def records_answer(body: bytes, embedded: Format) -> web.Response:
    """Make an answer with a list of records."""
    return QuickAnswer(body, _RECORDS[embedded])


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
