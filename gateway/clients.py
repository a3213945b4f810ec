"""What a client tells of itself to operators, and how they close it: one list over the three protocols.

A client's id is `<protocol>/<its name>`, and unambiguous: an MQTT client id; a container id of AMQP, which several
connections may have, and the connection's address behind `@`; of HTTP the connection's address, or a consumer's group
and name behind `consumer/`. Nothing is kept for it: connections are asked when somebody looks
(`gateway.observe.clients`).
"""

from __future__ import annotations

from typing import Any, Final, Literal, Protocol

import msgspec

from gateway.flow import ConnectionFlow

Kind = Literal["connection", "stream", "websocket", "consumer", "session"]
"""A session is an MQTT client without a connection."""
ProtocolName = Literal["mqtt", "amqp", "http"]

PROTOCOLS: Final = ("mqtt", "amqp", "http")
SUBSCRIPTIONS: Final = 100  # of a client that are told
CLOSED: Final = "closed by an operator"


def is_meant(wanted: str, identifier: str) -> bool:
    """Whether an id, or a container id of AMQP without an address, may mean a client."""
    return identifier == wanted or (wanted.startswith("amqp/") and identifier.rpartition("@")[0] == wanted)


class SubscriptionView(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a client receives: a filter of MQTT, a link of AMQP, a topic of an HTTP consumer."""

    name: str  # the filter, the link's or the topic's name
    qos: int | None = None  # of MQTT
    topic: str = ""  # in Kafka, where the name does not say it
    to_kafka: bool = False  # the other way: a link on which the client sends


class SessionView(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An MQTT session."""

    kept: bool  # whether it outlives its connection
    expiry_s: int | None = None  # how long without one; None: it does not expire
    gone_at: float | None = None  # epoch seconds of the end of its connection; None while there is one
    gateway: str = ""  # that has it
    in_flight: int = 0  # deliveries that the client has not acknowledged to the end
    lag: int | None = None  # records that it was not offered yet, of topics that were there; None: not known


class ClientView(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A client; the list has the first six fields."""

    id: str
    protocol: ProtocolName
    kind: Kind
    principal: str  # who has logged in
    address: str = ""  # the peer's, `host:port`; "" for one that is not connected, and for a consumer
    since: float | None = None  # epoch seconds: connected, or made, since then; None: not connected
    version: str = ""  # of the protocol
    flow: ConnectionFlow | None = None  # what is granted, on the way and paused
    subscriptions: list[SubscriptionView] = []
    subscriptions_total: int = 0
    session: SessionView | None = None


class Connected(Protocol):
    """A client that can be asked and closed; the handler of a pump is one."""

    @property
    def identifier(self) -> str:
        """Its id; "" before it has logged in, and once it has been told to go."""
        ...

    @property
    def principal(self) -> str | None:
        """Who has logged in."""
        ...

    @property
    def subject(self) -> str:
        """What its pauses are told of."""
        ...

    @property
    def socket(self) -> Any:
        """What its bytes go through, for a trace (`gateway.trace.wrap`); None: it has no connection of its own."""
        ...

    def view(self, *, whole: bool) -> ClientView:
        """What it tells; `whole`: also what only somebody wants to know who looks at it alone."""
        ...

    def kick(self) -> None:
        """Close it, in its protocol's words for an administrator's action."""
        ...
