"""AMQP's login: the SASL mechanisms that the listener offers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.security.entrance import Entrance
from gateway.security.fair_queue import Busy
from gateway.security.identity import Identity
from gateway.security.login.authentication import Exchange
from gateway.security.login.exchange import Continue, Done, Failed
from mapping.record import text_of
from protocols.amqp.events import SaslInitReceived, SaslResponseReceived


class AmqpLogin:
    """One SASL exchange. SCRAM takes several steps, every other mechanism one."""

    __slots__ = ("_certificate", "_entrance", "_exchange", "_peer", "name")

    def __init__(self, entrance: Entrance, *, peer: str, certificate: Mapping[str, Any] | None) -> None:
        """`certificate` is the client's verified certificate, as `SSLObject.getpeercert()` returns it."""
        self._entrance = entrance
        self._peer = peer
        self._certificate = certificate
        self._exchange: Exchange | None = None
        self.name = ""  # the user name that PLAIN claims, for the audit trail; "" with other mechanisms

    async def step(self, event: SaslInitReceived | SaslResponseReceived) -> Continue | Done | Failed:
        """Process the peer's initial response or response; return a challenge or the result."""
        if isinstance(event, SaslInitReceived):
            self._exchange = self._entrance.exchange(event.mechanism, peer=self._peer)
            if self._exchange is None:
                try:
                    identity = await self._authenticate(event.mechanism, event.response)
                except Busy as busy:
                    return Failed(str(busy), busy=True)
                return Failed(f"{event.mechanism} authentication failed") if identity is None else Done(identity, b"")
        if self._exchange is None:
            return Failed("a response before an init")
        return await self._exchange.step(event.response)

    async def _authenticate(self, mechanism: str, response: bytes | None) -> Identity | None:
        """Authenticate with a mechanism of one message; return the identity, or None when the login is refused.

        Acting for another user is not supported: an authorization identity that differs from the authenticated one is
        refused (RFC 4616 part 2, RFC 4422 appendix A).
        """
        entrance = self._entrance
        if mechanism == "ANONYMOUS":
            return entrance.anonymous()
        if mechanism == "EXTERNAL":
            identity = entrance.identify_certificate(self._certificate)
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
            name = text_of(user)
            if name is None:
                return None
            self.name = name
            return await entrance.authenticate_password(name, password, peer=self._peer)
        return None
