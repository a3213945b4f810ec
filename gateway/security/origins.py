"""Whose pages may open a WebSocket: what a browser says in Origin (RFC 6454, RFC 6455 section 10.2).

A browser connects to any address that a page names, and so to a gateway that only its user can reach. Where every
client must give a password in its protocol's login a page gains nothing by that. It does where the connection alone is
enough: anonymous access on loopback, or a certificate that the browser presents by itself.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from gateway.config import Address, SecurityConfig

ANY: Final = "*"


class Origins:
    """The origins that may connect; a client that is no browser sends none and is not asked."""

    def __init__(self, security: SecurityConfig) -> None:
        """The configured ones; where there are none: every origin where a login is needed, else only near ones."""
        listed = security.websocket_origins
        self._listed = None if listed is None else frozenset(origin.lower() for origin in listed)
        login_needed = not security.allow_anonymous and security.tls_client_ca is None
        open_to_all = security.allow_anonymous and security.insecure  # said aloud
        self._any = login_needed or open_to_all if listed is None else ANY in listed

    def allow(self, origin: str, host: str, *, secure: bool) -> bool:
        """Whether a page of `origin` may connect.

        Args:
            origin: the field Origin.
            host: the field Host. Over TLS it is proven, so the same name is the same place; without TLS anyone's
                name may have been pointed at this machine (DNS rebinding), and it proves nothing.
            secure: whether the connection is TLS.
        """
        if self._any:
            return True
        if self._listed is not None:
            return origin.lower() in self._listed
        try:
            parts = urlsplit(origin)
            name = parts.hostname or ""
        except ValueError:
            return False
        if name and Address(f"{name}:0").is_loopback:
            return True
        return secure and parts.scheme == "https" and parts.netloc.lower() == host.lower()
