"""Authenticates HTTP clients (Basic, RFC 7617; Bearer, RFC 6750; certificates; anonymous) and looks up their rights."""

from __future__ import annotations

from typing import Final, cast

from aiohttp import web

from gateway.net.http.http_requests import AuthenticatedClient
from gateway.net.http.http_server import HttpConnection
from gateway.security.fair_queue import Busy, Unavailable
from gateway.security.identity import Identity, share_of
from gateway.security.login.credentials import name_and_password
from gateway.security.origins import Origins
from gateway.security.rights.authorization import AccessList
from gateway.security.tenancy import NoTenantError, without_tenant
from protocols.rest.errors import RestError, busy

BASIC_CHALLENGE: Final = 'Basic realm="trivium", charset="UTF-8"'
BEARER_CHALLENGE: Final = 'Bearer realm="trivium"'
FAULT: Final = ', error="invalid_token"'  # RFC 6750 part 3.1
TOKEN_PARAMETER: Final = "access_token"  # noqa: S105 - its name


class RequestLogin:
    """Authenticates the client of a request, or refuses it: 401 for its login, 403 for its page's origin."""

    def __init__(self, access_list: AccessList, origins: Origins) -> None:
        self._origins = origins
        self._access_list = access_list

    async def authenticate(self, request: web.BaseRequest, *, token_in_query: bool = False) -> AuthenticatedClient:
        """Authenticate the client of `request` and return its rights.

        A name and password or a token in the request take precedence over the connection's certificate. With
        `token_in_query` the parameter `access_token` is used if there is no Authorization field (RFC 6750 section 2.3);
        only for operations where a browser cannot set a field.

        Raises:
            RestError: 401 with the challenges, delayed for a wrong password or token; 403 for a web page of another
                site or for a client without a tenant; 503 if too many logins wait, or if the login needs Kafka and
                Kafka is not available.
        """
        fields = request.headers
        header = fields.get("Authorization")
        if not self._access_list.is_known:
            raise busy("Kafka's access rules are not loaded yet")
        if header is None and token_in_query and TOKEN_PARAMETER in request.raw_path:
            token = request.rel_url.query.get(TOKEN_PARAMETER)
            header = None if token is None else f"Bearer {token}"
        secure = request.secure
        # A web page must know a token to send it. Other credentials are sent by the browser itself.
        if (header is None or header[:7].lower() != "bearer ") and not self._origins.allow_request(
            request.raw_path, fields, secure=secure
        ):
            raise RestError(
                403, "Pages of other sites may not call; security.origins lists the allowed ones", close=True
            )
        connection = cast("HttpConnection", request.protocol)
        known = self.known(connection, header)
        if known is not None:
            return known
        if header is None:
            raise _unauthorized(connection, "Authentication is required")
        connection.login_pending()
        try:
            identity, expires_ms = await _by_credentials(connection, header)
        except Unavailable as away:
            raise busy(f"Logins are not possible now: {away}") from None
        except Busy as wait:
            raise busy(f"Logins are busy: {wait}") from None
        return self._admitted(connection, identity, expires_ms)

    def known(self, connection: HttpConnection, header: str | None) -> AuthenticatedClient | None:
        """Like `authenticate`, but answers only from memory; None if that is not enough. `header` is Authorization."""
        if not self._access_list.is_known:
            return None
        entrance = connection.entrance
        identity: Identity | None = None
        expires_ms = None
        if header is None:
            if connection.ssl_context is not None or connection.source is not None:
                identity = entrance.identify_certificate(connection.peercert)
            identity = identity or entrance.anonymous()
        else:
            scheme, _, credentials = header.partition(" ")
            scheme = scheme.lower()
            if scheme == "basic" and (named := name_and_password(credentials)) is not None:
                identity = entrance.cached_password(*named)
            elif scheme == "bearer":
                shown = entrance.cached_token(credentials.strip())
                if shown is not None:
                    identity, expires_ms = shown.identity, shown.expires_ms
        return None if identity is None else self._admitted(connection, identity, expires_ms)

    def _admitted(self, connection: HttpConnection, login: Identity, expires_ms: int | None) -> AuthenticatedClient:
        """Return the client with its rights; the one that the connection has if it is the same under the same rules."""
        access, assign_tenant, last = self._access_list, connection.entrance.assign_tenant, connection.client
        if (
            last is not None
            and last.login == login
            and last.rules is access.rulebook
            and last.expires_ms == expires_ms
            and assign_tenant is without_tenant  # others count their tenants' requests
        ):
            return last
        certificate = connection.peercert
        identity = login.with_certificate(certificate) if access.by_certificate else login
        try:
            identity = assign_tenant(identity, certificate)
        except NoTenantError as error:
            raise forbidden(str(error)) from None
        grant = access.for_client(identity, peer=connection.peer)
        return AuthenticatedClient(grant, expires_ms, share_of(identity, connection.address), login, access.rulebook)


async def _by_credentials(connection: HttpConnection, header: str) -> tuple[Identity, int | None]:
    """Authenticate by an Authorization field. Returns the identity and its expiry; RestError 401 if refused."""
    scheme, _, credentials = header.partition(" ")
    if scheme.lower() == "basic":
        return await _by_password(connection, credentials), None
    if scheme.lower() == "bearer" and connection.entrance.takes_tokens:
        shown = await connection.entrance.authenticate_token(credentials.strip(), peer=connection.peer)
        if shown is None:
            raise _unauthorized(connection, "The token is not accepted", FAULT)
        return shown.identity, shown.expires_ms
    raise _unauthorized(connection, "This authentication scheme is not supported")


async def _by_password(connection: HttpConnection, credentials: str) -> Identity:
    """Authenticate by Basic credentials; RestError 401 if refused."""
    named = name_and_password(credentials)
    if named is None:
        raise _unauthorized(connection, "The credentials are malformed")
    user, password = named
    identity = await connection.entrance.authenticate_password(user, password, peer=connection.peer)
    if identity is None:
        raise _unauthorized(connection, "Wrong name or password")
    return identity


def _unauthorized(connection: HttpConnection, message: str, fault: str = "") -> RestError:
    """Make a 401 with a challenge for each scheme; `fault` is added to the Bearer challenge."""
    challenges = [("WWW-Authenticate", BASIC_CHALLENGE)]
    if connection.entrance.takes_tokens:
        challenges.append(("WWW-Authenticate", BEARER_CHALLENGE + fault))
    return RestError(401, message, headers=tuple(challenges))


def forbidden(what: str) -> RestError:
    """Make a 403 for something that the access list does not allow."""
    return RestError(403, f"Not allowed: {what}")
