"""Who an MQTT client is: by password, by certificate, anonymous, or by an exchange of AUTH packets (section 4.12)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gateway.security.entrance import Entrance
from gateway.security.exchange import Done, Exchange, Failed
from gateway.security.expiry import Expiry
from gateway.security.identity import Identity
from gateway.security.scram import Continue
from protocols.mqtt.connection import Connection
from protocols.mqtt.packets import Auth, Connect
from protocols.mqtt.properties import Properties
from protocols.mqtt.reasons import ReasonCode


class Login:
    """What tells clients apart; one for all connections."""

    def __init__(self, wall_clock: Callable[[], int]) -> None:
        """`wall_clock`: epoch milliseconds."""
        self._wall_clock = wall_clock

    @staticmethod
    async def identify(
        entrance: Entrance, connect: Connect, *, peer: str, certificate: Mapping[str, Any] | None
    ) -> Identity | None:
        """Judge a CONNECT without an authentication method; a refusal comes late by intention.

        A user name or a password is believed or refused; a certificate (`SSLObject.getpeercert`) counts only where
        neither was sent.

        Returns:
            None: refused; `refusal` says how.

        Raises:
            Busy: see `Authenticator.authenticate_password`.
        """
        if connect.username is not None or connect.password is not None:
            return await entrance.authenticate_password(
                connect.username or "", connect.password or b"", peer=peer, client_id=connect.client_id
            )
        identity = entrance.identify_certificate(certificate)
        return identity if identity is not None else entrance.anonymous()

    @staticmethod
    def refusal(connect: Connect) -> tuple[ReasonCode, str]:
        """CONNACK's reason code and reason string for a CONNECT that `identify` refused."""
        if connect.username is None and connect.password is None:
            return ReasonCode.NOT_AUTHORIZED, "authentication is needed"
        return ReasonCode.BAD_USER_NAME_OR_PASSWORD, "user name or password is wrong"

    def dialogue(
        self, entrance: Entrance, connection: Connection, method: str, *, peer: str, flush: Callable[[], None]
    ) -> Dialogue | None:
        """Begin enhanced authentication of a client that named a method in CONNECT.

        CONNECT's user name, its password and the certificate have no meaning beside a method: who the client is, the
        method says. `flush` is called when something is to be written that nobody waited for.

        Returns:
            None: the method is not served; that is CONNACK 0x8C [MQTT-4.12.0-1].
        """
        exchange = entrance.exchange(method, peer=peer)
        if exchange is None:
            return None
        return Dialogue(
            entrance,
            connection,
            exchange,
            method=method,
            peer=peer,
            flush=flush,
            wall_clock=self._wall_clock,
        )


class Dialogue:
    """The enhanced authentication of one connection, from CONNECT on and at every re-authentication.

    It sends AUTH, and DISCONNECT when that fails or when a token has expired without a newer one. During a
    re-authentication the connection goes on as who it was (section 4.12.1), and afterwards it is the same user:
    another one is refused, because its session, its subscriptions and its messages on the way belong to that user.
    """

    __slots__ = ("_connection", "_entrance", "_exchange", "_expiry", "_flush", "_method", "_peer", "_user")

    def __init__(
        self,
        entrance: Entrance,
        connection: Connection,
        exchange: Exchange,
        *,
        method: str,
        peer: str,
        flush: Callable[[], None],
        wall_clock: Callable[[], int],
    ) -> None:
        self._entrance = entrance
        self._connection = connection
        self._method = method
        self._peer = peer
        self._exchange: Exchange | None = exchange
        self._flush = flush
        self._expiry = Expiry(wall_clock, self._expired)
        self._user: str | None = None

    def end(self) -> None:
        """The connection is gone."""
        self._expiry.set(None)

    async def begin(self, data: bytes | None) -> Done | Failed | None:
        """Take CONNECT's Authentication Data.

        Returns:
            Done: who it is; CONNACK is due, with `properties`. Failed: the refusal was said, late by intention.
            None: AUTH asked for more.
        """
        return await self._step(data)

    async def receive(self, auth: Auth) -> Done | Failed | None:
        """Take an AUTH of the client.

        Returns:
            As `begin`. On an open connection success was said too, and changes nothing: it is the same identity.
        """
        connection = self._connection
        if auth.reason_code == ReasonCode.RE_AUTHENTICATE:
            if self._exchange is not None:
                connection.send_disconnect(ReasonCode.PROTOCOL_ERROR, "a re-authentication is under way already")
                return Failed("AUTH 0x19 amid an exchange")
            self._exchange = self._entrance.exchange(self._method, peer=self._peer, user=self._user)
            if self._exchange is None:  # the method was taken out of the configuration
                return self._fail(Failed("the method is no longer served"))
        elif self._exchange is None:
            connection.send_disconnect(ReasonCode.PROTOCOL_ERROR, "no authentication is under way")
            return Failed("AUTH 0x18 without an exchange")
        return await self._step(auth.properties.authentication_data if auth.properties is not None else None)

    def properties(self, data: bytes) -> Properties:
        """Name the method [MQTT-4.12.0-5], with data where there is some."""
        return Properties(authentication_method=self._method, authentication_data=data or None)

    async def _step(self, data: bytes | None) -> Done | Failed | None:
        assert self._exchange is not None
        step = await self._exchange.step(data)
        match step:
            case Continue(challenge):
                # [MQTT-4.12.0-2]
                self._connection.send_auth(ReasonCode.CONTINUE_AUTHENTICATION, self.properties(challenge))
                return None
            case Failed():
                return self._fail(step)
            case Done(identity, last_word, expires_ms):
                self._exchange = None
                self._user = identity.name
                self._expiry.set(expires_ms)
                if self._connection.is_open:
                    self._connection.send_auth(ReasonCode.SUCCESS, self.properties(last_word))
        return step

    def _fail(self, failed: Failed) -> Failed:
        """Say that it failed and close; why is not told, for it would help who guesses."""
        if failed.busy and self._connection.is_open:
            self._connection.send_disconnect(ReasonCode.SERVER_BUSY, failed.reason)
        elif failed.busy:
            self._connection.refuse(ReasonCode.SERVER_BUSY, failed.reason)
        elif self._connection.is_open:
            self._connection.send_disconnect(ReasonCode.NOT_AUTHORIZED, "re-authentication failed")  # [MQTT-4.12.1-2]
        else:
            self._connection.refuse(ReasonCode.NOT_AUTHORIZED, "authentication failed")  # [MQTT-4.12.0-4]
        return failed

    def _expired(self) -> None:
        """What the client has shown is no longer good, and it has not shown anything newer."""
        if self._connection.closing:
            return
        if self._connection.is_open:
            self._connection.send_disconnect(ReasonCode.NOT_AUTHORIZED, "the token has expired")
        else:
            self._connection.refuse(ReasonCode.NOT_AUTHORIZED, "the token has expired")
        self._flush()
