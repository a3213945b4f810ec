"""The fifteen packets of MQTT as frozen structs; `decoding` and `encoding` convert them from and to bytes."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from protocols.mqtt.properties import Properties


class Version(enum.IntEnum):
    """The protocol level of CONNECT (section 3.1.2.2)."""

    V31 = 3
    V311 = 4
    V5 = 5


UpTo2 = Annotated[int, msgspec.Meta(ge=0, le=2)]
"""A QoS or Retain Handling; msgspec checks the range when it decodes a stored will or subscription."""


class Will(msgspec.Struct, frozen=True, gc=False):
    """The message that the server publishes when the connection ends without DISCONNECT (section 3.1.2.5)."""

    topic: str
    payload: bytes
    qos: UpTo2 = 0
    retain: bool = False
    properties: Properties | None = None


class Connect(msgspec.Struct, frozen=True, gc=False):
    """CONNECT (section 3.1). `client_id` is empty if the server must assign one.

    `bridge`: the client is another broker's bridge, by the mark in its protocol level.
    """

    version: Version
    client_id: str
    clean_start: bool = True
    keep_alive: int = 0
    username: str | None = None
    password: bytes | None = None
    will: Will | None = None
    properties: Properties | None = None
    bridge: bool = False


class Connack(msgspec.Struct, frozen=True, gc=False):
    """CONNACK (section 3.2). In 3.1.1 the reason code is one of `ReturnCode`."""

    session_present: bool = False
    reason_code: int = 0
    properties: Properties | None = None


class Publish(msgspec.Struct, frozen=True, gc=False):
    """PUBLISH (section 3.3). `packet_id` is 0 at QoS 0; `properties` is None without properties."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    dup: bool = False
    packet_id: int = 0
    properties: Properties | None = None


class Acknowledgement(msgspec.Struct, frozen=True, gc=False):
    """A packet that continues or ends the exchange of a message."""

    packet_id: int
    reason_code: int = 0
    properties: Properties | None = None


class Puback(Acknowledgement, frozen=True, gc=False):
    """PUBACK (section 3.4)."""


class Pubrec(Acknowledgement, frozen=True, gc=False):
    """PUBREC (section 3.5)."""


class Pubrel(Acknowledgement, frozen=True, gc=False):
    """PUBREL (section 3.6)."""


class Pubcomp(Acknowledgement, frozen=True, gc=False):
    """PUBCOMP (section 3.7)."""


class Subscription(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One topic filter of a SUBSCRIBE with its options (section 3.8.3.1)."""

    topic_filter: str
    qos: UpTo2 = 0
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: UpTo2 = 0


class Subscribe(msgspec.Struct, frozen=True, gc=False):
    """SUBSCRIBE (section 3.8)."""

    packet_id: int
    subscriptions: tuple[Subscription, ...]
    properties: Properties | None = None


class Suback(msgspec.Struct, frozen=True, gc=False):
    """SUBACK (section 3.9), with one reason code per topic filter, in order."""

    packet_id: int
    reason_codes: tuple[int, ...]
    properties: Properties | None = None


class Unsubscribe(msgspec.Struct, frozen=True, gc=False):
    """UNSUBSCRIBE (section 3.10)."""

    packet_id: int
    topic_filters: tuple[str, ...]
    properties: Properties | None = None


class Unsuback(msgspec.Struct, frozen=True, gc=False):
    """UNSUBACK (section 3.11); 3.1.1 has no reason codes in it."""

    packet_id: int
    reason_codes: tuple[int, ...] = ()
    properties: Properties | None = None


class Pingreq(msgspec.Struct, frozen=True, gc=False):
    """PINGREQ (section 3.12)."""


class Pingresp(msgspec.Struct, frozen=True, gc=False):
    """PINGRESP (section 3.13)."""


class Disconnect(msgspec.Struct, frozen=True, gc=False):
    """DISCONNECT (section 3.14); 3.1.1 has neither code nor properties."""

    reason_code: int = 0
    properties: Properties | None = None


class Auth(msgspec.Struct, frozen=True, gc=False):
    """AUTH (section 3.15), MQTT 5.0 only."""

    reason_code: int = 0
    properties: Properties | None = None


Packet = (
    Connect
    | Connack
    | Publish
    | Puback
    | Pubrec
    | Pubrel
    | Pubcomp
    | Subscribe
    | Suback
    | Unsubscribe
    | Unsuback
    | Pingreq
    | Pingresp
    | Disconnect
    | Auth
)
