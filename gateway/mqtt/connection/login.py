"""Authentication of MQTT clients: password, certificate, anonymous, or AUTH packets (section 4.12)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gateway.security.entrance import Entrance
from gateway.security.expiry import Expiry
from gateway.security.identity import Identity
from gateway.security.login.authentication import Exchange
from gateway.security.login.exchange import Continue, Done, Failed
from protocols.mqtt.connection import Connection
from protocols.mqtt.packets import Auth, Connect
from protocols.mqtt.properties import Properties
from protocols.mqtt.reasons import ReasonCode


async def identify(
    entrance: Entrance, connect: Connect, *, peer: str, certificate: Mapping[str, Any] | None
) -> Identity | None:
    """Authenticate a CONNECT without an authentication method; a refusal is delayed on purpose.

    A certificate (`SSLObject.getpeercert`) counts only if neither user name nor password was sent.

    Returns:
        None if the client is refused; `login_refusal` has the reason code.

    Raises:
        Busy: see `Authenticator.authenticate_password`.
    """
    if connect.username is not None or connect.password is not None:
        return await entrance.authenticate_password(
            connect.username or "", connect.password or b"", peer=peer, client_id=connect.client_id
        )
    identity = entrance.identify_certificate(certificate)
    return identity if identity is not None else entrance.anonymous()


def login_refusal(connect: Connect) -> tuple[ReasonCode, str]:
    """Return CONNACK's reason code and reason string for a CONNECT that `identify` refused."""
    if connect.username is None and connect.password is None:
        return ReasonCode.NOT_AUTHORIZED, "authentication required"
    return ReasonCode.BAD_USER_NAME_OR_PASSWORD, "user name or password is wrong"


class EnhancedAuthentication:
    """The enhanced authentication of one connection, at CONNECT and at every re-authentication.

    Sends AUTH, and disconnects when authentication fails or when a token expires without a newer one. During
    re-authentication the connection keeps its identity (section 4.12.1). Re-authentication as another user is refused,
    because the session, its subscriptions and its in-flight messages belong to the first user.

    The method alone determines the identity: CONNECT's user name and password and the certificate are ignored.
    """

    __slots__ = ("_connection", "_disconnect", "_entrance", "_exchange", "_expiry", "_method", "_peer", "_user")

    def __init__(
        self,
        entrance: Entrance,
        connection: Connection,
        exchange: Exchange,
        *,
        method: str,
        peer: str,
        disconnect: Callable[[ReasonCode, str], None],
        wall_clock: Callable[[], int],
    ) -> None:
        """`exchange` is the first one. `disconnect` ends the connection, with CONNACK if it is not open yet."""
        self._entrance = entrance
        self._connection = connection
        self._method = method
        self._peer = peer
        self._exchange: Exchange | None = exchange
        self._disconnect = disconnect
        self._expiry = Expiry(wall_clock, self._expired)
        self._user: str | None = None

    def end(self) -> None:
        """Cancel the expiry timer; the connection has ended."""
        self._expiry.set(None)

    async def receive(self, auth: Auth) -> Done | Failed | None:
        """Process an AUTH packet of the client, which came in its turn (`protocols.mqtt.checks.check_auth`).

        Returns:
            Like `step`. On an open connection AUTH with success was sent too, and the identity is the same as before.
        """
        if auth.reason_code == ReasonCode.RE_AUTHENTICATE:
            self._exchange = self._entrance.exchange(self._method, peer=self._peer, user=self._user)
            if self._exchange is None:  # the method was removed from the configuration
                return self._fail(Failed("the method is no longer supported"))
        return await self.step(auth.properties.authentication_data if auth.properties is not None else None)

    def properties(self, data: bytes) -> Properties:
        """Return properties with the method [MQTT-4.12.0-5] and the data, if there is any."""
        return Properties(authentication_method=self._method, authentication_data=data or None)

    async def step(self, data: bytes | None) -> Done | Failed | None:
        """Process Authentication Data, the first time CONNECT's.

        Returns:
            Done with the identity; the caller sends CONNACK with `properties`. Failed if the client was refused; the
            refusal was sent, delayed on purpose. None if AUTH was sent and the client must answer.
        """
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
        """Refuse the client and close; the reason is not sent, since it would help an attacker."""
        if failed.busy:
            self._disconnect(ReasonCode.SERVER_BUSY, failed.reason)
        elif self._connection.is_open:
            self._disconnect(ReasonCode.NOT_AUTHORIZED, "re-authentication failed")  # [MQTT-4.12.1-2]
        else:
            self._disconnect(ReasonCode.NOT_AUTHORIZED, "authentication failed")  # [MQTT-4.12.0-4]
        return failed

    def _expired(self) -> None:
        """Disconnect, because the client's token has expired and it has not sent a newer one."""
        if not self._connection.closing:
            self._disconnect(ReasonCode.NOT_AUTHORIZED, "the token has expired")
