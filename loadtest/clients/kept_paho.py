"""The same with Eclipse Paho, unmodified: a client that nobody here wrote keeps its session and comes back.

Paho runs its own thread; it resends by itself. What it tells us is taken over into the event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Final

from paho.mqtt.client import Client, MQTTMessage, MQTTv5
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

EXPIRY_S: Final = 3600


class PahoClient:
    """What both have in common: a connection that Paho renews."""

    def __init__(self, address: tuple[str, int], client_id: str) -> None:
        self.client_id = client_id
        self.connects = 0
        self.sessions_lost = 0
        self.faults: list[str] = []
        self._loop = asyncio.get_running_loop()
        self._client = Client(CallbackAPIVersion.VERSION2, client_id, protocol=MQTTv5)
        self._client.reconnect_delay_set(1, 1)
        self._client.on_connect = self._on_connect
        self._address = address
        self.connected = asyncio.Event()

    def start(self) -> None:
        """Connect and stay connected."""
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.SessionExpiryInterval = EXPIRY_S
        self._client.connect_async(*self._address, clean_start=False, properties=properties)
        self._client.loop_start()

    async def stop(self) -> None:
        """Say goodbye."""
        self._client.disconnect()
        await asyncio.to_thread(self._client.loop_stop)

    def _on_connect(self, client: Client, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        if reason.is_failure:
            self.faults.append(f"CONNACK {reason}")
            return
        self.connects += 1
        if self.connects > 1 and not flags.session_present:
            self.sessions_lost += 1
            self.faults.append(f"connection {self.connects}: the server has no session")
        self._resumed(flags.session_present)
        self._loop.call_soon_threadsafe(self.connected.set)

    def _resumed(self, present: bool) -> None:
        """Called in Paho's thread for each connection."""


class PahoPublisher(PahoClient):
    """Publishes numbered messages at QoS 1 or 2, at most `window` unanswered."""

    def __init__(
        self,
        address: tuple[str, int],
        client_id: str,
        topic: str,
        *,
        qos: int,
        payload: Callable[[int], bytes],
        on_ack: Callable[[int], None],
        window: int,
    ) -> None:
        super().__init__(address, client_id)
        self.total = 0
        self.answered = 0
        self._topic, self._qos, self._payload, self._on_ack, self._window = topic, qos, payload, on_ack, window
        self._next = 0
        self._waiting: dict[int, int] = {}  # Paho's message id -> sequence
        self._early: set[int] = set()
        self._lock = threading.Lock()
        self._client.max_inflight_messages_set(window)
        self._client.on_publish = self._on_publish

    @property
    def finished(self) -> bool:
        """Whether every message is through."""
        return self.answered >= self.total

    def push(self) -> None:
        """Hand Paho what the window allows."""
        while self.connected.is_set() and self._next < self.total and len(self._waiting) < self._window:
            with self._lock:
                info = self._client.publish(self._topic, self._payload(self._next), self._qos)
                self._waiting[info.mid] = self._next
                self._next += 1

    def _on_publish(self, client: Client, userdata: Any, mid: int, reason: Any, properties: Any) -> None:
        with self._lock:
            sequence = self._waiting.pop(mid, None)
        if sequence is None:
            self.faults.append(f"an answer for the unknown identifier {mid}")
        elif reason.is_failure:
            self.faults.append(f"message {sequence} refused: {reason}")
        else:
            self.answered += 1
            self._loop.call_soon_threadsafe(self._on_ack, sequence)


class PahoSubscriber(PahoClient):
    """Subscribes once and takes every message."""

    def __init__(
        self,
        address: tuple[str, int],
        client_id: str,
        topic_filter: str,
        qos: int,
        on_message: Callable[[bytes, int], None],
    ) -> None:
        super().__init__(address, client_id)
        self.subscribed = asyncio.Event()
        self._filter, self._qos, self._told = topic_filter, qos, on_message
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
        self._loop.call_soon_threadsafe(self._told, bytes(message.payload), message.qos)
