"""A listener as its connections see it: its name, its login methods, and the tenant that a login gives.

A connection that becomes a WebSocket keeps its entrance. Per-listener rules, such as limits, take the listener's name
from here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from gateway.security.identity import ANONYMOUS, Identity, common_name, is_principal
from gateway.security.login.authentication import Authenticator, Exchange
from gateway.security.login.bearer import MECHANISMS as BEARER_MECHANISMS
from gateway.security.login.tokens import VerifiedToken
from gateway.security.tenancy import AssignTenant
from gateway.settings.values import LoginMethod


class Entrance:
    """One listener's entrance. It restricts the login methods; the process's `Authenticator` checks the logins."""

    __slots__ = ("_authenticator", "_logins", "assign_tenant", "connections", "name")

    def __init__(
        self, name: str, authenticator: Authenticator, logins: Collection[LoginMethod], assign_tenant: AssignTenant
    ) -> None:
        """`name` is the listener's name, `logins` are the configured login methods that it accepts."""
        self.name = name
        self.assign_tenant = assign_tenant  # for clients that have logged in
        self.connections = 0  # open, after PROXY header and TLS; the socket's current owner counts down when it closes
        self._authenticator = authenticator
        self._logins = frozenset(logins)

    # what the listener offers

    @property
    def takes_tokens(self) -> bool:
        """Whether bearer tokens are accepted here."""
        return "token" in self._logins

    @property
    def needs_explicit_login(self) -> bool:
        """Whether neither anonymous nor certificate logins (which a browser does by itself) are accepted."""
        return self._logins.isdisjoint(("anonymous", "certificate"))

    def offers(self, *, certificate: bool = False) -> tuple[str, ...]:
        """Return the SASL mechanisms to announce, best first. `certificate`: the client has a verified certificate."""
        of_method = (
            ("certificate", ("EXTERNAL",) if certificate else ()),
            ("scram", self._authenticator.scram_mechanisms),
            ("token", BEARER_MECHANISMS),
            ("password", ("PLAIN",)),
            ("anonymous", ("ANONYMOUS",)),
        )
        return tuple(name for method, names in of_method if method in self._logins for name in names)

    # logins

    def anonymous(self) -> Identity | None:
        """Return the identity of a client without credentials, or None if it must log in."""
        return ANONYMOUS if "anonymous" in self._logins else None

    def identify_certificate(self, peercert: Mapping[str, Any] | None) -> Identity | None:
        """Return the identity in a verified certificate: its common name, else its first alternative name.

        `peercert` is `SSLObject.getpeercert()` from our own context, which returns content only after verification.
        Returns None if there is no certificate, no usable name in it, or no login by certificate here.
        """
        if not peercert or "certificate" not in self._logins:
            return None
        name = common_name(peercert)
        if name is None:
            alternatives = peercert.get("subjectAltName", ())
            name = next((value for kind, value in alternatives if kind in ("DNS", "email", "URI")), "")
        return Identity(name, "certificate") if is_principal(name) else None

    async def authenticate_password(
        self, user: str, password: bytes | str, *, peer: str, client_id: str = ""
    ) -> Identity | None:
        """Check a name and a password; see `Authenticator`. Without password logins the client is anonymous."""
        if "password" not in self._logins:
            return self.anonymous()
        return await self._authenticator.authenticate_password(user, password, peer=peer, client_id=client_id)

    def cached_password(self, user: str, password: bytes | str) -> Identity | None:
        """Like `authenticate_password`, but only from memory. Returns None if a lookup is needed or the login fails."""
        if "password" not in self._logins:
            return self.anonymous()
        return self._authenticator.cached_password(user, password)

    async def authenticate_token(self, token: str, *, peer: str) -> VerifiedToken | None:
        """Check a bearer token; see `Authenticator`."""
        return await self._authenticator.authenticate_token(token, peer=peer) if "token" in self._logins else None

    def cached_token(self, token: str) -> VerifiedToken | None:
        """Like `authenticate_token`, but only from memory. Returns None if a lookup is needed or the login fails."""
        return self._authenticator.cached_token(token) if "token" in self._logins else None

    def exchange(self, mechanism: str, *, peer: str, user: str | None = None) -> Exchange | None:
        """Start a SASL exchange; returns None if the mechanism is not offered here."""
        method = "token" if mechanism in BEARER_MECHANISMS else "scram"
        return self._authenticator.exchange(mechanism, peer=peer, user=user) if method in self._logins else None
