"""Who an HTTP client is and what it may do: Basic (RFC 7617), client certificates, anonymous."""

from __future__ import annotations

import base64
import binascii
from typing import Final

from aiohttp import web

from gateway.security.authentication import Authenticator
from gateway.security.authorization import AccessList, Grant
from gateway.security.identity import Identity
from protocols.rest.errors import RestError

CHALLENGE: Final = (("WWW-Authenticate", 'Basic realm="trivium", charset="UTF-8"'),)
_SCHEME: Final = "basic "


class Access:
    """Turns a request into a grant."""

    def __init__(self, authenticator: Authenticator, access_list: AccessList) -> None:
        """Both are shared with the other protocols."""
        self._authenticator = authenticator
        self._access_list = access_list

    async def grant(self, request: web.BaseRequest) -> Grant:
        """The rights of the client behind `request`.

        A name and password in the request go before the connection's certificate.

        Raises:
            RestError: 401 with the challenge; late, for a wrong password.
        """
        credentials = request.headers.get("Authorization")
        identity: Identity | None = None
        if credentials is not None:
            user, password = _basic(credentials)
            identity = await self._authenticator.authenticate_password(user, password, peer=peer_of(request))
            if identity is None:
                raise _unauthorized("Wrong name or password")
        else:
            transport = request.transport
            if request.secure and transport is not None:
                identity = self._authenticator.identify_certificate(transport.get_extra_info("peercert"))
            identity = identity or self._authenticator.anonymous()
            if identity is None:
                raise _unauthorized("Authentication is needed")
        return self._access_list.for_identity(identity)


def peer_of(request: web.BaseRequest) -> str:
    """The client's `host:port`."""
    transport = request.transport
    peer = None if transport is None else transport.get_extra_info("peername")
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else ""


def forbidden(what: str) -> RestError:
    """403 for what the access list does not allow."""
    return RestError(403, f"Not allowed: {what}")


def _basic(credentials: str) -> tuple[str, str]:
    if credentials[: len(_SCHEME)].lower() != _SCHEME:
        raise _unauthorized("Only Basic authentication is served")
    try:
        decoded = base64.b64decode(credentials[len(_SCHEME) :].strip(), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError) as error:
        raise _unauthorized("The credentials are not readable") from error
    user, colon, password = decoded.partition(":")
    if not colon:
        raise _unauthorized("The credentials are not readable")
    return user, password


def _unauthorized(message: str) -> RestError:
    return RestError(401, message, headers=CHALLENGE)
