"""Writes HTTP logins, refusals and administrative changes to the audit trail."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from gateway.net.http.http_server import HttpConnection
from gateway.net.pump import Pump
from gateway.runtime.audited import audit, where_of
from gateway.security.identity import Identity
from gateway.security.login.credentials import name_and_password
from gateway.security.rights.authorization import Grant
from protocols.rest.errors import RestError

UNAUTHORIZED: Final = 401
FORBIDDEN: Final = 403
NOT_ALLOWED: Final = "Not allowed: "
WORDS: Final = (("publish to ", "publish"), ("read ", "subscribe"), ("subscribe to ", "subscribe"))
"""How our error texts begin, and the action's name in the audit trail for all protocols."""


def audit_login(connection: HttpConnection, identity: Identity) -> None:
    """Write the login of a client that the connection's last request did not come from."""
    if audit.enabled and (connection.client is None or connection.client.grant.identity != identity):
        audit.accepted(where_of("http", connection), identity.name, identity.method)


def audit_refusal(connection: HttpConnection, request: web.BaseRequest, grant: Grant | None, error: RestError) -> None:
    """Write a request that is answered with 401 or 403; `grant` is the client's, None before the login."""
    if error.status == UNAUTHORIZED and grant is None:
        if not audit.enabled:
            return
        scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
        named = name_and_password(credentials) if scheme.lower() == "basic" else None
        if scheme:  # browsers first try without credentials: that is no failed login
            audit.refused(where_of("http", connection), error.message, name=named[0] if named else "")
    elif error.status == FORBIDDEN:
        audit_denied(connection, grant, error.message)


def audit_denied(connection: HttpConnection | Pump, grant: Grant | None, reason: str) -> None:
    """Write that a client was denied an action; `reason` is the error text that it gets."""
    if audit.enabled:
        wanted = reason.removeprefix(NOT_ALLOWED)
        begin, what = next((words for words in WORDS if wanted.startswith(words[0])), (wanted, "admin"))
        on = wanted.removeprefix(begin).partition(" ")[0]  # topic names have no spaces
        audit.denied(where_of("http", connection), grant.identity.name if grant else "", what, on, reason)


def audit_change(connection: HttpConnection, grant: Grant, what: str, on: str) -> None:
    """Write a change by an administrator."""
    if audit.enabled:
        audit.act(where_of("http", connection), grant.identity.name, what, on)
