"""Events from a connection to its handler: the received packets, by the names of what they announce."""

from __future__ import annotations

from protocols.mqtt import packets

ConnectReceived = packets.Connect
"""CONNECT; answer with `accept`, `refuse` or (MQTT 5.0, with an authentication method) `send_auth`."""

PublishReceived = packets.Publish
"""PUBLISH with its topic alias resolved; answer with `send_puback` (QoS 1) or `send_pubrec` (QoS 2)."""

PubackReceived = packets.Puback
"""PUBACK: the client has received our QoS 1 message; its packet identifier is free again."""

PubrecReceived = packets.Pubrec
"""PUBREC for our QoS 2 message: answer with `send_pubrel`; from 0x80 on the exchange has ended instead."""

PubrelReceived = packets.Pubrel
"""PUBREL: the client releases a QoS 2 message; answer with `send_pubcomp`."""

PubcompReceived = packets.Pubcomp
"""PUBCOMP: our QoS 2 exchange has ended; its packet identifier is free again."""

SubscribeReceived = packets.Subscribe
"""SUBSCRIBE; answer with `send_suback`."""

UnsubscribeReceived = packets.Unsubscribe
"""UNSUBSCRIBE; answer with `send_unsuback`."""

DisconnectReceived = packets.Disconnect
"""DISCONNECT, the last event; only code 0x00 deletes the will [MQTT-3.14.4-3]."""

AuthReceived = packets.Auth
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
