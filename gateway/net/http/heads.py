"""Checks the head of a request (RFC 9110, RFC 9112) before the request is routed."""

from __future__ import annotations

import re
from typing import Final

from aiohttp import web

from gateway.security.origins import Hosts

_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|([A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(:[0-9]{0,5})?")
_REMEMBERED: Final = 64  # valid Host fields
CONTINUE: Final = "100-continue"
HEAD_END: Final = b"\r\n\r\n"
_SPACE: Final = 0x20
_LENGTH: Final = b"\r\nContent-Length: %d\r\n"
"""Nearly all clients write it like this or in lower case; others are understood too, a little more slowly."""


class HeadError(Exception):
    """A request that is refused for its head; the text says why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Heads:
    """Checks heads for one listener."""

    def __init__(self, hosts: Hosts, *, secure: bool) -> None:
        """`hosts` has the accepted host names; `secure` means that the listener uses TLS."""
        self._hosts = hosts
        self._secure = secure
        self._good: set[str] = set()

    def check(self, request: web.BaseRequest) -> None:
        """Check the head of a request.

        Raises:
            HeadError: 400 for a bad `Host` (RFC 9112 section 3.2) or framing, 417 for an unsupported expectation
                (RFC 9110 section 10.1.1), 421 for a host name that is not ours (section 15.5.20), 501 for an
                unsupported transfer coding (RFC 9112 section 6.1).
        """
        fields = request.headers
        host = fields.get("Host", "")
        if request.raw_path[:1] not in {"/", "*"} and request.method != "CONNECT":
            host = request.url.raw_authority.rpartition("@")[2]  # overrides the field (RFC 9112 section 3.2.2)
        if host not in self._good:
            self._check_host(host)
        if "Transfer-Encoding" in fields:
            _check_transfer(fields.getall("Transfer-Encoding"), request.version >= (1, 1))
        expected = fields.get("Expect")
        if expected is not None and expected.strip().lower() != CONTINUE and request.version >= (1, 1):
            raise HeadError(417, "Only the expectation 100-continue is supported")

    def _check_host(self, host: str) -> None:
        if not _HOST.fullmatch(host):
            raise HeadError(400, "Bad request: the field Host is not valid")
        if not self._hosts.allow(host, secure=self._secure):
            raise HeadError(421, f"{host} is not a name of this gateway; security.hosts lists its names")
        if len(self._good) < _REMEMBERED:
            self._good.add(host)


def _check_transfer(lines: list[str], is_current: bool) -> None:
    codings = [coding.strip().lower() for line in lines for coding in line.split(",")]
    if not is_current or codings[-1] != "chunked" or codings.count("chunked") > 1:
        raise HeadError(400, "Bad request: the length of the body is ambiguous")
    if len(codings) > 1:
        raise HeadError(501, "Only the transfer coding chunked is supported")


def one_request(data: bytes, max_head_bytes: int) -> int:
    """Return the length of the head if `data` is exactly one complete request; 0 if not or in doubt. Must be quick."""
    end = data.find(HEAD_END)
    if end < 0 or data[0] <= _SPACE or len(data) > max_head_bytes:  # empty lines in front do not belong to a head
        return 0
    head = end + len(HEAD_END)
    rest = len(data) - head
    if not rest:
        return head
    last = end + 2  # the end of the head's last line
    announced = data.find(_LENGTH % rest, 0, last) >= 0 or data.find(_LENGTH.lower() % rest, 0, last) >= 0
    return head if announced else 0
