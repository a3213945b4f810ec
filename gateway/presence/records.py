"""What the presence topic says of a client: online since when and where, or offline and why.

A record's key is `PROTOCOL/NAME`. Of two records of a key the one with the higher epoch is right, of equals the later
in the log: an offline that comes late has the epoch of the connection that it ends, which is lower than that of the
next connection.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from mapping.record import CONTENT_TYPE, Headers

ONLINE: Final = "online"
OFFLINE: Final = "offline"

MQTT: Final = "mqtt"  # the name is the client id
AMQP: Final = "amqp"  # the container-id
HTTP: Final = "http"  # `consumer/GROUP/INSTANCE` of a consumer, `stream/PRINCIPAL` of event streams and WebSockets

CLIENT: Final = "client"
SERVER: Final = "server"
TIMEOUT: Final = "timeout"
TAKEOVER: Final = "takeover"
DEATH: Final = "death"
DRAIN: Final = "drain"

By = Literal["client", "server", "timeout", "takeover", "death", "drain"]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]  # what JSON keeps exactly
DESCRIPTION: Final[Headers] = ((CONTENT_TYPE, b"application/json"),)


class SessionKept(msgspec.Struct, frozen=True):
    """What outlives the connection of an MQTT client."""

    kept: bool = False
    expiry: Count = 0  # Session Expiry Interval in seconds


class Ended(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a client is offline."""

    by: By  # who ended its connection; `death`: its gateway is gone
    code: int | str | None = None  # the protocol's own: an MQTT reason code, an AMQP error condition; none was said
    text: str = ""


class PresenceRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a client."""

    state: Literal["online", "offline"]
    client: str  # the client id, container-id, consumer; of HTTP's streams the principal
    principal: str  # who has logged in
    protocol: Literal["mqtt", "amqp", "http"]
    address: str  # the client's, HOST:PORT
    gateway: str  # the process that has, or had, the connection: `id/incarnation`, as in a session's owner
    since: Count  # epoch milliseconds, by the clock of the gateway that wrote it
    epoch: Count  # counts the connections of the key, and what had to be said again
    session: SessionKept = SessionKept()
    reason: Ended | None = None  # of offline


_DECODER: Final = msgspec.json.Decoder(PresenceRecord)
encode = msgspec.json.encode


def decode(value: bytes) -> PresenceRecord | None:
    """Read a record; None for what is none of ours."""
    try:
        return _DECODER.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
