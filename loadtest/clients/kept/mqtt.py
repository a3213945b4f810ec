"""MQTT 5 clients whose session outlives their connections, as the standard requires, on a plain socket.

A client keeps what it must (4.1): unacknowledged QoS 1 and 2 messages with their packet identifiers, and the
identifiers of received QoS 2 messages that were not released. It reconnects with Clean Start 0 after each lost
connection, and resumes (4.4): it resends PUBLISH with DUP, and PUBREL.
"""

from __future__ import annotations

import abc
import asyncio
import struct
from collections.abc import Callable
from typing import Final

from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from loadtest.clients.kept.lasting import LastingClient, Messages, NumberedSender
from loadtest.clients.mqtt import DISCONNECT, PUBACK, PUBCOMP, PUBREC, PUBREL
from loadtest.clients.mqtt_wire import (
    Splitter,
    connect_packet,
    packet,
    publish_packet,
    read_varint,
    subscribe_packet,
)

EXPIRY_S: Final = 3600
_FOUND, _NOT_FOUND = 0x00, 0x92


class KeptClient(LastingClient):
    """A client with a session."""

    closing = DISCONNECT
    sign_of_life = b"\xc0\x00"

    def __init__(self, address: tuple[str, int], client_id: str, *, receive_maximum: int | None = None) -> None:
        super().__init__(address, client_id)
        self._receive_maximum = receive_maximum
        self._had_session = False
        self._splitter = Splitter()

    def _begin(self) -> None:
        """Send CONNECT, with Clean Start until there is a session."""
        self._splitter = Splitter()
        self.write(
            connect_packet(
                self.client_id,
                clean_start=not self._had_session,
                session_expiry_s=EXPIRY_S,
                receive_maximum=self._receive_maximum,
            )
        )

    def data_received(self, data: bytes) -> None:
        """Handle packets."""
        for first, body in self._splitter.feed(data):
            if first == 0x20:
                self._connack(body)
            elif first == 0xE0:
                word = f"DISCONNECT 0x{body[0] if body else 0:02x}"
                self.refusals[word] += 1
                if not body or body[0] != 0x8B:  # server shutting down, which is expected
                    self.faults.append(word)
            elif first != 0xD0:
                self._packet(first, body)

    def _connack(self, body: bytes) -> None:
        if body[1]:
            word = f"CONNACK 0x{body[1]:02x}"
            self.refusals[word] += 1
            self.faults.append(word)
            return
        self.connects += 1
        present = bool(body[0] & 1)
        if self._had_session and not present:
            self.faults.append(f"connection {self.connects}: the server has no session")
        if present and not self._had_session:
            self.faults.append("a session that should not exist")
        self._had_session = True
        self._resume(present, _receive_maximum(body))
        self._served()

    @abc.abstractmethod
    def _resume(self, present: bool, receive_maximum: int) -> None:
        """Resume after an accepted CONNECT."""

    @abc.abstractmethod
    def _packet(self, first: int, body: bytes) -> None:
        """Handle any packet except CONNACK and DISCONNECT."""


def _receive_maximum(connack: bytes) -> int:
    """Return the Receive Maximum of a CONNACK, or its default (3.2.2.3.3)."""
    properties = Properties(PacketTypes.CONNACK)  # type: ignore[no-untyped-call]
    properties.unpack(connack[2:])  # type: ignore[no-untyped-call]
    return int(getattr(properties, "ReceiveMaximum", 65535))


class _Outgoing:
    """An unacknowledged message to the server."""

    __slots__ = ("released", "sequence")

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.released = False  # QoS 2: PUBREC was received


class KeptPublisher(NumberedSender, KeptClient):
    """Publishes numbered messages at QoS 1 or 2."""

    def __init__(
        self, address: tuple[str, int], client_id: str, topic: str, messages: Messages, *, qos: int, again: bool = True
    ) -> None:
        """With `again`, refused messages are sent again under another identifier."""
        super().__init__(address, client_id)
        self.messages = messages
        self.qos = qos
        self._again = again
        self._topic = f"{topic}/{messages.key}"
        self._room = messages.window
        self._next_id = 1
        self._resend: list[int] = []
        self._outgoing: dict[int, _Outgoing] = {}  # by packet identifier, in the order of the first PUBLISH

    def push(self) -> None:
        """Send as many messages as the window allows."""
        if not self.connected.is_set():
            return
        out = bytearray()
        while len(self._outgoing) < self._room and (self._resend or self._next < self.total):
            if self._resend:
                sequence = self._resend.pop(0)
            else:
                sequence = self._next
                self._next += 1
            while self._next_id in self._outgoing:
                self._next_id = self._next_id % 65535 + 1
            identifier, self._next_id = self._next_id, self._next_id % 65535 + 1
            self._outgoing[identifier] = _Outgoing(sequence)
            out += self._publish(identifier, sequence, dup=False)
        if out:
            self.write(bytes(out))

    def _publish(self, identifier: int, sequence: int, *, dup: bool) -> bytes:
        return publish_packet(self._topic, self.messages.payload(sequence), self.qos, identifier, dup=dup)

    def _resume(self, present: bool, receive_maximum: int) -> None:
        self._room = min(self.messages.window, receive_maximum)
        out = bytearray()
        for identifier, one in list(self._outgoing.items()):
            if one.released and present:
                out += struct.pack(">BBH", PUBREL, 2, identifier)
            elif one.released:
                # The session is lost, and the exchange with it; the message itself was received (section 4.3.3).
                self._through(identifier)
            else:
                out += self._publish(identifier, one.sequence, dup=True)
        self.write(bytes(out))
        asyncio.get_running_loop().call_soon(self.push)

    def _packet(self, first: int, body: bytes) -> None:
        if first not in (PUBACK, PUBREC, PUBCOMP):
            self.faults.append(f"packet 0x{first:02x}")
            return
        identifier = body[0] << 8 | body[1]
        code = body[2] if len(body) > 2 else 0
        one = self._outgoing.get(identifier)
        name = {PUBACK: "PUBACK", PUBREC: "PUBREC", PUBCOMP: "PUBCOMP"}[first]
        if one is None:
            if first == PUBREC:
                self.write(struct.pack(">BBHB", PUBREL, 3, identifier, _NOT_FOUND))
            self.faults.append(f"{name} for the unknown identifier {identifier}")
            return
        if (first == PUBACK) is not (self.qos == 1) or (first == PUBCOMP and not one.released):
            self.faults.append(f"{name} at QoS {self.qos} for {identifier}")
        elif first != PUBCOMP and code >= 0x80:
            self.refusals[f"{name} 0x{code:02x}"] += 1
            del self._outgoing[identifier]
            if self._again:
                self._resend.append(one.sequence)  # sent by the next `push`
            else:
                self.given_up += 1
        elif first == PUBREC:
            one.released = True
            self.write(struct.pack(">BBH", PUBREL, 2, identifier))
        else:
            if code not in (_FOUND, 0x10):
                self.faults.append(f"{name} 0x{code:02x} for {identifier}")
            self._through(identifier)
            self.push()

    def _through(self, identifier: int) -> None:
        one = self._outgoing.pop(identifier)
        self.acknowledge(one.sequence)


class KeptSubscriber(KeptClient):
    """Subscribes once and receives every message, QoS 2 exactly once (as 4.3.3 requires of a receiver, method A or B).

    Attributes:
        subscribed: set after SUBACK.
    """

    def __init__(
        self,
        address: tuple[str, int],
        client_id: str,
        topic_filter: str,
        qos: int,
        on_message: Callable[[bytes, int], None],
        *,
        receive_maximum: int | None = None,
    ) -> None:
        """`on_message` is called with each payload and its QoS."""
        super().__init__(address, client_id, receive_maximum=receive_maximum)
        self.subscribed = asyncio.Event()
        self._filter = topic_filter
        self._qos = qos
        self._on_message = on_message
        self._held: set[int] = set()

    def _resume(self, present: bool, receive_maximum: int) -> None:
        if not present:
            self._held.clear()
        if not present or not self.subscribed.is_set():
            self.write(subscribe_packet(1, [(self._filter, self._qos)]))

    def _packet(self, first: int, body: bytes) -> None:
        if first >> 4 == 3:
            self._published(first, body)
        elif first == PUBREL:
            identifier = body[0] << 8 | body[1]
            known = identifier in self._held
            self._held.discard(identifier)
            code = b"" if known else bytes((_NOT_FOUND,))
            self.write(packet(PUBCOMP, body[:2] + code))
        elif first == 0x90:
            if body[-1] != self._qos:
                self.faults.append(f"SUBACK 0x{body[-1]:02x}")
            self.subscribed.set()
        else:
            self.faults.append(f"packet 0x{first:02x}")

    def _published(self, first: int, body: bytes) -> None:
        qos = first >> 1 & 3
        at = 2 + struct.unpack_from(">H", body)[0]
        identifier = b""
        if qos:
            identifier = body[at : at + 2]
            at += 2
        length, at = read_varint(body, at)
        payload = body[at + length :]
        if qos == 2:
            number = identifier[0] << 8 | identifier[1]
            if number in self._held:
                if not first & 0x08:
                    self.faults.append(f"PUBLISH without DUP for {number}, which was not released")
            else:
                self._held.add(number)
                self._on_message(payload, qos)
            self.write(bytes((PUBREC, 2)) + identifier)
            return
        self._on_message(payload, qos)
        if qos:
            self.write(bytes((PUBACK, 2)) + identifier)
