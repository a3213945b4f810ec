"""The view of clients for operators: one form for the three protocols.

A client's id is `<protocol>/<name>` and unique. The name is an MQTT client id; an AMQP container id, which several
connections may share, followed by `@` and the connection's address; an HTTP connection's address; or `consumer/`
followed by an HTTP consumer's group and name. No list is stored: connections are asked on request
(`gateway.observe.clients`).
"""

from __future__ import annotations

from typing import Any, Final, Literal, Protocol

import msgspec

from gateway.views.flow import ConnectionFlow

Kind = Literal["connection", "stream", "websocket", "consumer", "session"]
"""`session` is an MQTT session without a connection."""
ProtocolName = Literal["mqtt", "amqp", "http"]

PROTOCOLS: Final = ("mqtt", "amqp", "http")
SUBSCRIPTIONS: Final = 100  # subscriptions shown per client
CLOSED: Final = "closed by an operator"
CONNECTION_LOG: Final = "gateway.connections"
"""The logger of lines about single connections, which `log.connections` silences."""


def matches_id(wanted: str, identifier: str) -> bool:
    """Return whether `wanted`, an id or an AMQP container id without an address, matches a client's id."""
    return identifier == wanted or (wanted.startswith("amqp/") and identifier.rpartition("@")[0] == wanted)


class SubscriptionView(msgspec.Struct, frozen=True, omit_defaults=True):
    """A subscription: an MQTT filter, an AMQP link, or a topic of an HTTP consumer."""

    name: str  # the filter, or the name of the link or topic
    qos: int | None = None  # of MQTT
    topic: str = ""  # the Kafka topic, if it differs from the name
    to_kafka: bool = False  # True for a link on which the client sends


class SessionView(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An MQTT session (wire format)."""

    kept: bool  # whether it outlives its connection
    expiry_s: int | None = None  # expiry after the connection's end; None: never
    gone_at: float | None = None  # epoch seconds of the end of its connection; None while there is one
    gateway: str = ""  # the gateway that owns it
    in_flight: int = 0  # deliveries without a final acknowledgement
    lag: int | None = None  # stored records not offered to it yet; None: unknown


class ClientView(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A client (wire format). The list contains the first six fields."""

    id: str
    protocol: ProtocolName
    kind: Kind
    principal: str  # the authenticated name
    address: str = ""  # `host:port`; "" for a consumer and without a connection
    since: float | None = None  # epoch seconds of connecting or creation; None: not connected
    version: str = ""  # protocol version
    flow: ConnectionFlow | None = None  # granted, in flight and paused
    subscriptions: list[SubscriptionView] = []
    subscriptions_total: int = 0
    session: SessionView | None = None


class Connected(Protocol):
    """A client that can be inspected and closed, such as a pump's handler."""

    @property
    def identifier(self) -> str:
        """The client's id; "" before the login and after `kick`."""
        ...

    @property
    def principal(self) -> str | None:
        """The authenticated name."""
        ...

    @property
    def subject(self) -> str:
        """The client's name in `gateway.views.pauses`."""
        ...

    @property
    def socket(self) -> Any:
        """The pump or HTTP connection, for a trace (`gateway.trace.tapped`); None without its own connection."""
        ...

    def view(self, *, whole: bool) -> ClientView:
        """Return the client's view; `whole` adds the details that the list does not show."""
        ...

    def kick(self) -> None:
        """Close the client with its protocol's reason for an administrative action."""
        ...
