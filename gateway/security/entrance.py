"""A listener as its connections know it: its name, how clients may log in there, and whose they are then.

A connection that becomes a WebSocket keeps the entrance that it came through. Rules that are about a listener, such as
limits, find its name here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from gateway.security.authentication import Authenticator
from gateway.security.bearer import MECHANISMS as BEARER_MECHANISMS
from gateway.security.exchange import Exchange
from gateway.security.identity import Identity
from gateway.security.tenants import Place
from gateway.security.tokens import Shown
from gateway.settings.values import LoginMethod

_METHODS: Final[dict[str, LoginMethod]] = {
    "EXTERNAL": "certificate",
    "PLAIN": "password",
    "ANONYMOUS": "anonymous",
    **dict.fromkeys(BEARER_MECHANISMS, "token"),
}
"""What a SASL mechanism is; every other one is SCRAM's."""


class Entrance:
    """One listener's; what it lets in, the process's `Authenticator` judges."""

    __slots__ = ("_authenticator", "_logins", "connections", "name", "place")

    def __init__(self, name: str, authenticator: Authenticator, logins: Collection[LoginMethod], place: Place) -> None:
        """`name`: the listener's; `logins`: the ways to log in that it takes, as far as they are configured.

        `place` finds the tenants of those who have logged in.
        """
        self.name = name
        self.place = place
        self.connections = 0  # open now, behind PROXY header and TLS; whoever has a socket when it is lost counts down
        self._authenticator = authenticator
        self._logins = frozenset(logins)

    # what is on offer; see `Authenticator`

    @property
    def takes_tokens(self) -> bool:
        """Whether a bearer token means anything here."""
        return "token" in self._logins and self._authenticator.takes_tokens

    @property
    def asks_for_more(self) -> bool:
        """Whether nobody comes in who shows nothing, or what a browser shows by itself: a certificate."""
        return self._logins.isdisjoint(("anonymous", "certificate"))

    def offers(self, *, certificate: bool = False) -> tuple[str, ...]:
        """The SASL mechanisms to announce, best first; `certificate`: the client showed a verified one."""
        offered = self._authenticator.offers(certificate=certificate)
        return tuple(one for one in offered if _METHODS.get(one, "scram") in self._logins)

    # who is it

    def anonymous(self) -> Identity | None:
        """The identity of a client that says nothing about itself; None: it must."""
        return self._authenticator.anonymous() if "anonymous" in self._logins else None

    def identify_certificate(self, peercert: Mapping[str, Any] | None) -> Identity | None:
        """The identity in a verified certificate, as of `SSLObject.getpeercert`; None: in none."""
        return self._authenticator.identify_certificate(peercert) if "certificate" in self._logins else None

    async def authenticate_password(
        self, user: str, password: bytes | str, *, peer: str, client_id: str = ""
    ) -> Identity | None:
        """Check a name and a password; see `Authenticator`. Where none is taken, a client may be anonymous at best."""
        if "password" not in self._logins:
            return self.anonymous()
        return await self._authenticator.authenticate_password(user, password, peer=peer, client_id=client_id)

    def known_password(self, user: str, password: bytes | str) -> Identity | None:
        """As `authenticate_password`, as far as that need ask nobody; None: it must, or it refuses."""
        if "password" not in self._logins:
            return self.anonymous()
        return self._authenticator.known_password(user, password)

    async def authenticate_token(self, token: str, *, peer: str) -> Shown | None:
        """Check a bearer token; see `Authenticator`."""
        return await self._authenticator.authenticate_token(token, peer=peer) if "token" in self._logins else None

    def known_token(self, token: str, *, peer: str) -> Shown | None:
        """As `authenticate_token`, as far as that need ask nobody; None: it must, or it refuses."""
        return self._authenticator.known_token(token, peer=peer) if "token" in self._logins else None

    def exchange(self, mechanism: str, *, peer: str, user: str | None = None) -> Exchange | None:
        """Begin an exchange of messages that proves who a client is; None: the mechanism is not offered."""
        if _METHODS.get(mechanism, "scram") not in self._logins:
            return None
        return self._authenticator.exchange(mechanism, peer=peer, user=user)
