"""A plugin for amqtt's client that records Session Present, which the client does not expose."""

from __future__ import annotations

from typing import Any

from amqtt.mqtt.connack import ConnackPacket
from amqtt.plugins.base import BasePlugin

present: dict[str, bool] = {}  # by client id


class Observer(BasePlugin[Any]):
    async def on_mqtt_packet_received(self, *, packet: Any, session: Any) -> None:
        if isinstance(packet, ConnackPacket):
            present[session.client_id] = bool(packet.variable_header.session_parent)
