"""The receiving half of a server's connection: from bytes to events.

Most packets are PUBLISH or PUBACK; runs of them are parsed in one loop over the received bytes. All others are decoded
packet by packet.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from flowcontrol.credit import Inflight
from protocols.connection import ConnectionFailed
from protocols.errors import PeerError
from protocols.mqtt import events, packets
from protocols.mqtt.aliases import TopicAliases
from protocols.mqtt.checks import check_auth, check_disconnect, check_subscribe, refused_flags, resolve_topic
from protocols.mqtt.codec import Reader
from protocols.mqtt.decoding import check_flags, decode_connect_rest, decode_packet, decode_topic, decode_version
from protocols.mqtt.framing import SMALLEST, FrameBuffer, read_length
from protocols.mqtt.packets import Packet, Version
from protocols.mqtt.properties import NONE, decode_properties
from protocols.mqtt.reasons import PacketType, ReasonCode, malformed, protocol_error
from protocols.mqtt.sending import OPEN, PUBACK, PUBCOMP, PUBREC, PUBREL, Sender
from protocols.mqtt.states import UNLIMITED, Awaits, Limits, State, Turn, check_legal, publish_flags

try:
    from protocols.mqtt._native import take_usual
except ImportError:  # not built, or switched off: `gateway.native` reports it
    from protocols.mqtt.usual import take_usual

GRACE: Final = 1.5  # multiple of the keep alive [MQTT-3.1.2-22]
ACKNOWLEDGEMENT: Final = 4  # size in bytes of an acknowledgement without reason code
PINGRESP: Final = b"\xd0\x00"


class Receiver(Sender):
    """The receiving half of a connection; enforces `LEGAL` and what CONNACK announced."""

    __slots__ = (
        "_aliases", "_announced", "_draining", "_flags", "_frames", "_grace", "_limits", "_max_in", "_method", "_now",
        "_received_at", "_turn",
    )  # fmt: skip

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits.outgoing_inflight)
        self._limits = limits
        self._announced = NONE
        self._method: str | None = None
        self._turn = Turn.NONE
        self._max_in = limits.max_connect_bytes
        self._flags = publish_flags()
        self._frames = FrameBuffer()
        self._aliases: dict[int, str] = {}
        self._now = 0.0
        self._received_at = 0.0
        self._grace: float | None = None
        self._draining = False  # after DISCONNECT: earlier requests may still be answered

    @property
    def unparsed(self) -> bytes:
        """Received bytes that are not parsed yet: an incomplete packet, or packets sent ahead of CONNACK."""
        return self._frames.waiting

    def _parse(self, buffer: bytes, found: list[Any]) -> None:
        """Parse complete packets; buffer the rest."""
        position, size, needed = 0, len(buffer), SMALLEST
        try:
            while position + SMALLEST <= size:
                if self.state is OPEN:
                    position, needed = self._parse_usual(buffer, position, found)
                    if needed != SMALLEST or position + SMALLEST > size:
                        break
                start, end = self._frame(buffer, position)
                if end > size:
                    needed = end - position
                    break
                self._packet(buffer[position], buffer, start, end, found)
                position = end
                if self.state is State.CONNECTING:
                    needed = 0
                    break
                if self._draining or self.state is State.CLOSED:
                    return
        except PeerError as fault:
            found.append(self._fail(fault))
            return
        if position:
            self._received_at = self._now
        if position < size:
            self._frames.keep(buffer[position:] if position else buffer, needed)

    def _frame(self, buffer: bytes, position: int) -> tuple[int, int]:
        """Check a packet's header, before the packet is complete, and return where its body starts and ends.

        With an incomplete header the end lies beyond the buffer. A PUBLISH's flags are checked when it is complete.
        """
        first = buffer[position]
        if self.state is not OPEN or first & 0xF0 != 0x30:
            check_legal(first, self.state, self.version, self._method)
        header = read_length(buffer, position + 1, len(buffer))
        if header is None:
            return position, len(buffer) + 1
        length, start, overlong = header
        if overlong and self.version is Version.V5:
            raise malformed("a remaining length with more bytes than needed")
        end = start + length
        if end - position > self._max_in:
            raise self._too_large(end - position)
        return start, end

    def _too_large(self, size: int) -> PeerError:
        return PeerError(ReasonCode.PACKET_TOO_LARGE, f"a packet of {size} bytes exceeds the maximum of {self._max_in}")

    def _parse_usual(self, buffer: bytes, position: int, found: list[Any]) -> tuple[int, int]:
        """Parse a run of the usual packets: PUBLISH, and acknowledgements without reason code.

        `take_usual` (C) parses valid ones; the others, and without C all of them, are parsed here one by one.

        Returns:
            The position of the first other packet or incomplete PUBLISH, and the number of bytes it needs to be parsed.
        """
        size, needed = len(buffer), SMALLEST
        inbound, outbound = self.inbound, self.outbound
        v5 = self.version is Version.V5
        aliases = self._announced.topic_alias_maximum or 0
        while True:
            position, taken, freed = take_usual(
                buffer, position, found, v5, self._max_in, inbound.free, self._flags, aliases, self._aliases,
                self._qos2, self._awaited,
            )  # fmt: skip
            if taken:
                inbound.take(taken)
            if freed:
                outbound.release(freed)
            if position + 1 >= size:
                break
            first = buffer[position]
            if first & 0xF0 != 0x30:
                if not self._plain_acknowledgement(first, buffer, position, found):
                    break
                position += ACKNOWLEDGEMENT
                continue
            start, end = self._frame(buffer, position)
            if end > size:
                needed = end - position
                break
            found.append(self._publish(first, buffer, start, end))
            position = end
        return position, needed

    def _publish(self, first: int, buffer: bytes, start: int, end: int) -> events.PublishReceived:
        """Decode a complete PUBLISH (section 3.3)."""
        flags = self._flags[first & 0x0F]
        if flags is None:
            raise refused_flags(first, self._announced)
        qos, retain, dup = flags
        v5 = self.version is Version.V5
        if end - start < 2:
            raise malformed("PUBLISH without a topic")
        at = start + 2 + (buffer[start] << 8 | buffer[start + 1])
        name = buffer[start + 2 : at]
        packet_id = 0
        if qos:
            if at + 2 > end:
                raise malformed("PUBLISH ends inside its topic or packet identifier")
            packet_id = buffer[at] << 8 | buffer[at + 1]
            at += 2
            if not packet_id:
                raise protocol_error("packet identifier 0")  # [MQTT-2.2.1-3]
        elif at > end:
            raise malformed("PUBLISH ends inside its topic")
        topic = decode_topic(name)
        properties = None
        if v5:
            properties, at = decode_properties(buffer, at, end, PacketType.PUBLISH)
            topic = resolve_topic(topic, properties, self._aliases, self._announced.topic_alias_maximum or 0)
        elif not topic:
            raise malformed("an empty topic")  # [MQTT-4.7.3-1]
        if qos and not (qos == 2 and packet_id in self._qos2):
            if not self.inbound.free:
                raise PeerError(ReasonCode.RECEIVE_MAXIMUM_EXCEEDED, "more messages than Receive Maximum allows")
            self.inbound.take()
            if qos == 2:
                self._qos2[packet_id] = True
        return events.PublishReceived(topic, buffer[at:end], qos, retain, dup, packet_id, properties)

    def _plain_acknowledgement(self, first: int, buffer: bytes, position: int, found: list[Any]) -> bool:
        """Handle an awaited acknowledgement without reason code; return False for any other packet."""
        if position + ACKNOWLEDGEMENT > len(buffer) or buffer[position + 1] != 2:
            return False
        packet_id = buffer[position + 2] << 8 | buffer[position + 3]
        awaited = self._awaited.get(packet_id)
        if first == 0x62 and packet_id:
            found.append(events.PubrelReceived(packet_id))
        elif first == 0x40 and awaited is PUBACK:
            del self._awaited[packet_id]
            self.outbound.release()
            found.append(events.PubackReceived(packet_id))
        elif first == 0x50 and awaited is PUBREC:
            self._awaited[packet_id] = PUBREL
            found.append(events.PubrecReceived(packet_id))
        elif first == 0x70 and awaited is PUBCOMP:
            del self._awaited[packet_id]
            self.outbound.release()
            found.append(events.PubcompReceived(packet_id))
        else:
            return False
        return True

    def _packet(self, first: int, buffer: bytes, start: int, end: int, found: list[Any]) -> None:
        """Handle any packet except PUBLISH."""
        body = buffer[start:end]
        if first >> 4 == PacketType.CONNECT:
            self._connect(first, body, found)
            return
        assert self.version is not None
        packet = decode_packet(first, body, self.version)
        match packet:
            case packets.Pingreq():
                self._out += PINGRESP  # [MQTT-3.12.4-1]
            case packets.Puback() | packets.Pubrec() | packets.Pubcomp():
                self._acknowledged(packet, found)
            case packets.Pubrel():
                found.append(_event(packet))
            case packets.Subscribe():
                if self.version is Version.V5:
                    check_subscribe(packet, self._announced)
                found.append(_event(packet))
            case packets.Unsubscribe():
                found.append(_event(packet))
            case packets.Disconnect():
                assert self.connect is not None
                check_disconnect(packet, self.connect)
                found.append(_event(packet))
                if self.state is OPEN:
                    self._draining = True
                    self._frames.clear()
                else:
                    self._close()
            case packets.Auth():
                check_auth(packet, self._method, self._turn)
                self._turn = Turn.SERVER
                found.append(_event(packet))
            case _:
                raise protocol_error(f"{type(packet).__name__} from a client")

    def _connect(self, first: int, body: bytes, found: list[Any]) -> None:
        reader = Reader(body)
        try:
            self.version = decode_version(reader)
        except PeerError as fault:
            if fault.code == ReasonCode.UNSUPPORTED_PROTOCOL_VERSION:
                # Answer in the format of the requested family: 3.1.1 [MQTT311-3.1.2-2], or 5.0 for all others.
                self.version = Version.V311 if body[reader.position - 1] in (3, 4) else Version.V5
            raise
        if self.version is not Version.V31:
            check_flags(first, self.version)
        connect = decode_connect_rest(reader, self.version)
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
        found.append(events.ConnectReceived(*msgspec.structs.astuple(connect)))

    def _acknowledged(self, packet: packets.Puback | packets.Pubrec | packets.Pubcomp, found: list[Any]) -> None:
        """Match an acknowledgement with the awaited one; one for an unused packet identifier is ignored."""
        awaited = self._awaited.get(packet.packet_id)
        if awaited is None or awaited is Awaits.RESERVED:
            # For an earlier connection or an unknown message. A reserved one is resent, and then acknowledged again.
            if type(packet) is packets.Pubrec and packet.reason_code < 0x80:
                found.append(_event(packet))  # the session answers with PUBREL
            return
        kind = type(packet)
        refused = kind is packets.Pubrec and packet.reason_code >= 0x80
        if kind is packets.Pubrec and not refused and awaited is not Awaits.PUBREC and awaited is not Awaits.PUBACK:
            found.append(_event(packet))  # repeated: the session sends PUBREL again
            return
        if (kind, awaited) not in _ANSWERS:
            raise protocol_error(f"{kind.__name__} where {awaited.value} is awaited")
        if kind is packets.Pubrec and not refused:
            self._awaited[packet.packet_id] = Awaits.PUBREL
        else:
            del self._awaited[packet.packet_id]
            if awaited is not Awaits.RESUMED:
                self.outbound.release()
        found.append(_event(packet))

    # closing

    def _fail(self, fault: PeerError) -> ConnectionFailed:
        """Send DISCONNECT or CONNACK for an error, as the version allows [MQTT-4.13.1-1], and close."""
        assert isinstance(fault.code, int)
        if self.state is State.OPEN:
            self._write_disconnect(fault.code, fault.reason, NONE)
        elif self.version is not None:
            self._write_connack(fault.code, fault.reason, NONE)
        self._close()
        return ConnectionFailed(fault.reason, f"0x{fault.code:02X}")

    def _close(self) -> None:
        self.state = State.CLOSED
        self._frames.clear()


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
_EVENTS: Final[dict[type, type]] = {
    packets.Puback: events.PubackReceived,
    packets.Pubrec: events.PubrecReceived,
    packets.Pubrel: events.PubrelReceived,
    packets.Pubcomp: events.PubcompReceived,
    packets.Subscribe: events.SubscribeReceived,
    packets.Unsubscribe: events.UnsubscribeReceived,
    packets.Disconnect: events.DisconnectReceived,
    packets.Auth: events.AuthReceived,
}


def _event(packet: Packet) -> Any:
    return _EVENTS[type(packet)](*msgspec.structs.astuple(packet))
