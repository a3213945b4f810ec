"""Which pages of browsers may use the gateway, and under which names it may be called (RFC 6454, RFC 9110 section 7.2).

A browser sends to any address that a page names, and so to a gateway that only its user can reach. A page of anywhere
could publish by that, and take what is a group's, wherever the connection alone is enough, or what the browser shows by
itself: nothing at all, a certificate, a password that it remembers. A browser says whose page it is (`Origin`,
`Sec-Fetch-Site`), and what name it was sent to (`Host`): a name that the page's owner has pointed at this machine makes
both look alike (DNS rebinding), so names have to be known too. Clients that are no browsers say no origin and are not
asked ([ADR 0033](../../docs/adr/0033-web-pages.md)).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Mapping
from typing import Final
from urllib.parse import urlsplit

from gateway.config import Address, SecurityConfig

ANY: Final = "*"
_NEAR_SUFFIXES: Final = (".localhost", ".local", ".internal", ".home.arpa", ".test")
"""Names that nobody can register (RFC 6761, 6762, 8375 and ICANN's `.internal`)."""
_DEFAULT_PORTS: Final = (":80", ":443")
_OWN_PAGES: Final = frozenset({"none", "same-origin"})  # of Sec-Fetch-Site: the user himself; our own page
_DOCUMENTS: Final = frozenset({"/", "/docs", "/docs/", "/openapi", "/openapi/v3", "/openapi.yaml"})
_METRICS: Final = frozenset({"/healthy", "/ready", "/metrics", "/flow", "/console"})
_LINKED: Final = _DOCUMENTS | _METRICS
"""Paths that another site may link to: to read them changes nothing."""


class Hosts:
    """The names under which the gateway may be called."""

    def __init__(self, security: SecurityConfig, *, login_needed: bool) -> None:
        """The configured ones; where there are none: any where a login is needed, else names of this network."""
        listed = security.hosts
        self._listed = frozenset(name.lower() for name in listed or ())
        self._any = ANY in self._listed or (listed is None and login_needed)
        self._proven_by_tls = listed is None
        self._own = socket.gethostname().lower()

    def allow(self, host: str, *, secure: bool) -> bool:
        """Whether a request may be for this name, the field Host; "" is no browser's.

        TLS (`secure`) proves the name. An address cannot have been pointed here by a page's owner, nor can a name
        without a dot, or one that nobody can register.
        """
        if self._any or not host or (secure and self._proven_by_tls):
            return True
        name = host.lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0].removesuffix(".")
        if "." not in name or name in self._listed or name == self._own or name.endswith(_NEAR_SUFFIXES):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class Origins:
    """Whose pages may call."""

    def __init__(self, security: SecurityConfig, *, more: Collection[str] = ()) -> None:
        """The configured ones, `more` and ours; where none are configured, those of this machine too."""
        listed = security.origins
        self._near = listed is None
        self._listed = frozenset(origin.lower() for origin in (*(listed or ()), *more))
        self._any = ANY in self._listed

    def allow(self, origin: str, host: str, *, secure: bool, login_in_protocol: bool = False) -> bool:
        """Whether a page of `origin` may call `host`, which `Hosts` has let in: a page of the same name is ours.

        With `login_in_protocol` what is opened asks everybody for a password itself, which no browser remembers: a page
        gains nothing by the connection.
        """
        if self._any or (login_in_protocol and self._near) or origin.lower() in self._listed:
            return True
        try:
            parts = urlsplit(origin)
            name = parts.hostname or ""
        except ValueError:
            return False
        if self._near and name and Address(f"{name}:0").is_loopback:
            return True
        own = parts.scheme == "https" or (parts.scheme == "http" and not secure)
        return own and bool(name) and _plain(parts.netloc) == _plain(host)

    def allow_request(
        self, path: str, fields: Mapping[str, str], *, secure: bool, login_in_protocol: bool = False
    ) -> bool:
        """Whether a request may be served, as far as its head (`fields`) tells whose page sent it."""
        origin = fields.get("Origin")
        if origin is not None:
            return self.allow(origin, fields.get("Host", ""), secure=secure, login_in_protocol=login_in_protocol)
        site = fields.get("Sec-Fetch-Site")  # a page sends some requests, such as an image's, without its origin
        if site is None or site in _OWN_PAGES or self._any or (login_in_protocol and self._near):
            return True
        return fields.get("Sec-Fetch-Mode") == "navigate" and path.partition("?")[0] in _LINKED


def _plain(authority: str) -> str:
    """Without the port that goes without saying: proxies differ in saying it."""
    authority = authority.lower()
    for port in _DEFAULT_PORTS:
        authority = authority.removesuffix(port)
    return authority
