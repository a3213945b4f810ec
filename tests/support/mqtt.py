"""paho for tests: started, subscribed and stopped from an event loop; keeps everything that the gateway said."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from tests.support.gateway import wait_until


class PahoClient:
    """One connection that is not made again when it is lost."""

    def __init__(
        self, address: tuple[str, int], *, user: str | None = None, password: str = "", **options: Any
    ) -> None:
        self.connack: Any = None
        self.disconnected: Any = None
        self.messages: list[paho.MQTTMessage] = []
        self.subacks: dict[int, list[Any]] = {}
        self.pubacks: dict[int, Any] = {}
        self._address = address
        options.setdefault("protocol", paho.MQTTv5)
        options.setdefault("client_id", f"c-{uuid.uuid4().hex[:10]}")
        self.paho = paho.Client(CallbackAPIVersion.VERSION2, reconnect_on_failure=False, **options)
        if user is not None:
            self.paho.username_pw_set(user, password)
        self.paho.on_connect = lambda _c, _d, _f, reason, _p: setattr(self, "connack", reason)
        self.paho.on_disconnect = lambda _c, _d, _f, reason, _p: setattr(self, "disconnected", reason)
        self.paho.on_message = lambda _c, _d, message: self.messages.append(message)
        self.paho.on_subscribe = lambda _c, _d, mid, codes, _p: self.subacks.update({mid: codes})
        self.paho.on_publish = lambda _c, _d, mid, reason, _p: self.pubacks.update({mid: reason})

    async def connect(self, **options: Any) -> PahoClient:
        """Connect and wait for CONNACK or the end of the connection."""
        await asyncio.to_thread(self.paho.connect, *self._address, **options)
        self.paho.loop_start()
        await wait_until(lambda: self.connack is not None or self.disconnected is not None)
        return self

    def send(self, topic: str, payload: bytes = b"", qos: int = 1) -> int:
        """Publish without waiting; the packet id."""
        return self.paho.publish(topic, payload, qos).mid

    async def publish(self, topic: str, payload: bytes = b"") -> int:
        """Publish with QoS 1 and wait; PUBACK's reason code."""
        mid = self.send(topic, payload)
        await wait_until(lambda: mid in self.pubacks or self.disconnected is not None)
        return self.pubacks[mid].value

    async def subscribe(self, topic_filter: str, qos: int = 1) -> int:
        """Subscribe and wait; SUBACK's reason code."""
        _, mid = self.paho.subscribe(topic_filter, qos)
        assert mid is not None
        await wait_until(lambda: mid in self.subacks or self.disconnected is not None)
        return self.subacks[mid][0].value

    async def close(self) -> None:
        """Say goodbye and end the thread."""
        self.paho.disconnect()
        await asyncio.to_thread(self.paho.loop_stop)
