"""Persistent MQTT clients with unmodified Eclipse Paho, which keeps its session and resends on its own.

Paho runs its own thread; its callbacks are forwarded to the event loop. This module reconnects instead of Paho: with
every failed attempt Paho 2.1 loses more of its session (`_messages_reconnect_reset_out`, called twice, treats a message
that has its PUBREC as never published). So it may connect only when the gateway is up to stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from paho.mqtt.client import Client, MQTTMessage, MQTTv5
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from loadtest.clients.kept.lasting import Messages, NumberedSender

EXPIRY_S: Final = 3600


class PahoClient:
    """Common parts of both clients.

    Attributes:
        door: set while it may connect.
    """

    def __init__(self, address: tuple[str, int], client_id: str, *, kept: bool = True) -> None:
        """`kept`: whether its session outlives a connection; otherwise it may always connect."""
        self.client_id = client_id
        self.connects = 0
        self.faults: list[str] = []
        self.connected = asyncio.Event()
        self.door = asyncio.Event()
        self._kept = kept
        if not kept:
            self.door.set()
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._gone = asyncio.Event()
        self._client = Client(CallbackAPIVersion.VERSION2, client_id, protocol=MQTTv5, reconnect_on_failure=False)
        self._client.on_connect = self._on_connect
        self._client.on_disconnect = self._on_disconnect

    async def run(self) -> None:
        """Stay connected, while `door` is set, until `stop`."""
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.SessionExpiryInterval = EXPIRY_S if self._kept else 0
        while not self._stopping.is_set():
            await self.door.wait()
            self._gone.clear()
            self._client.connect(*self._address, clean_start=not self._kept, properties=properties)
            self._client.loop_start()
            await self._gone.wait()
            self.connected.clear()
            await asyncio.to_thread(self._client.loop_stop)
            self._client._reset_sockets(sockpair_only=True)  # `loop_start` creates new ones without closing these

    def stop(self) -> None:
        """Disconnect; `run` then returns."""
        self._stopping.set()
        self._client.disconnect()

    def _on_disconnect(self, client: Client, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        self._loop.call_soon_threadsafe(self._gone.set)

    def _on_connect(self, client: Client, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        if reason.is_failure:
            self.faults.append(f"CONNACK {reason}")
            return
        self.connects += 1
        if self._kept and self.connects > 1 and not flags.session_present:
            self.faults.append(f"connection {self.connects}: the server has no session")
        self._resumed(flags.session_present)
        self._loop.call_soon_threadsafe(self.connected.set)

    def _resumed(self, present: bool) -> None:
        """Handle a new connection, in Paho's thread."""


class PahoPublisher(NumberedSender, PahoClient):
    """Publishes numbered messages at QoS 1 or 2."""

    def __init__(
        self, address: tuple[str, int], client_id: str, topic: str, messages: Messages, *, qos: int, kept: bool = True
    ) -> None:
        super().__init__(address, client_id, kept=kept)
        self.messages = messages
        self._topic, self._qos = f"{topic}/{messages.key}", qos
        self._waiting: dict[int, int] = {}  # Paho's message id -> sequence
        self._client.max_inflight_messages_set(messages.window)
        self._client.on_publish = self._on_publish

    def push(self) -> None:
        """Publish as many messages as the window allows."""
        window = self.messages.window
        while self.connected.is_set() and self._next < self.total and len(self._waiting) < window:
            info = self._client.publish(self._topic, self.messages.payload(self._next), self._qos)
            self._waiting[info.mid] = self._next
            self._next += 1

    def _on_publish(self, client: Client, userdata: Any, mid: int, reason: Any, properties: Any) -> None:
        # Not handled here: Paho holds its locks, and `push` may be inside `publish` of this very message.
        self._loop.call_soon_threadsafe(self._answered, mid, reason)

    def _answered(self, mid: int, reason: Any) -> None:
        sequence = self._waiting.pop(mid, None)
        if sequence is None:
            self.faults.append(f"an acknowledgement for the unknown identifier {mid}")
        elif reason.is_failure:
            self.faults.append(f"message {sequence} refused: {reason}")
        else:
            self.acknowledge(sequence)


class PahoSubscriber(PahoClient):
    """Subscribes once and receives every message."""

    def __init__(
        self,
        address: tuple[str, int],
        client_id: str,
        topic_filter: str,
        qos: int,
        on_message: Callable[[bytes, int], None],
        *,
        kept: bool = True,
    ) -> None:
        super().__init__(address, client_id, kept=kept)
        self.subscribed = asyncio.Event()
        self._filter, self._qos, self._callback = topic_filter, qos, on_message
        self._client.on_message = self._on_message
        self._client.on_subscribe = self._on_subscribe

    def _resumed(self, present: bool) -> None:
        if not present or not self.subscribed.is_set():
            self._client.subscribe(self._filter, self._qos)

    def _on_subscribe(self, client: Client, userdata: Any, mid: int, reasons: Any, properties: Any) -> None:
        if any(reason.is_failure for reason in reasons):
            self.faults.append(f"SUBACK {reasons}")
        self._loop.call_soon_threadsafe(self.subscribed.set)

    def _on_message(self, client: Client, userdata: Any, message: MQTTMessage) -> None:
        self._loop.call_soon_threadsafe(self._callback, bytes(message.payload), message.qos)
