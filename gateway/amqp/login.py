"""SASL mechanisms on the gateway's own authentication: who is the peer?"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

from gateway.security.identity import Identity


class Authenticator(Protocol):
    """What is needed of `gateway.security.authentication.Authenticator`."""

    def offers(self, *, certificate: bool = False) -> tuple[str, ...]:
        """SASL mechanisms, best first."""
        ...

    def anonymous(self) -> Identity | None:
        """The identity of a client that says nothing about itself."""
        ...

    def identify_certificate(self, peercert: Mapping[str, Any] | None) -> Identity | None:
        """The identity in a verified certificate."""
        ...

    def authenticate_password(
        self, user: str, password: bytes | str, *, peer: str, client_id: str = ""
    ) -> Awaitable[Identity | None]:
        """Check a name and a password."""
        ...


async def login(
    authenticator: Authenticator,
    mechanism: str,
    response: bytes | None,
    *,
    peer: str,
    certificate: Mapping[str, Any] | None,
) -> Identity | None:
    """The identity that a SASL init proves; None: refused.

    An authorization identity other than the authenticated one would be acting for somebody else, which is not
    offered: such a login is refused (RFC 4616 part 2, RFC 4422 appendix A).
    """
    if mechanism == "ANONYMOUS":
        return authenticator.anonymous()
    if mechanism == "EXTERNAL":
        identity = authenticator.identify_certificate(certificate)
        if identity is None or (response and response != identity.name.encode()):
            return None
        return identity
    if mechanism == "PLAIN":
        parts = (response or b"").split(b"\0")
        if len(parts) != 3:
            return None
        authorization, user, password = parts
        if authorization not in (b"", user):
            return None
        try:
            name = user.decode()
        except UnicodeDecodeError:
            return None
        return await authenticator.authenticate_password(name, password, peer=peer)
    return None
