"""The server's side of one MQTT connection, 5.0, 3.1.1 and 3.1: bytes in, events out, bytes out.

What is legal is `LEGAL`; what the server can do is what CONNACK announced, and that is enforced here. The meaning of
the events is the session's business.

    NEW --CONNECT--> CONNECTING --accept--> OPEN --DISCONNECT, a fault, a goodbye of ours--> CLOSED
    NEW --CONNECT with an authentication method--> AUTHENTICATING --accept--> OPEN
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from flowcontrol.credit import Inflight
from protocols.connection import ConnectionFailed
from protocols.errors import PeerError, UsageError
from protocols.mqtt import events, packets
from protocols.mqtt.aliases import TopicAliases
from protocols.mqtt.checks import check_auth, check_disconnect, check_subscribe, refused_flags, resolve_topic
from protocols.mqtt.codec import Reader
from protocols.mqtt.decoding import check_flags, decode_connect_rest, decode_packet, decode_topic, decode_version
from protocols.mqtt.encoding import encode_packet
from protocols.mqtt.framing import FrameBuffer, read_length
from protocols.mqtt.packets import Packet, Version
from protocols.mqtt.properties import NONE, Properties, decode_properties
from protocols.mqtt.reasons import PacketType, ReasonCode, malformed, protocol_error
from protocols.mqtt.sending import Sender
from protocols.mqtt.states import LARGEST_PACKET, UNLIMITED, Awaits, Limits, State, Turn, check_legal, publish_flags

TOPIC_CACHE: Final = 1024  # topics of one connection that are known to be good; a sensor has a few, a bridge many
GRACE: Final = 1.5  # of the keep alive [MQTT-3.1.2-22]
PINGRESP: Final = b"\xd0\x00"

__all__ = ["Connection", "Limits", "State"]


class Connection(Sender):
    """The server's side of one connection; see `protocols.connection.Connection` for how it is driven.

    Once `closing` is true nothing is parsed any more.
    """

    __slots__ = (
        "_aliases", "_announced", "_connected_at", "_eof", "_flags", "_frames", "_grace", "_heard_at", "_limits",
        "_max_in", "_method", "_now", "_suspended", "_topics", "_turn",
    )  # fmt: skip

    def __init__(self, limits: Limits | None = None) -> None:
        limits = limits or Limits()
        super().__init__(limits.outgoing_inflight)
        self._limits = limits
        self._announced = NONE
        self._method: str | None = None
        self._turn = Turn.NOBODY
        self._max_in = limits.max_connect_bytes
        self._flags = publish_flags()
        self._frames = FrameBuffer()
        self._topics: dict[bytes, str] = {}
        self._aliases: dict[int, str] = {}
        self._now = 0.0
        self._connected_at: float | None = None
        self._heard_at = 0.0
        self._grace: float | None = None
        self._suspended = False
        self._eof = False

    # driven by the shell

    def receive_data(self, data: bytes) -> list[Any]:
        """Take bytes as they came and return what they mean; a fault ends the list with `ConnectionFailed`."""
        state = self.state
        if state is State.CLOSED:
            return []
        if state is State.CONNECTING:
            return self._hold(data)
        buffer = self._frames.join(data)
        found: list[Any] = []
        if buffer:
            self._parse(buffer, found)
        return found

    def receive_eof(self) -> list[Any]:
        """The client closed without DISCONNECT. What it sent ahead of CONNACK is still heard after `accept`."""
        if self.state is State.CLOSED:
            return []
        if self.state is State.CONNECTING:
            self._eof = True
            return []
        self._close()
        return [ConnectionFailed("closed without DISCONNECT", "")]

    def next_deadline(self) -> float | None:
        """When `tick` must be called at the latest."""
        state = self.state
        silent = None if self._grace is None or self._suspended else self._heard_at + self._grace
        if state is State.OPEN:
            return silent
        if state in (State.NEW, State.AUTHENTICATING) and self._connected_at is not None:
            deadline = self._connected_at + self._limits.connect_timeout_s
            return deadline if silent is None or self._turn is not Turn.CLIENT else min(deadline, silent)
        return None

    def tick(self, now: float) -> list[Any]:
        """Tell the time. A client that is silent for 1.5 times its keep alive is dropped [MQTT-3.1.2-22]."""
        self._now = now
        if self._connected_at is None:
            self._connected_at = self._heard_at = now
        deadline = self.next_deadline()
        if deadline is None or now < deadline:
            return []
        if self.state is State.OPEN:
            return [self._fail(PeerError(ReasonCode.KEEP_ALIVE_TIMEOUT, "nothing heard for 1.5 times the keep alive"))]
        if self.state is State.AUTHENTICATING:
            return [self._fail(PeerError(ReasonCode.NOT_AUTHORIZED, "authentication took too long"))]
        self._close()
        return [ConnectionFailed("no CONNECT in time", "")]

    @property
    def closing(self) -> bool:
        """Nothing more is to be read: write what is left, then close the socket."""
        return self.state is State.CLOSED

    @property
    def is_open(self) -> bool:
        """Whether `accept` was said and no goodbye since."""
        return self.state is State.OPEN

    def suspend_keepalive(self) -> None:
        """The shell stopped reading: silence is no longer the client's."""
        self._suspended = True

    def resume_keepalive(self, now: float) -> None:
        """The shell reads again; the keep alive begins anew."""
        self._suspended = False
        self._now = self._heard_at = now

    # verbs: opening and closing

    def accept(
        self,
        session_present: bool = False,
        properties: Properties = NONE,
        *,
        received: Iterable[int] = (),
        reserved: Iterable[int] = (),
    ) -> list[Any]:
        """Answer CONNECT with success; what `properties` announces is enforced from here on.

        An absent property means the standard's default (all of QoS 2, retained messages, wildcards, shared
        subscriptions and subscription identifiers; no topic aliases; Receive Maximum 65,535). Maximum Packet Size is
        announced from the limits when it is absent. A 3.1.1 client is told nothing, and is not held to Receive
        Maximum and Server Keep Alive; what else is announced is enforced on it by closing.

        Args:
            session_present: whether the session was there before [MQTT-3.2.2-2], [MQTT-3.2.2-3].
            properties: of CONNACK.
            received: packet identifiers of the client between PUBLISH and PUBREL in the session that is resumed. A
                PUBLISH with one of them is given to the session again, which knows it [MQTT-4.3.3-10].
            reserved: packet identifiers of ours in that session; no other message gets one of them. Each leaves with
                `send_publish` or `send_prepared` (`packet_id=`) or `send_pubrel`, or `release_reserved` frees it.

        Returns:
            The events of what the client had sent ahead, in order.

        Raises:
            UsageError: no CONNECT to answer, or a packet identifier outside 1..65,535.
        """
        connect = self.connect
        if connect is None or self.state not in (State.CONNECTING, State.AUTHENTICATING):
            raise UsageError(f"accept in state {self.state.name}")
        if properties.maximum_packet_size is None:
            properties = msgspec.structs.replace(properties, maximum_packet_size=self._limits.max_packet_bytes)
        if properties.authentication_method not in (None, self._method):
            raise UsageError("another authentication method than in CONNECT")  # [MQTT-4.12.0-6]
        properties = msgspec.structs.replace(properties, authentication_method=self._method)  # [MQTT-4.12.0-5]
        if connect.version is Version.V31:
            session_present = False  # that byte of 3.1's CONNACK is reserved
        data = encode_packet(packets.Connack(session_present, 0, properties), connect.version)
        if len(data) > self._max_out:  # what it can do without
            properties = msgspec.structs.replace(
                properties, reason_string=None, user_properties=(), response_information=None, topic_alias_maximum=None
            )
            data = encode_packet(packets.Connack(session_present, 0, properties), connect.version)
            if len(data) > self._max_out:
                return [self._fail(PeerError(ReasonCode.PACKET_TOO_LARGE, "the client cannot take our CONNACK"))]
        self._announce(connect, properties)
        self._restore(received, reserved)
        self._out += data
        self._turn = Turn.NOBODY
        self.state = State.OPEN
        self._heard_at = self._now
        held = self._frames.take()
        found: list[Any] = []
        if held:
            self._parse(held, found)
        if self._eof and self.is_open:
            found += self.receive_eof()
        return found

    def refuse(self, reason_code: int, reason_string: str | None = None, properties: Properties = NONE) -> None:
        """Answer CONNECT with a failure and close; 3.1.1 gets the nearest return code, or none."""
        if self.connect is None or self.state not in (State.CONNECTING, State.AUTHENTICATING):
            if self.state is State.CLOSED:
                return
            raise UsageError(f"refuse in state {self.state.name}")
        self._say_connack(reason_code, reason_string, properties)
        self._close()

    def send_auth(self, reason_code: int, properties: Properties = NONE) -> None:
        """Answer a CONNECT with a method, or an AUTH: with 0x18 the client goes on.

        With 0x00 a re-authentication has succeeded; the first authentication ends with `accept`. Both end in failure
        with `send_disconnect`. The method of CONNECT is put in [MQTT-4.12.0-5].

        Raises:
            UsageError: there is nothing to answer, or a code that is not due.
        """
        if self.state is State.CLOSED:
            return
        codes = (0x18,) if self.state is State.AUTHENTICATING else (0x00, 0x18)
        if self._turn is not Turn.SERVER or reason_code not in codes:
            raise UsageError(f"AUTH 0x{reason_code:02X} in state {self.state.name}, turn of {self._turn.value}")
        self._say(packets.Auth(reason_code, msgspec.structs.replace(properties, authentication_method=self._method)))
        self._turn = Turn.CLIENT if reason_code else Turn.NOBODY
        if self.state is State.AUTHENTICATING:
            self._heard_at = self._now  # until now the silence was ours

    def send_disconnect(
        self, reason_code: int, reason_string: str | None = None, properties: Properties = NONE
    ) -> None:
        """Say goodbye and close. 3.1.1 has no words for it; before `accept` CONNACK is the goodbye."""
        if self.state is State.OPEN:
            self._say_disconnect(reason_code, reason_string, properties)
        elif self.state in (State.CONNECTING, State.AUTHENTICATING):
            self._say_connack(reason_code, reason_string, properties)
        self._close()

    # parsing

    def _parse(self, buffer: bytes, found: list[Any]) -> None:
        """Parse whole packets; keep the rest. PUBLISH and PUBACK, which most packets are, are taken apart here."""
        position = 0
        size = len(buffer)
        needed = 2
        taken = 0
        room = self.inbound.free
        known = self._topics
        flags_table = self._flags
        v5 = 1 if self.version is Version.V5 else 0
        is_open = self.state is State.OPEN
        limit = self._max_in
        aliases = self._announced.topic_alias_maximum or 0
        awaited = self._awaited
        received = events.PublishReceived
        acknowledged = events.PubackReceived
        try:
            while position + 2 <= size:
                first = buffer[position]
                length = buffer[position + 1]
                start = position + 2
                publish = is_open and first & 0xF0 == 0x30
                if not publish:
                    if first == 0x40 and length == 2 and is_open and start + 2 <= size:
                        packet_id = buffer[start] << 8 | buffer[start + 1]
                        if awaited.get(packet_id) is Awaits.PUBACK:
                            del awaited[packet_id]
                            self.outbound.release()
                            found.append(acknowledged(packet_id))
                            position = start + 2
                            continue
                    check_legal(first, self.state, self.version, self._method)
                if length > 0x7F:
                    if start < size and 0 < buffer[start] < 0x80:  # two bytes, as most have
                        length += (buffer[start] << 7) - 0x80
                        start += 1
                    else:
                        header = read_length(buffer, position + 1, size)
                        if header is None:
                            break
                        length, start, overlong = header
                        if overlong and v5:
                            raise malformed("a remaining length longer than it needs to be")
                end = start + length
                if end - position > limit:
                    raise PeerError(
                        ReasonCode.PACKET_TOO_LARGE, f"a packet of {end - position} bytes, {limit} are allowed"
                    )
                if end > size:
                    needed = end - position
                    break
                if not publish:
                    if taken:
                        self.inbound.take(taken)
                        taken = 0
                    self._packet(first, buffer, start, end, found)
                    position = end
                    state = self.state
                    if state is not State.OPEN:
                        if state is State.CLOSED:
                            return
                        if state is State.CONNECTING:
                            needed = 0
                            break
                        limit = self._max_in
                    room = self.inbound.free
                    continue
                flags = flags_table[first & 0x0F]
                if flags is None:
                    raise refused_flags(first, self._announced)
                qos, retain, dup = flags
                if length < 2:
                    raise malformed("PUBLISH without a topic")
                at = start + 2 + (buffer[start] << 8 | buffer[start + 1])
                topic = known.get(buffer[start + 2 : at])
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
                if topic is None:
                    topic = self._learn(buffer[start + 2 : at - 2 if qos else at])
                properties = None
                if v5:
                    if at < end and not buffer[at]:
                        at += 1
                        if not topic:
                            raise malformed("neither topic nor topic alias")
                    else:
                        properties, at = decode_properties(buffer, at, end, 3)
                        topic = resolve_topic(topic, properties, self._aliases, aliases)
                elif not topic:
                    raise malformed("an empty topic")  # [MQTT-4.7.3-1]
                if qos and not (qos == 2 and packet_id in self._qos2):
                    taken += 1
                    if taken > room:
                        raise PeerError(ReasonCode.RECEIVE_MAXIMUM_EXCEEDED, "more messages on the way than allowed")
                    if qos == 2:
                        self._qos2.add(packet_id)
                found.append(received(topic, buffer[at:end], qos, retain, dup, packet_id, properties))
                position = end
                if properties is None and qos != 2 and end < size and buffer[end] == first:
                    before = len(found)
                    position = self._parse_alike(buffer, start, end, room - taken, found)
                    if qos:
                        taken += len(found) - before
        except PeerError as fault:
            found.append(self._fail(fault))
            return
        if taken:
            self.inbound.take(taken)
        if position:
            self._heard_at = self._now
        if position < size:
            self._frames.keep(buffer[position:] if position else buffer, needed)

    def _parse_alike(self, buffer: bytes, start: int, end: int, room: int, found: list[Any]) -> int:
        """Take the PUBLISH packets at `end` that have the flags and the topic of the last one found.

        Both are judged already. Where there is anything else to say of a packet (properties, a packet identifier
        of 0, no room for more), it is left to `_parse`.

        Args:
            buffer: the packets.
            start: where the last one found has its topic, with the length before it.
            end: where it ends.
            room: how many more the client may have on the way.
            found: takes the events.

        Returns:
            Where the next packet begins.
        """
        like = found[-1]
        topic, qos, retain, dup = like.topic, like.qos, like.retain, like.dup
        first = 0x30 | qos << 1 | retain | dup << 3
        v5 = self.version is Version.V5
        name = buffer[start : start + 2 + (buffer[start] << 8 | buffer[start + 1])]
        head, skip, whole = b"\0", 0, 0  # of a packet of the same length: no PUBLISH begins like this yet
        size, limit = len(buffer), self._max_in
        begins = buffer.startswith
        received, add = events.PublishReceived, found.append
        packet_id = 0
        while end + 2 < size:
            if begins(head, end):
                behind, at = end + whole, end + skip
                if behind > size:
                    break
            else:
                length, start = buffer[end + 1], end + 2
                if length > 0x7F:
                    high = buffer[start]
                    if not 0 < high < 0x80:
                        break
                    length += (high << 7) - 0x80
                    start += 1
                behind, at = start + length, start + len(name)
                if behind > size or behind - end > limit or buffer[end] != first or not begins(name, start):
                    break
                head, skip, whole = buffer[end:at], at - end, behind - end
            if qos:
                if at + 2 > behind or not room:
                    break
                packet_id = buffer[at] << 8 | buffer[at + 1]
                if not packet_id:
                    break
                room -= 1
                at += 2
            if v5:
                if at >= behind or buffer[at]:
                    break
                at += 1
            elif at > behind:
                break
            add(received(topic, buffer[at:behind], qos, retain, dup, packet_id, None))
            end = behind
        return end

    def _packet(self, first: int, buffer: bytes, start: int, end: int, found: list[Any]) -> None:
        """Act on any packet but PUBLISH."""
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
                # In the format of the family that was asked for: 3.1.1 [MQTT311-3.1.2-2], or 5.0 for all others.
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
            self._given = TopicAliases(aliases)
        self._grace = connect.keep_alive * GRACE if connect.keep_alive else None
        self._method = properties.authentication_method
        if self._method is None:
            self.state = State.CONNECTING
        else:
            self.state = State.AUTHENTICATING
            self._turn = Turn.SERVER
        found.append(events.ConnectReceived(*msgspec.structs.astuple(connect)))

    def _hold(self, data: bytes) -> list[Any]:
        """Keep what a client sends ahead of our CONNACK (section 3.1.4), within bounds."""
        self._frames.keep(data, 0)
        if len(self._frames) > self._limits.max_held_bytes:
            return [self._fail(PeerError(ReasonCode.QUOTA_EXCEEDED, "too much was sent ahead of CONNACK"))]
        return []

    def _announce(self, connect: packets.Connect, properties: Properties) -> None:
        """Turn what CONNACK said into what is enforced."""
        self._announced = properties
        v5 = connect.version is Version.V5
        self._max_in = properties.maximum_packet_size or LARGEST_PACKET
        if v5 and self._limits.enforce_receive_maximum:
            self.inbound = Inflight(properties.receive_maximum or UNLIMITED)
        if v5 and properties.server_keep_alive is not None:  # [MQTT-3.2.2-21]
            self._grace = properties.server_keep_alive * GRACE if properties.server_keep_alive else None
        maximum_qos = 2 if properties.maximum_qos is None else properties.maximum_qos
        self._flags = publish_flags(maximum_qos, properties.retain_available != 0)

    def _restore(self, received: Iterable[int], reserved: Iterable[int]) -> None:
        """Take over what a session brings along; none of it has a place in this connection's windows."""
        self._resumed.update(received)
        self._qos2.update(self._resumed)
        self._awaited.update(dict.fromkeys(reserved, Awaits.RESERVED))
        for packet_id in (*self._resumed, *self._awaited):
            if not 1 <= packet_id <= UNLIMITED:
                raise UsageError(f"a packet identifier is 1..{UNLIMITED}, got {packet_id}")
        # The client's own count gains a place with each PUBCOMP, also for a PUBLISH of an earlier connection
        # (section 4.9): it may then have as many more on the way.
        self.inbound.limit += len(self._resumed)

    def _learn(self, data: bytes) -> str:
        topic = decode_topic(data)
        if topic:
            if len(self._topics) >= TOPIC_CACHE:
                self._topics.clear()
            self._topics[data] = topic
        return topic

    def _acknowledged(self, packet: packets.Puback | packets.Pubrec | packets.Pubcomp, found: list[Any]) -> None:
        """Match an acknowledgement with what is awaited; one for an identifier that is not in use says nothing."""
        awaited = self._awaited.get(packet.packet_id)
        if awaited is None or awaited is Awaits.RESERVED:
            # Of an earlier connection, or of nothing. What is reserved is sent again and then acknowledged again.
            if type(packet) is packets.Pubrec and packet.reason_code < 0x80:
                found.append(_event(packet))  # the session answers with PUBREL
            return
        kind = type(packet)
        refused = kind is packets.Pubrec and packet.reason_code >= 0x80
        if kind is packets.Pubrec and not refused and awaited is not Awaits.PUBREC and awaited is not Awaits.PUBACK:
            found.append(_event(packet))  # again: the session sends PUBREL again
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

    # the end

    def _fail(self, fault: PeerError) -> ConnectionFailed:
        """Say the version's goodbye for a fault [MQTT-4.13.1-1] and close."""
        assert isinstance(fault.code, int)
        if self.state is State.OPEN:
            self._say_disconnect(fault.code, fault.reason, NONE)
        elif self.version is not None:
            self._say_connack(fault.code, fault.reason, NONE)
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
