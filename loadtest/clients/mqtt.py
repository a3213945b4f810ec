"""A windowed MQTT 5 publisher, a QoS 0 flood and a subscriber on plain sockets, fast enough not to be the bottleneck.

They share no code with the gateway. A read full of acknowledgements is checked at once, without a loop.
"""

from __future__ import annotations

import array
import itertools
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from loadtest.clients.connection import Connection
from loadtest.clients.mqtt_wire import (
    Splitter,
    connect_packet,
    packet,
    publish_packet,
    read_varint,
    subscribe_packet,
    text,
)
from loadtest.clients.pace import Pace
from loadtest.clients.sender import OnAck, Sender, WindowedSender, ignore

Login = tuple[str | None, str | None]
PUBACK, PUBREC, PUBREL, PUBCOMP = 0x40, 0x50, 0x62, 0x70
DISCONNECT: Final = b"\xe0\x00"
LAST_ID: Final = 65535


def packet_id(index: int) -> int:
    """Return the packet identifier of message `index`: 1 to 65535, repeated."""
    return index % LAST_ID + 1


def publishes(topic: str, payloads: Sequence[bytes], qos: int = 1, *, topics: int = 0) -> list[bytes]:
    """Return the packets of a `Publisher`.

    With `topics` 0 all go to `topic`; otherwise to that many topics below it in turn, each with a user property.
    """
    forms = [(text(f"{topic}/{number}"), _unit(number)) for number in range(topics)] or [(text(topic), b"\0")]
    first = 0x30 | qos << 1
    return [
        packet(first, head + struct.pack(">H", packet_id(index)) + properties + payload)
        for index, ((head, properties), payload) in enumerate(zip(itertools.cycle(forms), payloads, strict=False))
    ]


def _unit(number: int) -> bytes:
    """Return properties with one user property (2.2.2.2)."""
    pair = b"\x26" + text("unit") + text(f"C{number}")
    return bytes((len(pair),)) + pair


class Publisher(WindowedSender):
    """Sends PUBLISH packets at QoS 1 or 2; packet `index` has the identifier `packet_id(index)`.

    Refusals are counted by reason code; acknowledgements out of order are an error. `login` is user and password.
    """

    closing = DISCONNECT

    def __init__(
        self,
        client_id: str,
        packets: Sequence[bytes],
        pace: Pace,
        on_ack: OnAck = ignore,
        *,
        qos: int = 1,
        login: Login = (None, None),
    ) -> None:
        super().__init__(packets, pace, on_ack)
        self.greeting = connect_packet(client_id, *login)
        self._final = PUBACK if qos == 1 else PUBCOMP
        self._splitter = Splitter()

    def data_received(self, data: bytes) -> None:
        """Handle CONNACK, then acknowledgements."""
        now = time.perf_counter()
        if not self._splitter.is_empty or not self._take_plain(data, now):
            for first, body in self._splitter.feed(data):
                self._take(first, body, now)
        if self.connected.done():
            self.push()

    def _take_plain(self, data: bytes, now: float) -> bool:
        """Handle a read of only complete four-byte success acknowledgements; False if it has anything else."""
        count = len(data) // 4
        kinds = data[::4]
        if len(data) % 4 or data[1::4] != b"\2" * count or kinds.strip(_ACKS):
            return False
        numbers = array.array("H", data)
        if sys.byteorder == "little":
            numbers.byteswap()
        identifiers = numbers[1::2]
        for kind, first, behind in _runs(kinds):
            if kind == PUBREC:
                answer = bytearray(data[first * 4 : behind * 4])
                answer[::4] = bytes((PUBREL,)) * (behind - first)
                self.write(answer)
                continue
            begin, end = self.answered, self.answered + behind - first
            place = begin % LAST_ID
            self._check_order(kind == self._final and identifiers[first:behind] == _IDS[place : place + behind - first])
            self._timed_run(begin, end, now)
            self._answer_run(begin, end)
        return True

    def _take(self, first: int, body: bytes, now: float) -> None:
        if first in (PUBACK, PUBCOMP):
            self._acknowledged(body, now)
        elif first == PUBREC:
            if len(body) > 2 and body[2] >= 0x80:
                self._acknowledged(body, now)
            else:
                self.write(bytes((PUBREL, 2)) + body[:2])
        elif first == 0x20:
            if body[1]:
                self.fail(ConnectionRefusedError(f"CONNACK 0x{body[1]:02x}"))
            else:
                self._is_connected()
        elif first == 0xE0:
            self.fail(ConnectionAbortedError(f"DISCONNECT 0x{body[0] if body else 0:02x}"))

    def _acknowledged(self, body: bytes, now: float) -> None:
        index = self.answered
        reason = body[2] if len(body) > 2 else 0
        self._check_order(body[0] << 8 | body[1] == packet_id(index) or (reason >= 0x80 and self._final == PUBCOMP))
        self._timed_run(index, index + 1, now)
        self._answer(index, None if reason in (0x00, 0x10) else reason)

    def _check_order(self, in_order: bool) -> None:
        """Fail when acknowledgements are out of order (4.6); at QoS 2 a refusal, in PUBREC, overtakes any PUBCOMP."""
        if not in_order and not (self._final == PUBCOMP and self.refused):
            self.fail(ConnectionAbortedError("acknowledgements are out of order"))


_IDS: Final = array.array("H", 2 * [*range(1, LAST_ID + 1)])
_ACKS: Final = bytes((PUBACK, PUBREC, PUBCOMP))


def _runs(kinds: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield runs of the same first byte as (byte, first, end exclusive)."""
    position = 0
    for kind, run in itertools.groupby(kinds) if kinds.strip(kinds[:1]) else ((kinds[0], kinds),):
        count = sum(1 for _ in run) if run is not kinds else len(kinds)
        yield kind, position, position + count
        position += count


class Flood(Sender):
    """Publishes payloads at QoS 0 as fast as the socket accepts them, then one at QoS 1 to the same topic.

    A topic is one partition here, so the last PUBACK means that all messages before it were processed. Only the last
    message is acknowledged; the verifier finds out about the others.
    """

    closing = DISCONNECT

    def __init__(self, client_id: str, topic: str, payloads: Sequence[bytes], pace: Pace, on_ack: OnAck) -> None:
        super().__init__(len(payloads), pace, on_ack)
        self.greeting = connect_packet(client_id)
        last = len(payloads) - 1
        stream = [publish_packet(topic, payload, int(index == last), 1) for index, payload in enumerate(payloads)]
        self._chunks = [b"".join(stream[at : at + _FLOOD_CHUNK]) for at in range(0, len(stream), _FLOOD_CHUNK)]
        self._next = 0
        self._writable = True
        self._splitter = Splitter()

    @property
    def sent(self) -> int:
        """The number of messages written."""
        return min(self._next * _FLOOD_CHUNK, self.total)

    def data_received(self, data: bytes) -> None:
        """Handle CONNACK and the only PUBACK."""
        for first, body in self._splitter.feed(data):
            if first == 0x20 and not body[1]:
                self._is_connected()
            elif first == PUBACK:
                self.answered = self.total - 1
                self._answer(self.answered, (body[2] or None) if len(body) > 2 else None)
            else:
                self.fail(ConnectionAbortedError(f"packet 0x{first:02x} {body.hex()}"))

    def pause_writing(self) -> None:
        """Stop writing: the socket is full."""
        self._writable = False

    def resume_writing(self) -> None:
        """Write again."""
        self._writable = True
        self.push()

    def push(self) -> None:
        """Write until the socket is full."""
        if not self.pace.capacity(0, 0):
            return
        while self._writable and self._next < len(self._chunks) and self.is_open:
            self._next += 1
            self.write(self._chunks[self._next - 1])


_FLOOD_CHUNK: Final = 500  # messages per write


class Subscriber(Connection):
    """Subscribes to one filter, calls `on_message` with each payload, and acknowledges QoS 1 immediately.

    Attributes:
        subscribed: done after SUBACK, with its reason code.
        lost: why the connection ended; None while it is open.
    """

    closing = DISCONNECT

    def __init__(
        self,
        client_id: str,
        topic_filter: str,
        qos: int,
        on_message: Callable[[bytes], None],
        *,
        login: Login = (None, None),
    ) -> None:
        super().__init__()
        self.greeting = connect_packet(client_id, *login)
        self.subscribed = self.promise()
        self.lost: str | None = None
        self._subscribe = subscribe_packet(1, [(topic_filter, qos)])
        self._on_message = on_message
        self._splitter = Splitter()

    def data_received(self, data: bytes) -> None:
        """Handle CONNACK, SUBACK and PUBLISH."""
        acks = bytearray()
        for first, body in self._splitter.feed(data):
            if first >> 4 == 3:
                position = 2 + struct.unpack_from(">H", body)[0]
                if first & 0x06:
                    acks += bytes((PUBACK, 2)) + body[position : position + 2]
                    position += 2
                length, position = read_varint(body, position)
                self._on_message(body[position + length :])
            elif first == 0x20:
                self.write(self._subscribe)
            elif first == 0x90 and not self.subscribed.done():
                self.subscribed.set_result(body[-1])
            elif first == 0xE0:
                self.lost = f"DISCONNECT 0x{body[0] if body else 0:02x}"
        if acks:
            self.write(acks)

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the reason."""
        self.lost = self.lost or str(exc or "connection closed")
        super().connection_lost(exc)
