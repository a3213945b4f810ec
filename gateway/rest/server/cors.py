"""CORS: web pages of other origins that call the gateway (Fetch standard, section 3.2, "CORS protocol").

A browser sends a preflight request before it sends `Authorization` or `traceparent`. The preflight has no login and is
answered without one. Cookies are not used, so answers never allow credentials, and pages may read all header fields.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final

from aiohttp import web

from gateway.net.http.http_server import SERVER
from protocols.rest.errors import RestError

ANY: Final = "*"
MAX_AGE_S: Final = 7200  # how long a browser may cache the preflight answer; Chromium's maximum
_FIELDS: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+( *, *[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_FIELDS_LIMIT: Final = 4096  # characters
_FOREIGN: Final = "CORS Rejected - Invalid origin; http.cors_origins lists the allowed ones"  # starts like Strimzi's


class Cors:
    """The configured origins."""

    def __init__(self, origins: Collection[str]) -> None:
        """`origins` are written as a browser sends them; `*` means all."""
        self._none = not origins
        self._any = ANY in origins
        self._origins = frozenset(origin.lower() for origin in origins)

    def fields(self, request: web.BaseRequest) -> dict[str, str]:
        """Return the CORS fields for any answer to `request`, even an error: a page must be able to read why."""
        if self._none:
            return {}
        origin = request.headers.get("Origin")
        if self._any:
            return {} if origin is None else {"Access-Control-Allow-Origin": ANY, "Access-Control-Expose-Headers": ANY}
        if origin is None or origin.lower() not in self._origins:
            return {"Vary": "Origin"}
        return {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": ANY, "Vary": "Origin"}

    def preflight(self, request: web.BaseRequest, methods: Sequence[str]) -> web.Response:
        """Answer a preflight for a path with these methods; RestError 403 if the origin is not allowed."""
        headers = {"Server": SERVER, **self.fields(request)}
        if "Access-Control-Allow-Origin" not in headers:
            raise RestError(403, _FOREIGN)
        headers["Access-Control-Allow-Methods"] = ", ".join(methods)
        headers["Access-Control-Max-Age"] = str(MAX_AGE_S)
        wanted = request.headers.get("Access-Control-Request-Headers", "").strip()
        if len(wanted) <= _FIELDS_LIMIT and _FIELDS.fullmatch(wanted):
            headers["Access-Control-Allow-Headers"] = wanted  # operations ignore fields that they do not know
        return web.Response(status=204, headers=headers)


def is_preflight(request: web.BaseRequest) -> bool:
    """Whether an OPTIONS request is a CORS preflight."""
    return "Origin" in request.headers and "Access-Control-Request-Method" in request.headers


def allowed(methods: Sequence[str]) -> web.Response:
    """Answer `OPTIONS *` with all methods (RFC 9110 section 9.3.7)."""
    return web.Response(status=204, headers={"Server": SERVER, "Allow": ", ".join(methods)})
