"""Checks of received packets beyond those of the codec and the state table.

Most enforce what CONNACK announced (section 3.2.2.3). A failed check raises `PeerError`.
"""

from __future__ import annotations

import msgspec

from protocols.errors import PeerError
from protocols.mqtt import packets, topics
from protocols.mqtt.properties import NONE, Properties
from protocols.mqtt.reasons import CLIENT_DISCONNECT_CODES, ReasonCode, malformed, protocol_error
from protocols.mqtt.states import Turn, publish_flags


def refused_flags(first: int, announced: Properties) -> PeerError:
    """Return the error for refused flags of a PUBLISH."""
    row = publish_flags()[first & 0x0F]
    if row is None:
        return malformed("wrong flags on PUBLISH")
    if row[1] and announced.retain_available == 0:
        return PeerError(ReasonCode.RETAIN_NOT_SUPPORTED, "retained messages are not available")  # [MQTT-3.2.2-14]
    return PeerError(ReasonCode.QOS_NOT_SUPPORTED, f"QoS {row[0]} is not available")  # [MQTT-3.2.2-11]


def resolve_topic(packet: packets.Publish, aliases: dict[int, str], topic_alias_maximum: int) -> str:
    """Return the topic of a PUBLISH; its topic alias is resolved (section 3.3.2.3.4).

    A new alias is added to `aliases`, the connection's map. `topic_alias_maximum` is the one in CONNACK.
    """
    properties = packet.properties or NONE
    if properties.subscription_identifiers:
        raise protocol_error("a subscription identifier from a client")  # [MQTT-3.3.4-6]
    topic, alias = packet.topic, properties.topic_alias
    if alias is None:
        return topic
    if alias > topic_alias_maximum:
        raise PeerError(ReasonCode.TOPIC_ALIAS_INVALID, f"topic alias {alias}")  # [MQTT-3.3.2-9]
    if topic:
        aliases[alias] = topic
        return topic
    known = aliases.get(alias)
    if known is None:
        raise protocol_error(f"topic alias {alias} is unknown")
    return known


def check_subscribe(packet: packets.Subscribe, announced: Properties) -> None:
    """Refuse features that CONNACK announced as not available (sections 3.2.2.3.11 to 3.2.2.3.13)."""
    identifiers = packet.properties is not None and packet.properties.subscription_identifiers
    if identifiers and announced.subscription_identifier_available == 0:
        raise PeerError(ReasonCode.SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED, "subscription identifiers are not available")
    for subscription in packet.subscriptions:
        if announced.shared_subscription_available == 0 and topics.is_shared(subscription.topic_filter):
            raise PeerError(ReasonCode.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED, "shared subscriptions are not available")
        if announced.wildcard_subscription_available == 0 and topics.has_wildcard(subscription.topic_filter):
            raise PeerError(ReasonCode.WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED, "wildcard subscriptions are not available")


def bridged(packet: packets.Subscribe) -> packets.Subscribe:
    """Return a bridge's SUBSCRIBE with the options that it means and its version cannot say.

    Without No Local its own messages would come back to its broker, and without Retain As Published its broker would
    not keep retained messages.
    """
    subscriptions = tuple(
        msgspec.structs.replace(
            subscription, no_local=not topics.is_shared(subscription.topic_filter), retain_as_published=True
        )
        for subscription in packet.subscriptions
    )
    return msgspec.structs.replace(packet, subscriptions=subscriptions)


def check_disconnect(packet: packets.Disconnect, connect: packets.Connect) -> None:
    """Refuse DISCONNECT with server-only contents, or with a session expiry if CONNECT had none."""
    if packet.reason_code not in CLIENT_DISCONNECT_CODES:
        raise protocol_error(f"reason code 0x{packet.reason_code:02X} from a client")
    properties = packet.properties or NONE
    if properties.server_reference is not None:
        raise protocol_error("a server reference from a client")
    if properties.session_expiry_interval and not (connect.properties or NONE).session_expiry_interval:
        raise protocol_error("a session expiry in DISCONNECT, but none in CONNECT")  # section 3.14.2.2.2


def check_auth(packet: packets.Auth, method: str | None, turn: Turn) -> None:
    """Check a step of enhanced authentication (section 4.12).

    A client answers our AUTH with 0x18 [MQTT-4.12.0-3]. On its own it may only start a re-authentication, once the
    connection is open [MQTT-4.12.1-1].
    """
    if (packet.properties or NONE).authentication_method != method:
        raise protocol_error("another authentication method than in CONNECT")  # [MQTT-4.12.0-5]
    if turn is Turn.SERVER:
        raise protocol_error("AUTH before the answer to the previous one")
    due = ReasonCode.CONTINUE_AUTHENTICATION if turn is Turn.CLIENT else ReasonCode.RE_AUTHENTICATE
    if packet.reason_code != due:
        raise protocol_error(f"AUTH with 0x{packet.reason_code:02X} where 0x{due:02X} is due")
