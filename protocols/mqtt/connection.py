"""The server's side of one MQTT connection, 5.0, 3.1.1 and 3.1: bytes in, events out, bytes out.

What is legal is `LEGAL`; what the server can do is what CONNACK announced, and that is enforced here. The meaning of
the events is the session's business.

    NEW --CONNECT--> CONNECTING --accept--> OPEN --DISCONNECT, a fault, a goodbye of ours--> CLOSED
    NEW --CONNECT with an authentication method--> AUTHENTICATING --accept--> OPEN
"""

from __future__ import annotations

import array
import enum
import sys
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from flowcontrol.credit import Inflight
from protocols.connection import ConnectionFailed
from protocols.errors import PeerError, UsageError
from protocols.mqtt import events, packets, topics
from protocols.mqtt.codec import Reader, encode_varint
from protocols.mqtt.decoding import check_flags, decode_connect_rest, decode_packet, decode_topic, decode_version
from protocols.mqtt.encoding import PreparedPublish, encode_packet, prepare_publish
from protocols.mqtt.framing import FrameBuffer, read_length
from protocols.mqtt.packets import Packet, Version
from protocols.mqtt.properties import NONE, Properties, decode_properties
from protocols.mqtt.reasons import (
    CLIENT_DISCONNECT_CODES,
    REASON_CODES,
    RETURN_CODES,
    PacketType,
    ReasonCode,
    malformed,
    protocol_error,
)

TOPIC_CACHE: Final = 1024  # topics of one connection that are known to be good; a sensor has a few, a bridge many
UNLIMITED: Final = 65_535  # Receive Maximum when none is given (section 3.1.2.11.3)
GRACE: Final = 1.5  # of the keep alive [MQTT-3.1.2-22]
LARGEST_PACKET: Final = 268_435_460  # what a remaining length can say, with the longest header
PINGRESP: Final = b"\xd0\x00"
CONNACK_SIZE: Final = 5  # the smallest CONNACK of MQTT 5.0; who cannot take it cannot be answered


class State(enum.Enum):
    """Where a connection is."""

    NEW = "new"
    CONNECTING = "connecting"  # CONNECT is being judged; what the client sends ahead waits
    AUTHENTICATING = "authenticating"  # the same, with an authentication method: AUTH goes to and fro
    OPEN = "open"
    CLOSED = "closed"


_T: Final = PacketType
LEGAL: Final[dict[State, frozenset[PacketType]]] = {
    State.NEW: frozenset({_T.CONNECT}),  # [MQTT-3.1.0-1]
    State.CONNECTING: frozenset(),  # nothing is parsed
    State.AUTHENTICATING: frozenset({_T.AUTH, _T.DISCONNECT}),  # [MQTT-3.1.2-30]
    State.OPEN: frozenset(
        {
            _T.PUBLISH, _T.PUBACK, _T.PUBREC, _T.PUBREL, _T.PUBCOMP, _T.SUBSCRIBE, _T.UNSUBSCRIBE, _T.PINGREQ,
            _T.DISCONNECT, _T.AUTH,
        }
    ),  # a second CONNECT is not among them [MQTT-3.1.0-2]
    State.CLOSED: frozenset(),
}  # fmt: skip
"""Which packets a client may send in which state. AUTH also needs a method in CONNECT [MQTT-4.12.0-7]."""

_FLAGS: Final[tuple[tuple[int, bool, bool] | None, ...]] = tuple(
    None if flags >> 1 & 3 == 3 or flags & 0b1110 == 0b1000 else (flags >> 1 & 3, bool(flags & 1), bool(flags & 8))
    for flags in range(16)
)
"""PUBLISH's flags as (qos, retain, dup); None: QoS 3 [MQTT-3.3.1-4] or DUP at QoS 0 [MQTT-3.3.1-2]."""


class Awaits(enum.Enum):
    """What the client owes for a packet identifier of ours."""

    PUBACK = "PUBACK"
    PUBREC = "PUBREC"
    PUBREL = "PUBREL"  # ours to send: PUBREC came
    PUBCOMP = "PUBCOMP"


class Limits(msgspec.Struct, frozen=True):
    """What one connection may ask of us.

    Attributes:
        max_connect_bytes: the largest packet before `accept`; a stranger gets no more.
        max_packet_bytes: the largest packet after it; announced in CONNACK.
        connect_timeout_s: how long CONNECT, and an exchange of AUTH, may take.
        outgoing_inflight: most QoS 1 and 2 messages on the way to the client; its Receive Maximum may be lower.
        enforce_receive_maximum: DISCONNECT 0x93 for a client that overruns ours; False tolerates it.
        max_held_bytes: most bytes that a client may send ahead while its CONNECT is judged.
    """

    max_connect_bytes: int = 65_536
    max_packet_bytes: int = 2 * 1024 * 1024
    connect_timeout_s: float = 10.0
    outgoing_inflight: int = 1000
    enforce_receive_maximum: bool = True
    max_held_bytes: int = 1024 * 1024


class Connection:
    """The server's side of one connection; see `protocols.connection.Connection` for how it is driven.

    After `closing` is true nothing is parsed any more, and verbs that answer the client do nothing: an
    acknowledgement may come from Kafka after the goodbye.

    Attributes:
        version: of the protocol; None before CONNECT.
        state: where the connection is.
        connect: the CONNECT that was received.
        inbound: QoS 1 and 2 messages from the client that are not acknowledged, against our Receive Maximum.
        outbound: ours that the client has not acknowledged, against its Receive Maximum.
    """

    __slots__ = (
        "_aliases",
        "_announced",
        "_awaited",
        "_connected_at",
        "_eof",
        "_flags",
        "_frames",
        "_grace",
        "_heard_at",
        "_limits",
        "_max_in",
        "_max_out",
        "_method",
        "_next_id",
        "_now",
        "_out",
        "_qos2",
        "_suspended",
        "_topics",
        "connect",
        "inbound",
        "outbound",
        "state",
        "version",
    )  # fmt: skip

    def __init__(self, limits: Limits = Limits()) -> None:
        self.version: Version | None = None
        self.state = State.NEW
        self.connect: packets.Connect | None = None
        self.inbound = Inflight(UNLIMITED)
        self.outbound = Inflight(limits.outgoing_inflight)
        self._limits = limits
        self._announced = NONE
        self._method: str | None = None
        self._max_in = limits.max_connect_bytes
        self._max_out = LARGEST_PACKET
        self._flags = _FLAGS
        self._frames = FrameBuffer()
        self._out = bytearray()
        self._topics: dict[bytes, str] = {}
        self._aliases: dict[int, str] = {}
        self._qos2: set[int] = set()  # identifiers of the client between PUBLISH and PUBCOMP
        self._awaited: dict[int, Awaits] = {}  # identifiers of ours
        self._next_id = 1
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

    def data_to_send(self) -> bytes:
        """Take the bytes that wait to be written."""
        if not self._out:
            return b""
        data = bytes(self._out)
        self._out.clear()
        return data

    def next_deadline(self) -> float | None:
        """When `tick` must be called at the latest."""
        state = self.state
        if state is State.OPEN:
            return None if self._grace is None or self._suspended else self._heard_at + self._grace
        if state in (State.NEW, State.AUTHENTICATING):
            return None if self._connected_at is None else self._connected_at + self._limits.connect_timeout_s
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

    def accept(self, session_present: bool = False, properties: Properties = NONE) -> list[Any]:
        """Answer CONNECT with success; what `properties` announces is enforced from here on.

        An absent property means the standard's default (all of QoS 2, retained messages, wildcards, shared
        subscriptions and subscription identifiers; no topic aliases; Receive Maximum 65,535). Maximum Packet Size is
        announced from the limits when it is absent. A 3.1.1 client is told nothing, and is not held to Receive
        Maximum and Server Keep Alive; what else is announced is enforced on it by closing.

        Args:
            session_present: whether the session was there before [MQTT-3.2.2-2].
            properties: of CONNACK.

        Returns:
            The events of what the client had sent ahead, in order.
        """
        connect = self.connect
        if connect is None or self.state not in (State.CONNECTING, State.AUTHENTICATING):
            raise UsageError(f"accept in state {self.state.name}")
        if properties.maximum_packet_size is None:
            properties = msgspec.structs.replace(properties, maximum_packet_size=self._limits.max_packet_bytes)
        data = encode_packet(packets.Connack(session_present, 0, properties), connect.version)
        if len(data) > self._max_out:
            return [self._fail(PeerError(ReasonCode.PACKET_TOO_LARGE, "the client cannot take our CONNACK"))]
        self._out += data
        self._announce(connect, properties)
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

    def send_auth(self, reason_code: int, properties: Properties) -> None:
        """Send a step of enhanced authentication; `properties` names the method of CONNECT [MQTT-4.12.0-5]."""
        if self.state not in (State.AUTHENTICATING, State.OPEN) or self._method is None:
            if self.state is State.CLOSED:
                return
            raise UsageError(f"AUTH in state {self.state.name}, method {self._method}")
        self._say(packets.Auth(reason_code, properties))

    def send_disconnect(
        self, reason_code: int, reason_string: str | None = None, properties: Properties = NONE
    ) -> None:
        """Say goodbye and close. 3.1.1 has no words for it; before `accept` CONNACK is the goodbye."""
        if self.state is State.OPEN:
            self._say_disconnect(reason_code, reason_string, properties)
        elif self.state in (State.CONNECTING, State.AUTHENTICATING):
            self._say_connack(reason_code, reason_string, properties)
        self._close()

    # verbs: answers to the client's messages

    def send_pubacks(self, packet_ids: Sequence[int]) -> None:
        """Acknowledge many QoS 1 messages with success; four bytes each."""
        if self.state is not State.OPEN or not packet_ids:
            return
        count = len(packet_ids)
        self.inbound.release(count)
        words = array.array("H", (0x4002,)) * (2 * count)
        words[1::2] = array.array("H", packet_ids)
        if sys.byteorder == "little":
            words.byteswap()
        self._out += words.tobytes()

    def send_puback(self, packet_id: int, reason_code: int = 0, reason_string: str | None = None) -> None:
        """Acknowledge a QoS 1 message [MQTT-4.3.2-4]. A failure cannot be said in 3.1.1: close instead.

        Raises:
            UsageError: a failure for a 3.1.1 client.
        """
        if self.state is not State.OPEN:
            return
        if reason_code and self.version is not Version.V5:
            if reason_code >= 0x80:
                raise UsageError("PUBACK of 3.1.1 has no reason code; close the connection")
            reason_code = 0
        self.inbound.release()
        if reason_code:
            self._say(packets.Puback(packet_id, reason_code, self._explain(reason_string)))
        else:
            self._out += b"\x40\x02" + packet_id.to_bytes(2)

    def send_pubrec(self, packet_id: int, reason_code: int = 0, reason_string: str | None = None) -> None:
        """Answer a QoS 2 message [MQTT-4.3.3-8]; from 0x80 on its identifier is free again [MQTT-4.3.3-9].

        Raises:
            UsageError: a failure for a 3.1.1 client.
        """
        if self.state is not State.OPEN:
            return
        if reason_code >= 0x80:
            if self.version is not Version.V5:
                raise UsageError("PUBREC of 3.1.1 has no reason code; close the connection")
            self._release_qos2(packet_id)
        self._say(packets.Pubrec(packet_id, reason_code, self._explain(reason_string)))

    def send_pubcomp(self, packet_id: int, reason_code: int = 0) -> None:
        """Answer a PUBREL [MQTT-4.3.3-11]; the identifier is free again."""
        if self.state is not State.OPEN:
            return
        self._release_qos2(packet_id)
        self._say(packets.Pubcomp(packet_id, reason_code if self.version is Version.V5 else 0))

    def send_suback(self, packet_id: int, reason_codes: Sequence[int], properties: Properties | None = None) -> None:
        """Answer a SUBSCRIBE, one code per filter [MQTT-3.8.4-6]; 3.1.1 gets 0x80 for every failure."""
        if self.state is State.OPEN:
            self._say(packets.Suback(packet_id, tuple(reason_codes), self._allowed(properties)))

    def send_unsuback(self, packet_id: int, reason_codes: Sequence[int], properties: Properties | None = None) -> None:
        """Answer an UNSUBSCRIBE [MQTT-3.10.4-4], one code per filter [MQTT-3.11.3-1]."""
        if self.state is State.OPEN:
            self._say(packets.Unsuback(packet_id, tuple(reason_codes), self._allowed(properties)))

    # verbs: our messages

    def send_publish(
        self,
        topic: str,
        payload: bytes,
        qos: int = 0,
        *,
        retain: bool = False,
        dup: bool = False,
        properties: Properties | None = None,
        packet_id: int | None = None,
    ) -> int | None:
        """Send a message to the client.

        Args:
            topic: its topic name.
            payload: its payload.
            qos: 0 to 2.
            retain: the RETAIN flag.
            dup: sent again after a reconnect [MQTT-3.3.1-1].
            properties: of PUBLISH; ignored in 3.1.1.
            packet_id: to send an earlier one again; by default the next free one is taken.

        Returns:
            The packet identifier (0 at QoS 0). None: larger than the client takes, so it is not sent and counts
            as delivered to it [MQTT-3.1.2-25].

        Raises:
            UsageError: not open, or the client's window is full (`outbound.free`).
        """
        if self.version is None:
            raise UsageError("nothing can be published before CONNECT")
        return self.send_prepared(
            prepare_publish(topic, payload, properties, self.version), qos, retain=retain, dup=dup, packet_id=packet_id
        )

    def send_prepared(
        self,
        message: PreparedPublish,
        qos: int = 0,
        *,
        retain: bool = False,
        dup: bool = False,
        packet_id: int | None = None,
    ) -> int | None:
        """Send what `prepare_publish` encoded for this version; otherwise as `send_publish`."""
        if self.state is not State.OPEN:
            raise UsageError(f"PUBLISH in state {self.state.name}")
        head = message.topic
        rest = message.rest
        first = 0x30 | qos << 1 | retain | dup << 3
        length = len(head) + len(rest) + (2 if qos else 0)
        if length < 0x80:
            header = bytes((first, length))
        elif length < 0x4000:
            header = bytes((first, length & 0x7F | 0x80, length >> 7))
        else:
            header = bytes((first,)) + encode_varint(length)
        if length + len(header) > self._max_out:
            return None
        out = self._out
        if not qos:
            out += header
            out += head
            out += rest
            return 0
        chosen = self._take_id(Awaits.PUBACK if qos == 1 else Awaits.PUBREC, packet_id)
        out += header
        out += head
        out += chosen.to_bytes(2)
        out += rest
        return chosen

    def send_pubrel(self, packet_id: int, reason_code: int = 0) -> None:
        """Go on with a QoS 2 exchange of ours [MQTT-4.3.3-4]; after a reconnect the identifier is taken anew."""
        if self.state is not State.OPEN:
            return
        if packet_id in self._awaited:
            self._awaited[packet_id] = Awaits.PUBCOMP
        elif reason_code == 0:
            self._take_id(Awaits.PUBCOMP, packet_id)
        self._say(packets.Pubrel(packet_id, reason_code if self.version is Version.V5 else 0))

    # parsing

    def _parse(self, buffer: bytes, found: list[Any]) -> None:
        """Parse whole packets; keep the rest. PUBLISH is taken apart here, as it is what there is most of."""
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
        received = events.PublishReceived
        try:
            while position + 2 <= size:
                first = buffer[position]
                length = buffer[position + 1]
                start = position + 2
                publish = is_open and first & 0xF0 == 0x30
                if not publish:
                    self._check_legal(first)
                if length > 0x7F:
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
                    raise self._bad_flags(first)
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
                        topic = self._check_publish(topic, properties)
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
        except PeerError as fault:
            found.append(self._fail(fault))
            return
        if taken:
            self.inbound.take(taken)
        if position:
            self._heard_at = self._now
        if position < size:
            self._frames.keep(buffer[position:] if position else buffer, needed)

    def _check_legal(self, first: int) -> None:
        """Judge a packet by its first byte, before the rest of it is awaited."""
        kind = first >> 4
        state = self.state
        if kind not in LEGAL[state]:
            if kind in (PacketType.SUBACK, PacketType.UNSUBACK, PacketType.PINGRESP) and first & 0x0F:
                raise malformed("reserved flags are set")
            raise protocol_error(f"packet type {kind} is not allowed in state {state.value}")
        if kind == PacketType.AUTH and self._method is None:
            raise protocol_error("AUTH without an authentication method in CONNECT")  # [MQTT-4.12.0-7]
        check_flags(first, self.version or Version.V5)

    def _packet(self, first: int, buffer: bytes, start: int, end: int, found: list[Any]) -> None:
        """Act on any packet but PUBLISH."""
        kind = first >> 4
        if kind == PacketType.PUBACK and end - start == 2:
            packet_id = buffer[start] << 8 | buffer[start + 1]
            if self._awaited.get(packet_id) is Awaits.PUBACK:
                del self._awaited[packet_id]
                self.outbound.release()
                found.append(events.PubackReceived(packet_id))
                return
        body = buffer[start:end]
        if kind == PacketType.CONNECT:
            self._connect(body, found)
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
                self._check_subscribe(packet)
                found.append(_event(packet))
            case packets.Unsubscribe():
                found.append(_event(packet))
            case packets.Disconnect():
                self._check_disconnect(packet)
                found.append(_event(packet))
                self._close()
            case packets.Auth():
                self._check_auth(packet)
                found.append(_event(packet))
            case _:
                raise protocol_error(f"{type(packet).__name__} from a client")

    def _connect(self, body: bytes, found: list[Any]) -> None:
        reader = Reader(body)
        try:
            self.version = decode_version(reader)
        except PeerError as fault:
            if fault.code == ReasonCode.UNSUPPORTED_PROTOCOL_VERSION:
                # In the format of the family that was asked for: 3.1.1 [MQTT-3.1.2-2], or 5.0 for all others.
                self.version = Version.V311 if body[reader.position - 1] in (3, 4) else Version.V5
            raise
        connect = decode_connect_rest(reader, self.version)
        reader.finish()
        properties = connect.properties or NONE
        self.connect = connect
        if properties.maximum_packet_size is not None:
            self._max_out = properties.maximum_packet_size
        limit = properties.receive_maximum or UNLIMITED
        self.outbound = Inflight(min(self._limits.outgoing_inflight, limit))
        self._method = properties.authentication_method
        self.state = State.CONNECTING if self._method is None else State.AUTHENTICATING
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
        keep_alive = connect.keep_alive
        if v5 and properties.server_keep_alive is not None:
            keep_alive = properties.server_keep_alive  # [MQTT-3.2.2-21]
        self._grace = keep_alive * GRACE if keep_alive else None
        max_qos = 2 if properties.maximum_qos is None else properties.maximum_qos
        self._flags = tuple(
            None if row is None or row[0] > max_qos or (row[1] and properties.retain_available == 0) else row
            for row in _FLAGS
        )

    # checks

    def _bad_flags(self, first: int) -> PeerError:
        row = _FLAGS[first & 0x0F]
        if row is None:
            return malformed("wrong flags on PUBLISH")
        if row[1] and self._announced.retain_available == 0:
            return PeerError(ReasonCode.RETAIN_NOT_SUPPORTED, "retained messages are not available")
        return PeerError(ReasonCode.QOS_NOT_SUPPORTED, f"QoS {row[0]} is not available")  # [MQTT-3.2.2-11]

    def _learn(self, data: bytes) -> str:
        topic = decode_topic(data)
        if topic:
            if len(self._topics) >= TOPIC_CACHE:
                self._topics.clear()
            self._topics[data] = topic
        return topic

    def _check_publish(self, topic: str, properties: Properties | None) -> str:
        """Resolve the topic alias; give the topic."""
        if properties is None:
            if not topic:
                raise malformed("neither topic nor topic alias")
            return topic
        if properties.subscription_identifiers:
            raise protocol_error("a subscription identifier from a client")  # [MQTT-3.3.4-6]
        response_topic = properties.response_topic
        if response_topic is not None and not topics.is_valid_name(response_topic):
            raise protocol_error("the response topic is not a topic name")  # [MQTT-3.3.2-14]
        alias = properties.topic_alias
        if alias is None:
            if not topic:
                raise malformed("neither topic nor topic alias")
            return topic
        if alias > (self._announced.topic_alias_maximum or 0):
            raise PeerError(ReasonCode.TOPIC_ALIAS_INVALID, f"topic alias {alias}")  # [MQTT-3.3.2-9]
        if topic:
            self._aliases[alias] = topic
            return topic
        known = self._aliases.get(alias)
        if known is None:
            raise protocol_error(f"topic alias {alias} stands for nothing")
        return known

    def _check_subscribe(self, packet: packets.Subscribe) -> None:
        announced = self._announced
        if self.version is not Version.V5:
            return
        if packet.properties is not None and packet.properties.subscription_identifiers:
            if announced.subscription_identifier_available == 0:
                raise PeerError(
                    ReasonCode.SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED, "subscription identifiers are not available"
                )
        for one in packet.subscriptions:
            if announced.shared_subscription_available == 0 and topics.is_shared(one.topic_filter):
                raise PeerError(ReasonCode.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED, "shared subscriptions are not available")
            if announced.wildcard_subscription_available == 0 and topics.has_wildcard(one.topic_filter):
                raise PeerError(
                    ReasonCode.WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED, "wildcard subscriptions are not available"
                )

    def _check_disconnect(self, packet: packets.Disconnect) -> None:
        if packet.reason_code not in CLIENT_DISCONNECT_CODES:
            raise protocol_error(f"reason code 0x{packet.reason_code:02X} from a client")
        assert self.connect is not None
        properties = packet.properties or NONE
        if properties.server_reference is not None:
            raise protocol_error("a server reference from a client")
        if properties.session_expiry_interval and not (self.connect.properties or NONE).session_expiry_interval:
            raise protocol_error("a session expiry after none was asked for in CONNECT")  # section 3.14.2.2.2

    def _check_auth(self, packet: packets.Auth) -> None:
        properties = packet.properties or NONE
        if properties.authentication_method != self._method:
            raise protocol_error("another authentication method than in CONNECT")  # [MQTT-4.12.0-5]
        if self.state is State.AUTHENTICATING and packet.reason_code != ReasonCode.CONTINUE_AUTHENTICATION:
            raise protocol_error("AUTH before CONNACK only continues")  # [MQTT-4.12.0-3]
        if packet.reason_code == ReasonCode.SUCCESS:
            raise protocol_error("AUTH with success is the server's")

    def _acknowledged(self, packet: packets.Puback | packets.Pubrec | packets.Pubcomp, found: list[Any]) -> None:
        """Match an acknowledgement with what is awaited; one for an identifier that is not in use says nothing."""
        awaited = self._awaited.get(packet.packet_id)
        if awaited is None:
            if type(packet) is packets.Pubrec and packet.reason_code < 0x80:
                found.append(_event(packet))  # the session answers with PUBREL 0x92
            return
        kind = type(packet)
        if kind is packets.Pubrec and awaited in (Awaits.PUBREL, Awaits.PUBCOMP):
            return  # PUBREC again: PUBREL is on its way
        if (kind, awaited) not in _ANSWERS:
            raise protocol_error(f"{kind.__name__} where {awaited.value} is awaited")
        if kind is packets.Pubrec and packet.reason_code < 0x80:
            self._awaited[packet.packet_id] = Awaits.PUBREL
        else:
            del self._awaited[packet.packet_id]
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

    def _say(self, packet: Packet) -> None:
        """Queue a packet, without its reason string and user properties if it is too large with them."""
        assert self.version is not None
        data = encode_packet(packet, self.version)
        if len(data) > self._max_out:
            properties = getattr(packet, "properties", None)
            if properties:
                slim = msgspec.structs.replace(properties, reason_string=None, user_properties=())
                data = encode_packet(msgspec.structs.replace(packet, properties=slim), self.version)
            if len(data) > self._max_out:
                return  # [MQTT-3.1.2-24]: it must not be sent at all
        self._out += data

    def _say_disconnect(self, code: int, reason: str | None, properties: Properties) -> None:
        if self.version is Version.V5:
            if reason is not None:
                properties = msgspec.structs.replace(properties, reason_string=reason)
            self._say(packets.Disconnect(code, properties))

    def _say_connack(self, code: int, reason: str | None, properties: Properties) -> None:
        if self.version is Version.V5:
            if code not in _CONNACK_CODES:
                code = ReasonCode.UNSPECIFIED_ERROR
            if reason is not None:
                properties = msgspec.structs.replace(properties, reason_string=reason)
            self._say(packets.Connack(False, code, properties))
        elif code in RETURN_CODES:
            self._say(packets.Connack(False, RETURN_CODES[code]))  # [MQTT-3.2.2-5], [MQTT-3.2.2-6]

    def _explain(self, reason: str | None) -> Properties | None:
        return None if reason is None else self._allowed(Properties(reason_string=reason))

    def _allowed(self, properties: Properties | None) -> Properties | None:
        """Leave reason string and user properties out if the client does not want them [MQTT-3.1.2-29]."""
        assert self.connect is not None
        if properties is None or (self.connect.properties or NONE).request_problem_information != 0:
            return properties
        return msgspec.structs.replace(properties, reason_string=None, user_properties=())

    # packet identifiers

    def _take_id(self, awaits: Awaits, packet_id: int | None) -> int:
        if not self.outbound.free:
            raise UsageError("the client's Receive Maximum is used up")  # [MQTT-3.3.4-9]
        if packet_id is None:
            packet_id = self._next_id
            while packet_id in self._awaited:  # [MQTT-2.2.1-4]
                packet_id = packet_id % UNLIMITED + 1
            self._next_id = packet_id % UNLIMITED + 1
        elif packet_id in self._awaited:
            raise UsageError(f"packet identifier {packet_id} is in use")
        self.outbound.take()
        self._awaited[packet_id] = awaits
        return packet_id

    def _release_qos2(self, packet_id: int) -> None:
        if packet_id in self._qos2:
            self._qos2.remove(packet_id)
            self.inbound.release()


_ANSWERS: Final = frozenset(
    {
        (packets.Puback, Awaits.PUBACK),
        (packets.Pubrec, Awaits.PUBREC),
        (packets.Pubcomp, Awaits.PUBCOMP),
        (packets.Pubcomp, Awaits.PUBREL),
    }
)
_CONNACK_CODES: Final = REASON_CODES[PacketType.CONNACK]
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
