"""Events from a connection to its handler; each one has the fields of the received packet."""

from __future__ import annotations

from protocols.mqtt import packets


class ConnectReceived(packets.Connect, frozen=True, gc=False):
    """CONNECT; answer with `accept`, `refuse` or (MQTT 5.0, with an authentication method) `send_auth`."""


class PublishReceived(packets.Publish, frozen=True, gc=False):
    """PUBLISH with its topic alias resolved; answer with `send_puback` (QoS 1) or `send_pubrec` (QoS 2)."""


class PubackReceived(packets.Puback, frozen=True, gc=False):
    """PUBACK: the client has received our QoS 1 message; its packet identifier is free again."""


class PubrecReceived(packets.Pubrec, frozen=True, gc=False):
    """PUBREC for our QoS 2 message: answer with `send_pubrel`; from 0x80 on the exchange has ended instead."""


class PubrelReceived(packets.Pubrel, frozen=True, gc=False):
    """PUBREL: the client releases a QoS 2 message; answer with `send_pubcomp`."""


class PubcompReceived(packets.Pubcomp, frozen=True, gc=False):
    """PUBCOMP: our QoS 2 exchange has ended; its packet identifier is free again."""


class SubscribeReceived(packets.Subscribe, frozen=True, gc=False):
    """SUBSCRIBE; answer with `send_suback`."""


class UnsubscribeReceived(packets.Unsubscribe, frozen=True, gc=False):
    """UNSUBSCRIBE; answer with `send_unsuback`."""


class DisconnectReceived(packets.Disconnect, frozen=True, gc=False):
    """DISCONNECT, the last event; only code 0x00 deletes the will [MQTT-3.14.4-3]."""


class AuthReceived(packets.Auth, frozen=True, gc=False):
    """AUTH: a step of enhanced authentication (section 4.12)."""


Event = (
    ConnectReceived
    | PublishReceived
    | PubackReceived
    | PubrecReceived
    | PubrelReceived
    | PubcompReceived
    | SubscribeReceived
    | UnsubscribeReceived
    | DisconnectReceived
    | AuthReceived
)
