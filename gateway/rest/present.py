"""The presence of HTTP clients: of consumers by their `identifier`, of event streams and WebSockets by principal."""

from __future__ import annotations

from gateway.views.presence import HTTP, Ended

BY_CLIENT = Ended("client")
STOPPED = Ended("drain", text="the gateway is stopping")
ABANDONED = Ended("timeout", text="the consumer was not used")
BY_SERVER = Ended("server")


def stream_key(name: str) -> str:
    """Return the key of an event stream or a WebSocket; `name` is the principal's name, unique across tenants."""
    return f"{HTTP}/stream/{name}"
