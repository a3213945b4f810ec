"""The receiving half of a server's connection: from bytes to events.

Most packets are PUBLISH or PUBACK; `take_usual` parses runs of them in C. All others, and without C these too, are
decoded packet by packet.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from flowcontrol.credit import Inflight
from protocols.connection import ConnectionFailed
from protocols.errors import PeerError
from protocols.mqtt import packets
from protocols.mqtt._native import take_usual
from protocols.mqtt.aliases import TopicAliases
from protocols.mqtt.checks import bridged, check_auth, check_disconnect, check_subscribe, refused_flags, resolve_topic
from protocols.mqtt.codec import Reader, read_varint
from protocols.mqtt.decoding import BRIDGE, check_flags, decode_connect_rest, decode_packet, decode_version
from protocols.mqtt.packets import Version
from protocols.mqtt.properties import NONE, Properties
from protocols.mqtt.reasons import PacketType, ReasonCode, malformed, protocol_error
from protocols.mqtt.sending import OPEN, Sender
from protocols.mqtt.states import UNLIMITED, Awaits, PacketLimits, State, Turn, check_legal, publish_flags

GRACE: Final = 1.5  # multiple of the keep alive [MQTT-3.1.2-22]
SMALLEST: Final = 2  # bytes of a packet: the first byte and a remaining length of 0
PINGRESP: Final = b"\xd0\x00"


class Receiver(Sender):
    """The receiving half of a connection; enforces `LEGAL` and what CONNACK announced."""

    __slots__ = (
        "_aliases", "_announced", "_draining", "_flags", "_grace", "_limits", "_max_in", "_method", "_needed", "_now",
        "_received_at", "_turn", "_waiting",
    )  # fmt: skip

    def __init__(self, limits: PacketLimits) -> None:
        super().__init__(limits.outgoing_inflight)
        self._limits = limits
        self._announced = NONE
        self._method: str | None = None
        self._turn = Turn.NONE
        self._max_in = limits.max_connect_bytes
        self._flags = publish_flags()
        self._waiting = bytearray()  # received bytes that are not parsed yet
        self._needed = 0  # number of bytes that complete the first packet in `_waiting`
        self._aliases: dict[int, str] = {}
        self._now = 0.0
        self._received_at = 0.0
        self._grace: float | None = None
        self._draining = False  # after DISCONNECT: earlier requests may still be answered

    @property
    def unparsed(self) -> bytes:
        """Received bytes that are not parsed yet: an incomplete packet, or packets sent ahead of CONNACK."""
        return bytes(self._waiting)

    def _take_waiting(self) -> bytes:
        data = bytes(self._waiting)
        self._waiting.clear()
        return data

    def _parse(self, buffer: bytes, events: list[Any]) -> None:
        """Parse complete packets; buffer the rest."""
        position, size, needed = 0, len(buffer), SMALLEST
        try:
            while position + SMALLEST <= size:
                if self.state is OPEN:
                    position = self._take_usual(buffer, position, events)
                    if position + SMALLEST > size:
                        break
                start, end = self._frame(buffer, position)
                if end > size:
                    needed = end - position
                    break
                self._packet(buffer[position], buffer, start, end, events)
                position = end
                if self.state is State.CONNECTING:
                    break
                if self._draining or self.state is State.CLOSED:
                    return
        except PeerError as fault:
            events.append(self._fail(fault))
            return
        if position:
            self._received_at = self._now
        if position < size:
            self._waiting += buffer[position:] if position else buffer
            self._needed = needed

    def _frame(self, buffer: bytes, position: int) -> tuple[int, int]:
        """Check a packet's header, before the packet is complete, and return where its body starts and ends.

        With an incomplete header the end lies beyond the buffer. A PUBLISH's flags are checked when it is complete.
        """
        first = buffer[position]
        if self.state is not OPEN or first & 0xF0 != 0x30:
            check_legal(first, self.state, self.version, self._method)
        header = read_varint(buffer, position + 1, len(buffer))
        if header is None:
            return position, len(buffer) + 1
        length, start, overlong = header
        if overlong and self.version is Version.V5:
            raise malformed("a remaining length with more bytes than needed")
        end = start + length
        if end - position > self._max_in:
            reason = f"a packet of {end - position} bytes exceeds the maximum of {self._max_in}"
            raise PeerError(ReasonCode.PACKET_TOO_LARGE, reason)
        return start, end

    def _take_usual(self, buffer: bytes, position: int, events: list[Any]) -> int:
        """Parse a run of the usual packets in C; return the position of the first packet that is left to `_packet`."""
        position, taken, freed = take_usual(
            buffer, position, events, self.version is Version.V5, self._max_in, self.inbound.free, self._flags,
            self._announced.topic_alias_maximum or 0, self._aliases, self._qos2, self._awaited,
        )  # fmt: skip
        if taken:
            self.inbound.take(taken)
        if freed:
            self.outbound.release(freed)
        return position

    def _packet(self, first: int, buffer: bytes, start: int, end: int, events: list[Any]) -> None:
        """Handle any packet."""
        body = buffer[start:end]
        kind = first >> 4
        if kind == PacketType.CONNECT:
            self._connect(first, body, events)
            return
        assert self.version is not None
        if kind == PacketType.PUBLISH and self._flags[first & 0x0F] is None:
            raise refused_flags(first, self._announced)
        packet = decode_packet(first, body, self.version, self._limits.max_user_properties)
        match packet:
            case packets.Pingreq():
                self._out += PINGRESP  # [MQTT-3.12.4-1]
            case packets.Puback() | packets.Pubrec() | packets.Pubcomp():
                self._acknowledged(packet, events)
            case packets.Publish():
                events.append(self._publish(packet))
            case packets.Subscribe():
                if self.version is Version.V5:
                    check_subscribe(packet, self._announced)
                elif self.connect is not None and self.connect.bridge:
                    packet = bridged(packet)
                events.append(packet)
            case packets.Pubrel() | packets.Unsubscribe():
                events.append(packet)
            case packets.Disconnect():
                assert self.connect is not None
                check_disconnect(packet, self.connect)
                events.append(packet)
                if self.state is OPEN:
                    self._draining = True
                    self._waiting.clear()
                else:
                    self._close()
            case packets.Auth():
                check_auth(packet, self._method, self._turn)
                self._turn = Turn.SERVER
                events.append(packet)
            case _:
                raise protocol_error(f"{type(packet).__name__} from a client")

    def _publish(self, packet: packets.Publish) -> packets.Publish:
        """Resolve a PUBLISH's topic alias, and count the message in its window."""
        topic = resolve_topic(packet, self._aliases, self._announced.topic_alias_maximum or 0)
        if packet.qos and not (packet.qos == 2 and packet.packet_id in self._qos2):
            if not self.inbound.free:
                raise PeerError(ReasonCode.RECEIVE_MAXIMUM_EXCEEDED, "more messages than Receive Maximum allows")
            self.inbound.take()
            if packet.qos == 2:
                self._qos2[packet.packet_id] = True
        return packet if packet.topic else msgspec.structs.replace(packet, topic=topic)

    def _connect(self, first: int, body: bytes, events: list[Any]) -> None:
        reader = Reader(body)
        try:
            self.version, bridge = decode_version(reader)
        except PeerError as fault:
            if fault.code == ReasonCode.UNSUPPORTED_PROTOCOL_VERSION:
                # Answer in the format of the requested family: 3.1.1 [MQTT311-3.1.2-2], or 5.0 for all others. A bridge
                # gives up its mark when it gets 3.1.1's return code.
                level = body[reader.position - 1]
                self.version = Version.V311 if level in (3, 4) or level & BRIDGE else Version.V5
            raise
        if self.version is not Version.V31:
            check_flags(first, self.version)
        reader.most_pairs = self._limits.max_user_properties
        connect = decode_connect_rest(reader, self.version, bridge)
        reader.finish()
        properties = connect.properties or NONE
        self.connect = connect
        if properties.maximum_packet_size is not None:
            self._max_out = properties.maximum_packet_size
        limit = properties.receive_maximum or UNLIMITED
        self.outbound = Inflight(min(self._limits.outgoing_inflight, limit))
        aliases = min(self._limits.outgoing_aliases, properties.topic_alias_maximum or 0)
        if aliases:
            self._topic_aliases = TopicAliases(aliases)
        self._grace = connect.keep_alive * GRACE if connect.keep_alive else None
        self._method = properties.authentication_method
        if self._method is None:
            self.state = State.CONNECTING
        else:
            self.state = State.AUTHENTICATING
            self._turn = Turn.SERVER
        events.append(connect)

    def _acknowledged(self, packet: packets.Puback | packets.Pubrec | packets.Pubcomp, events: list[Any]) -> None:
        """Match an acknowledgement with the awaited one; one for an unused packet identifier is ignored."""
        awaited = self._awaited.get(packet.packet_id)
        if awaited is None or awaited is Awaits.RESERVED:
            # For an earlier connection or an unknown message. A reserved one is resent, and then acknowledged again.
            if type(packet) is packets.Pubrec and packet.reason_code < 0x80:
                events.append(packet)  # the session answers with PUBREL
            return
        kind = type(packet)
        refused = kind is packets.Pubrec and packet.reason_code >= 0x80
        if kind is packets.Pubrec and not refused and awaited is not Awaits.PUBREC and awaited is not Awaits.PUBACK:
            events.append(packet)  # repeated: the session sends PUBREL again
            return
        if (kind, awaited) not in _ANSWERS:
            raise protocol_error(f"{kind.__name__} where {awaited.value} is awaited")
        if kind is packets.Pubrec and not refused:
            self._awaited[packet.packet_id] = Awaits.PUBREL
        else:
            del self._awaited[packet.packet_id]
            if awaited is not Awaits.RESUMED:
                self.outbound.release()
        events.append(packet)

    # closing

    def send_disconnect(
        self, reason_code: int, reason_string: str | None = None, properties: Properties = NONE
    ) -> None:
        """Send DISCONNECT and close, or answer CONNECT with an error; nothing if the connection is closed.

        3.1.1 servers send no DISCONNECT, and in CONNACK the nearest return code, if there is one.
        """
        if self.state is OPEN:
            self._write_disconnect(reason_code, reason_string, properties)
        elif self.state is not State.CLOSED and self.version is not None:
            self._write_connack(reason_code, reason_string, properties)
        self._close()

    def _fail(self, fault: PeerError) -> ConnectionFailed:
        """Close because of an error, as the version allows [MQTT-4.13.1-1]."""
        assert isinstance(fault.code, int)
        self.send_disconnect(fault.code, fault.reason)
        return ConnectionFailed(fault.reason, f"0x{fault.code:02X}")

    def _close(self) -> None:
        self.state = State.CLOSED
        self._waiting.clear()


_ANSWERS: Final = frozenset(
    {
        (packets.Puback, Awaits.PUBACK),
        (packets.Pubrec, Awaits.PUBREC),
        (packets.Pubrec, Awaits.PUBREL),
        (packets.Pubrec, Awaits.PUBCOMP),
        (packets.Pubrec, Awaits.RESUMED),
        (packets.Pubcomp, Awaits.PUBCOMP),
        (packets.Pubcomp, Awaits.PUBREL),
        (packets.Pubcomp, Awaits.RESUMED),
    }
)
