"""The sending half of a server's connection: acknowledgements, messages, packet identifiers, queued bytes."""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

from flowcontrol.credit import Inflight
from protocols.errors import UsageError
from protocols.mqtt import packets
from protocols.mqtt.aliases import TopicAliases
from protocols.mqtt.codec import decode_varint, encode_varint
from protocols.mqtt.encoding import PreparedPublish, ServerPacket, encode_packet
from protocols.mqtt.packets import Version
from protocols.mqtt.properties import NONE, Properties
from protocols.mqtt.reasons import REASON_CODES, RETURN_CODES, PacketType, ReasonCode
from protocols.mqtt.states import LARGEST_PACKET, UNLIMITED, Awaits, State

NO_TOPIC: Final = b"\0\0"
_CONNACK_CODES: Final = REASON_CODES[PacketType.CONNACK]

# Python 3.11 takes 0.2 us to look up a member of an enumeration, a fifth of the cost of a PUBLISH.
OPEN: Final = State.OPEN
PUBACK: Final = Awaits.PUBACK
PUBREC: Final = Awaits.PUBREC
PUBREL: Final = Awaits.PUBREL
PUBCOMP: Final = Awaits.PUBCOMP
_V5: Final = Version.V5


class Sender:
    """The sending half of a connection. Each direction has its own window and packet identifiers.

    Methods that answer the client do nothing once the connection is closed, since Kafka may answer after DISCONNECT.
    """

    __slots__ = (
        "_awaited", "_max_out", "_messages", "_next_id", "_out", "_qos2", "_topic_aliases", "connect", "inbound",
        "outbound", "state", "version",
    )  # fmt: skip

    def __init__(self, outgoing_inflight: int) -> None:
        self.version: Version | None = None  # None before CONNECT
        self.state = State.NEW
        self.connect: packets.Connect | None = None  # the received CONNECT
        # unacknowledged QoS 1 and 2 messages from the client, limited by our Receive Maximum
        self.inbound = Inflight(UNLIMITED)
        # unacknowledged messages to the client, limited by its Receive Maximum
        self.outbound = Inflight(outgoing_inflight)
        self._max_out = LARGEST_PACKET
        self._topic_aliases: TopicAliases | None = None  # None if the client accepts no aliases [MQTT-3.1.2-27]
        self._out = bytearray()
        self._messages = self._out  # buffer for messages; a separate one while they are held back
        # The client's packet identifiers between PUBLISH and PUBCOMP, and whether each counts in `inbound`. (An empty
        # set is 150 bytes larger than an empty dictionary, and there are many connections.)
        self._qos2: dict[int, bool] = {}
        self._awaited: dict[int, Awaits] = {}  # packet identifiers of messages to the client
        self._next_id = 1

    def data_to_send(self) -> bytes:
        """Return and clear the queued bytes."""
        if not self._out:
            return b""
        data = bytes(self._out)
        self._out.clear()
        return data

    def hold_messages(self) -> None:
        """Hold messages back until `release_messages` or DISCONNECT; other packets are still sent."""
        if self._messages is self._out:
            self._messages = bytearray()

    def release_messages(self) -> None:
        """Queue the held messages behind the packets sent meanwhile."""
        if self._messages is not self._out:
            self._out += self._messages
            self._messages = self._out

    # answers to the client's messages

    def send_pubacks(self, packet_ids: Sequence[int]) -> None:
        """Acknowledge many QoS 1 messages with success, in four bytes each."""
        if self.state is not OPEN or not packet_ids:
            return
        count = len(packet_ids)
        self.inbound.release(count)
        words = array.array("H", (0x4002,)) * (2 * count)
        words[1::2] = array.array("H", packet_ids)
        if sys.byteorder == "little":
            words.byteswap()
        self._out += words.tobytes()

    def send_puback(self, packet_id: int, reason_code: int = 0, reason_string: str | None = None) -> None:
        """Acknowledge a QoS 1 message [MQTT-4.3.2-4]. 3.1.1 has no error codes here: close the connection instead.

        Raises:
            UsageError: an error code for a 3.1.1 client.
        """
        if self.state is not OPEN:
            return
        if reason_code and self.version is not _V5:
            if reason_code >= 0x80:
                raise UsageError("PUBACK of 3.1.1 has no reason code; close the connection")
            reason_code = 0
        self.inbound.release()
        if reason_code:
            self._queue(packets.Puback(packet_id, reason_code, self._explain(reason_string)))
        else:
            self._out += b"\x40\x02" + packet_id.to_bytes(2)

    def send_pubrec(self, packet_id: int, reason_code: int = 0, reason_string: str | None = None) -> None:
        """Answer a QoS 2 message [MQTT-4.3.3-8]; an error code frees its packet identifier [MQTT-4.3.3-9].

        Raises:
            UsageError: an error code for a 3.1.1 client.
        """
        if self.state is not OPEN:
            return
        if reason_code >= 0x80:
            if self.version is not _V5:
                raise UsageError("PUBREC of 3.1.1 has no reason code; close the connection")
            self._release_qos2(packet_id)
        if reason_code:
            self._queue(packets.Pubrec(packet_id, reason_code, self._explain(reason_string)))
        else:
            self._out += b"\x50\x02" + packet_id.to_bytes(2)

    def send_pubcomp(self, packet_id: int, reason_code: int = 0) -> None:
        """Answer a PUBREL [MQTT-4.3.3-11] and free the packet identifier.

        Unknown identifiers are answered too. Code 0x92 is optional for them: after a lost PUBCOMP they are no error
        (section 3.7.2.1).
        """
        if self.state is not OPEN:
            return
        self._release_qos2(packet_id)
        if reason_code and self.version is _V5:
            self._queue(packets.Pubcomp(packet_id, reason_code))
        else:
            self._out += b"\x70\x02" + packet_id.to_bytes(2)

    def send_suback(self, packet_id: int, reason_codes: Sequence[int], properties: Properties | None = None) -> None:
        """Answer a SUBSCRIBE with one code per filter [MQTT-3.8.4-6]; 3.1.1 gets 0x80 for every error."""
        if self.state is OPEN:
            self._queue(packets.Suback(packet_id, tuple(reason_codes), self._allowed(properties)))

    def send_unsuback(self, packet_id: int, reason_codes: Sequence[int], properties: Properties | None = None) -> None:
        """Answer an UNSUBSCRIBE [MQTT-3.10.4-4] with one code per filter [MQTT-3.11.3-2]."""
        if self.state is OPEN:
            self._queue(packets.Unsuback(packet_id, tuple(reason_codes), self._allowed(properties)))

    # messages to the client

    def send_prepared(
        self,
        message: PreparedPublish,
        qos: int = 0,
        *,
        retain: bool = False,
        dup: bool = False,
        packet_id: int | None = None,
    ) -> int | None:
        """Send a PUBLISH that `prepare_publish` encoded for this version.

        `dup`: it is resent after a reconnect [MQTT-3.3.1-1] under its former `packet_id`. By default the next free
        packet identifier is used.

        Returns:
            The packet identifier (0 at QoS 0), or None if the packet exceeds the client's Maximum Packet Size: then it
            is not sent and counts as delivered [MQTT-3.1.2-25], and a reserved `packet_id` is freed.

        Raises:
            UsageError: not open, the client's window is full (`outbound.free`), or no packet identifier is free.
        """
        if self.state is not OPEN:
            raise UsageError(f"PUBLISH in state {self.state.name}")
        topic, rest, alias = message.topic, message.rest, 0
        if self._topic_aliases is not None:
            topic, rest, alias = self._aliased(message, qos, self._topic_aliases)
        length = len(topic) + len(rest) + (2 if qos else 0)
        header = _header(0x30 | qos << 1 | retain | dup << 3, length)
        if length + len(header) > self._max_out:
            if packet_id is not None:
                self.release_reserved(packet_id)
            return None
        chosen = self._take_id(PUBACK if qos == 1 else PUBREC, packet_id) if qos else 0
        out = self._messages
        out += header
        out += topic
        if qos:
            out += chosen.to_bytes(2)
        out += rest
        if alias < 0 and self._topic_aliases is not None:
            self._topic_aliases.give(message.topic, -alias)
        return chosen

    def send_encoded(self, packets: bytes, largest: int) -> bool:
        """Send complete PUBLISH packets at QoS 0 from `encode_prepared`; only if `gives_aliases` is false.

        Returns:
            False, without sending, if the one of `largest` bytes exceeds the client's Maximum Packet Size
            [MQTT-3.1.2-25].
        """
        if largest > self._max_out:
            return False
        self._messages += packets
        return True

    @property
    def gives_aliases(self) -> bool:
        """Whether the client accepts topic aliases, so that its packets cannot be shared with other clients."""
        return self._topic_aliases is not None

    @property
    def unsent(self) -> int:
        """Number of queued bytes, including messages held back."""
        return len(self._out) if self._messages is self._out else len(self._out) + len(self._messages)

    def _aliased(self, message: PreparedPublish, qos: int, aliases: TopicAliases) -> tuple[bytes, bytes, int]:
        """Return the topic and the rest of a PUBLISH with its topic alias, and the result of `TopicAliases.choose`.

        No alias is set (0) if that would exceed the client's Maximum Packet Size.
        """
        topic, rest = message.topic, message.rest
        alias = aliases.choose(topic)
        if not alias:
            return topic, rest, 0
        size, skip = rest[0], 1
        if size <= 0x7F - 3:
            properties = bytes((size + 3, 0x23)) + abs(alias).to_bytes(2)
        else:
            size, skip = decode_varint(rest, 0, len(rest))
            properties = encode_varint(size + 3) + b"\x23" + abs(alias).to_bytes(2)
        rest = properties + rest[skip:]
        if alias > 0:
            return NO_TOPIC, rest, alias
        length = len(topic) + len(rest) + (2 if qos else 0)
        if length + len(_header(0, length)) > self._max_out:
            return topic, message.rest, 0
        return topic, rest, alias

    def send_pubrel(self, packet_id: int, reason_code: int = 0) -> None:
        """Continue a QoS 2 exchange of ours [MQTT-4.3.3-4], possibly a reserved one from an earlier connection.

        Only PUBLISH counts in the client's window (section 4.9), so the number of resumed exchanges is not limited. For
        an unused packet identifier PUBREL is sent and no answer is awaited. If the identifier's PUBLISH has no PUBREC
        yet, nothing is sent: that PUBREC was for an earlier use of the identifier.
        """
        if self.state is not OPEN:
            return
        awaited = self._awaited.get(packet_id)
        if awaited is Awaits.RESERVED:
            self._awaited[packet_id] = Awaits.RESUMED
        elif awaited is PUBREL:
            self._awaited[packet_id] = PUBCOMP
        elif awaited is PUBREC or awaited is PUBACK:
            return
        if reason_code and self.version is _V5:
            self._queue(packets.Pubrel(packet_id, reason_code))
        else:
            self._out += b"\x62\x02" + packet_id.to_bytes(2)

    def release_reserved(self, packet_id: int) -> None:
        """Free a reserved packet identifier whose message will not be resent; ignore any other."""
        if self._awaited.get(packet_id) is Awaits.RESERVED:
            del self._awaited[packet_id]

    # writing packets

    def _queue(self, packet: ServerPacket) -> None:
        """Queue a packet; omit reason string and user properties if it is too large with them."""
        assert self.version is not None
        data = encode_packet(packet, self.version)
        if len(data) > self._max_out:
            if packet.properties is not None:
                slim = msgspec.structs.replace(packet.properties, reason_string=None, user_properties=())
                data = encode_packet(msgspec.structs.replace(packet, properties=slim), self.version)
            if len(data) > self._max_out:
                return  # must not be sent at all [MQTT-3.1.2-24]
        self._out += data

    def _write_disconnect(self, code: int, reason: str | None, properties: Properties) -> None:
        self.release_messages()
        if self.version is _V5:
            if reason is not None:
                properties = msgspec.structs.replace(properties, reason_string=reason)
            self._queue(packets.Disconnect(code, properties))

    def _write_connack(self, code: int, reason: str | None, properties: Properties) -> None:
        if self.version is _V5:
            if code not in _CONNACK_CODES:
                code = ReasonCode.UNSPECIFIED_ERROR
            if reason is not None:
                properties = msgspec.structs.replace(properties, reason_string=reason)
            self._queue(packets.Connack(False, code, properties))
        elif code in RETURN_CODES:
            self._queue(packets.Connack(False, RETURN_CODES[code]))  # [MQTT311-3.2.2-5], [MQTT311-3.2.2-6]

    def _explain(self, reason: str | None) -> Properties | None:
        return None if reason is None else self._allowed(Properties(reason_string=reason))

    def _allowed(self, properties: Properties | None) -> Properties | None:
        """Remove reason string and user properties if the client does not want them [MQTT-3.1.2-29]."""
        assert self.connect is not None
        if properties is None or (self.connect.properties or NONE).request_problem_information != 0:
            return properties
        return msgspec.structs.replace(properties, reason_string=None, user_properties=())

    # packet identifiers

    def _take_id(self, awaits: Awaits, packet_id: int | None) -> int:
        if not self.outbound.free:
            raise UsageError("the client's Receive Maximum is used up")  # [MQTT-3.3.4-9]
        awaited = self._awaited
        if packet_id is None:
            packet_id = self._next_id
            if packet_id in awaited:
                packet_id = self._search_id(packet_id)
            self._next_id = packet_id % UNLIMITED + 1
        elif awaited.get(packet_id, Awaits.RESERVED) is not Awaits.RESERVED:
            raise UsageError(f"packet identifier {packet_id} is in use")
        self.outbound.take()
        awaited[packet_id] = awaits
        return packet_id

    def _search_id(self, packet_id: int) -> int:
        """Return the next free packet identifier [MQTT-2.2.1-4]."""
        awaited = self._awaited
        if len(awaited) >= UNLIMITED:
            raise UsageError("every packet identifier is in use")
        while packet_id in awaited:
            packet_id = packet_id % UNLIMITED + 1
        return packet_id

    def _release_qos2(self, packet_id: int) -> None:
        if self._qos2.pop(packet_id, False):
            self.inbound.release()


def _header(first: int, length: int) -> bytes:
    """Encode first byte and remaining length, which nearly always has one or two bytes."""
    if length < 0x80:
        return bytes((first, length))
    if length < 0x4000:
        return bytes((first, length & 0x7F | 0x80, length >> 7))
    return bytes((first,)) + encode_varint(length)
