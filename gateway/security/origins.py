"""Checks the web page's origin and the requested host name (RFC 6454, RFC 9110 section 7.2).

A browser sends requests to any address that a page names, including a gateway that only the browser's user can reach.
So any web page could publish, or consume a group's messages, if the connection alone suffices, or a credential that the
browser sends by itself: a certificate or a remembered password. Browsers state the page's origin (`Origin`,
`Sec-Fetch-Site`) and the requested name (`Host`). If the page's owner points its own name at this machine (DNS
rebinding), both match, so the host name has to be known too. Clients that are not browsers send no origin and are not
checked ([ADR 0033](../../docs/adr/0033-browser-origins-and-hosts.md)).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Mapping
from typing import Final
from urllib.parse import urlsplit

from gateway.settings.config import Address, SecurityConfig

ANY: Final = "*"
_NEAR_SUFFIXES: Final = (".localhost", ".local", ".internal", ".home.arpa", ".test")
"""Suffixes of names that cannot be registered (RFC 6761, 6762, 8375 and ICANN's `.internal`)."""
_DEFAULT_PORTS: Final = (":80", ":443")
_OWN_PAGES: Final = frozenset({"none", "same-origin"})  # values of Sec-Fetch-Site: typed by the user; our own page
_DOCUMENTS: Final = frozenset({"/", "/docs", "/docs/", "/openapi", "/openapi/v3", "/openapi.yaml"})
_METRICS: Final = frozenset({"/healthy", "/ready", "/metrics", "/flow", "/console"})
_LINKED: Final = _DOCUMENTS | _METRICS
"""Paths that another site may link to: reading them changes nothing."""


class Hosts:
    """The host names under which the gateway accepts requests."""

    def __init__(self, security: SecurityConfig, *, login_needed: bool) -> None:
        """Use the configured names. Without any: every name if a login is needed, else names of the local network."""
        listed = security.hosts
        self._listed = frozenset(name.lower() for name in listed or ())
        self._any = ANY in self._listed or (listed is None and login_needed)
        self._proven_by_tls = listed is None
        self._own = socket.gethostname().lower()

    def allow(self, host: str, *, secure: bool) -> bool:
        """Return whether a request may name this host (the Host field). A browser never sends "".

        TLS (`secure`) proves the name. DNS rebinding is not possible with an IP address, a name without a dot, or a
        name that cannot be registered.
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
    """The origins whose pages may send requests."""

    def __init__(self, security: SecurityConfig, *, more: Collection[str] = ()) -> None:
        """Allow the configured origins, `more` and our own pages; if none are configured, also loopback origins."""
        listed = security.origins
        self._near = listed is None
        self._listed = frozenset(origin.lower() for origin in (*(listed or ()), *more))
        self._any = ANY in self._listed

    def allow(self, origin: str, host: str, *, secure: bool, login_in_protocol: bool = False) -> bool:
        """Return whether a page of `origin` may call `host`, which `Hosts` has allowed. Pages of that host are ours.

        With `login_in_protocol` the opened protocol asks for a password that no browser remembers, so a page gains
        nothing from the connection.
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
        """Return whether a request may be served, judging by the origin in its header fields."""
        origin = fields.get("Origin")
        if origin is not None:
            return self.allow(origin, fields.get("Host", ""), secure=secure, login_in_protocol=login_in_protocol)
        site = fields.get("Sec-Fetch-Site")  # some requests of a page, such as images, have no Origin
        if site is None or site in _OWN_PAGES or self._any or (login_in_protocol and self._near):
            return True
        return fields.get("Sec-Fetch-Mode") == "navigate" and path.partition("?")[0] in _LINKED


def _plain(authority: str) -> str:
    """Remove the scheme's default port: some proxies add it, others do not."""
    authority = authority.lower()
    for port in _DEFAULT_PORTS:
        authority = authority.removesuffix(port)
    return authority
