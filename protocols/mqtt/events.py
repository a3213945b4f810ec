"""What a connection tells its session; each event is the packet that was received, under its past tense."""

from __future__ import annotations

from protocols.mqtt import packets


class ConnectReceived(packets.Connect, frozen=True, gc=False):
    """A client wants in; answer with `accept`, `refuse` or (MQTT 5.0, with a method) `send_auth`."""


class PublishReceived(packets.Publish, frozen=True, gc=False):
    """A message; at QoS 1 and 2 it is owed `send_puback` or `send_pubrec`. Topic aliases are resolved."""


class PubackReceived(packets.Puback, frozen=True, gc=False):
    """The client has a QoS 1 message of ours; its packet identifier is free again."""


class PubrecReceived(packets.Pubrec, frozen=True, gc=False):
    """The client has a QoS 2 message of ours: `send_pubrel` is due. From 0x80 on the exchange is over instead."""


class PubrelReceived(packets.Pubrel, frozen=True, gc=False):
    """The client lets go of a QoS 2 packet identifier; `send_pubcomp` is due."""


class PubcompReceived(packets.Pubcomp, frozen=True, gc=False):
    """The client ended a QoS 2 exchange of ours; its packet identifier is free again."""


class SubscribeReceived(packets.Subscribe, frozen=True, gc=False):
    """The client subscribes; `send_suback` is due."""


class UnsubscribeReceived(packets.Unsubscribe, frozen=True, gc=False):
    """The client unsubscribes; `send_unsuback` is due."""


class DisconnectReceived(packets.Disconnect, frozen=True, gc=False):
    """The client disconnects; the last event. With 0x00 its will is deleted [MQTT-3.14.4-3], with others it is not."""


class AuthReceived(packets.Auth, frozen=True, gc=False):
    """A step of enhanced authentication (section 4.12)."""


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
