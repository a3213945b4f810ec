"""The presence of HTTP clients: of consumers by their `identifier`, of event streams and WebSockets by principal."""

from __future__ import annotations

from gateway.presence.records import CLIENT, DRAIN, HTTP, SERVER, TIMEOUT, Ended

BY_CLIENT = Ended(CLIENT)
STOPPED = Ended(DRAIN, text="the gateway is stopping")
ABANDONED = Ended(TIMEOUT, text="the consumer was not used")
BY_SERVER = Ended(SERVER)


def stream_key(name: str) -> str:
    """Return the key of an event stream or a WebSocket; `name` is the principal's name, unique across tenants."""
    return f"{HTTP}/stream/{name}"
