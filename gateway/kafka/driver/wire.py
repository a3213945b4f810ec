"""The Kafka requests that grow with the number of topics, each encoded and decoded in one pass.

aiokafka makes an object of every field: the metadata of 15,000 partitions cost 125 ms of the event loop and their
offsets 85 ms, here 15 and 25. Each request has a fixed version, the oldest that suffices; brokers since Kafka 2.1 know
all of them. Brokers since 2.8 also return topic ids.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from io import BytesIO
from struct import Struct as Layout
from typing import Any, Final, NamedTuple

from aiokafka import TopicPartition
from aiokafka.errors import IncompatibleBrokerVersion
from aiokafka.protocol.api import RequestStruct
from aiokafka.protocol.types import Schema

LATEST: Final = -1
"""Requests the end of a partition's log."""
EARLIEST: Final = -2
"""Requests the offset of a partition's first record."""
NO_OFFSET: Final = -1
"""The offset in an answer when no record is as new as the requested time."""
NO_LEADER: Final = -1

_READ_COMMITTED: Final = 1
_INT16: Final = Layout(">h")
_INT32: Final = Layout(">i")
_LIST_PARTITION: Final = Layout(">iq")  # of ListOffsets: partition, time
_OFFSET: Final = Layout(">ihqq")  # partition, error, time, offset
_FETCH_PARTITION: Final = Layout(
    ">iiqqi"
)  # of Fetch: partition, leader's epoch, offset, start of a follower's log, most bytes
_FETCH_HEAD: Final = Layout(">iiiibii")  # replica, wait, least, most bytes, isolation, session, epoch
_PARTITION: Final = Layout(">hiii")  # of Metadata: error, partition, leader, number of replicas
_NULL_LENGTH: Final = b"\0"
_NO_TAGS: Final = b"\0"
_NO_ID: Final = bytes(16)


class Topic(NamedTuple):
    """A broker's metadata of a topic."""

    error: int  # Kafka's error code, or 0
    internal: bool  # a topic of Kafka itself
    leaders: tuple[int, ...]  # by partition, its leader's node, or `NO_LEADER`
    id: bytes = b""  # differs after the topic was deleted and re-created (KIP-516); b"" from brokers without ids


class Metadata(NamedTuple):
    """The answer to `metadata_request`."""

    brokers: list[tuple[int, str, int, str | None]]  # node, host, port, rack
    controller: int  # the controller's node
    topics: dict[str, Topic]  # by name; includes requested topics that do not exist, with their error


class _Answer:
    """Gives aiokafka's connections the body of an answer as bytes."""

    @staticmethod
    def decode(frame: BytesIO) -> bytes:
        return frame.read()


class EncodedRequest(RequestStruct):  # type: ignore[misc]  # aiokafka carries no types
    """A request of one version whose body is encoded here; aiokafka's connections send it like one of its own."""

    API_KEY = -1
    API_VERSION = -1
    RESPONSE_TYPE: Any = _Answer
    SCHEMA = Schema()

    def __init__(self, body: bytes) -> None:
        """`body` is the request without its header."""
        self._body = body

    def prepare(self, versions: Mapping[int, tuple[int, int]]) -> EncodedRequest:
        """See aiokafka's `Request`. Raises IncompatibleBrokerVersion."""
        least, most = versions.get(self.API_KEY, (0, -1))
        if not least <= self.API_VERSION <= most:
            raise IncompatibleBrokerVersion(f"the broker lacks version {self.API_VERSION} of request {self.API_KEY}")
        return self

    def encode(self) -> bytes:
        """The body."""
        return self._body


class _MetadataAnswer:
    """Gives aiokafka's connections the answer as `Metadata`."""

    @staticmethod
    def decode(frame: BytesIO) -> Metadata:
        return read_metadata(frame.read())


class _MetadataAnswerWithIds:
    """Gives aiokafka's connections the answer as `Metadata` with topic ids."""

    @staticmethod
    def decode(frame: BytesIO) -> Metadata:
        return read_metadata_with_ids(frame.read())


class _MetadataRequestWithIds(EncodedRequest):
    API_KEY = 3
    API_VERSION = 10
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _MetadataAnswerWithIds


class _MetadataRequest(EncodedRequest):
    API_KEY = 3
    API_VERSION = 4
    RESPONSE_TYPE = _MetadataAnswer

    def __init__(self, topics: Collection[str] | None) -> None:
        if topics is None:
            super().__init__(_INT32.pack(-1) + b"\0")
        else:
            super().__init__(b"".join([_INT32.pack(len(topics)), *map(_text, topics), b"\0"]))
        self._topics = topics

    def prepare(self, versions: Mapping[int, tuple[int, int]]) -> EncodedRequest:
        """Use the version with topic ids if the broker has it."""
        if versions.get(self.API_KEY, (0, -1))[1] < _MetadataRequestWithIds.API_VERSION:
            return super().prepare(versions)
        asked = [_NULL_LENGTH]
        if self._topics is not None:
            asked = [_length(len(self._topics))]
            asked += [b"".join((_NO_ID, _compact_text(topic), _NO_TAGS)) for topic in self._topics]
        # No topic is created, no authorized operations are requested.
        return _MetadataRequestWithIds(b"".join([*asked, b"\0\0\0", _NO_TAGS]))


class _ListOffsetsRequest(EncodedRequest):
    API_KEY = 2
    API_VERSION = 2


class FetchRequest(EncodedRequest):
    """A fetch with sessions (KIP-227, version 7); the answer may name a nearer replica (KIP-392, version 11)."""

    API_KEY = 1
    API_VERSION = 11


def metadata_request(topics: Collection[str] | None) -> EncodedRequest:
    """Request the metadata of some topics, or of all (None), without creating any. The answer is a `Metadata`."""
    return _MetadataRequest(topics)


def read_metadata_with_ids(data: bytes) -> Metadata:
    """Decode the answer to `metadata_request` in version 10."""
    brokers: list[tuple[int, str, int, str | None]] = []
    count, at = _read_length(data, 4)
    for _ in range(count):
        (node,) = _INT32.unpack_from(data, at)
        host, at = _read_compact_text(data, at + 4)
        (port,) = _INT32.unpack_from(data, at)
        rack, at = _read_compact_text(data, at + 4)
        brokers.append((node, host or "", port, rack))
        at = _skip_tags(data, at)
    _, at = _read_compact_text(data, at)  # the cluster's id
    (controller,) = _INT32.unpack_from(data, at)
    count, at = _read_length(data, at + 4)
    topics: dict[str, Topic] = {}
    for _ in range(count):
        (error,) = _INT16.unpack_from(data, at)
        name, at = _read_compact_text(data, at + 2)
        topic_id = data[at : at + 16]
        internal = bool(data[at + 16])
        partitions, at = _read_length(data, at + 17)
        found: dict[int, int] = {}
        for _ in range(partitions):
            _, number, leader, _ = _PARTITION.unpack_from(data, at)  # the last field is the leader's epoch
            at += _PARTITION.size
            for _ in range(3):  # replicas, in-sync replicas, offline replicas
                nodes = data[at]
                if 0 < nodes <= 0x7F:  # `_read_length` inlined: three calls for each partition would cost too much
                    at += 4 * nodes - 3
                else:
                    nodes, at = _read_length(data, at)
                    at += 4 * nodes
            at = _skip_tags(data, at) if data[at] else at + 1
            found[number] = leader
        leaders = tuple(found.get(number, NO_LEADER) for number in range(max(found, default=-1) + 1))
        topics[name or ""] = Topic(error, internal, leaders, topic_id)
        at = _skip_tags(data, at + 4)  # after the authorized operations
    return Metadata(brokers, controller, topics)


def read_metadata(data: bytes) -> Metadata:
    """Decode the answer to `metadata_request` in version 4, which has no topic ids."""
    brokers: list[tuple[int, str, int, str | None]] = []
    (count,), at = _INT32.unpack_from(data, 4), 8
    for _ in range(count):
        (node,) = _INT32.unpack_from(data, at)
        host, at = read_text(data, at + 4)
        (port,) = _INT32.unpack_from(data, at)
        rack, at = read_text(data, at + 4)
        brokers.append((node, host or "", port, rack))
    _, at = read_text(data, at)  # the cluster's id
    (controller,) = _INT32.unpack_from(data, at)
    (count,) = _INT32.unpack_from(data, at + 4)
    at += 8
    topics: dict[str, Topic] = {}
    for _ in range(count):
        (error,) = _INT16.unpack_from(data, at)
        name, at = read_text(data, at + 2)
        internal = bool(data[at])
        (partitions,) = _INT32.unpack_from(data, at + 1)
        at += 5
        found: dict[int, int] = {}
        for _ in range(partitions):
            _, number, leader, replicas = _PARTITION.unpack_from(data, at)
            at += _PARTITION.size + 4 * replicas
            (in_sync,) = _INT32.unpack_from(data, at)
            at += 4 + 4 * in_sync
            found[number] = leader
        leaders = tuple(found.get(number, NO_LEADER) for number in range(max(found, default=-1) + 1))
        topics[name or ""] = Topic(error, internal, leaders)
    return Metadata(brokers, controller, topics)


def list_offsets_request(partitions: Iterable[TopicPartition], timestamp: int) -> EncodedRequest:
    """Request the offsets for a time: ms since the epoch, `LATEST` or `EARLIEST`. To be sent to the partitions' leader.

    Records of open transactions do not count (`read_committed`).
    """
    topics: dict[str, list[int]] = {}
    for topic, number in partitions:
        topics.setdefault(topic, []).append(number)
    parts = [b"\xff\xff\xff\xff", bytes((_READ_COMMITTED,)), _INT32.pack(len(topics))]
    for topic, numbers in topics.items():
        parts += (_text(topic), _INT32.pack(len(numbers)))
        parts += [_LIST_PARTITION.pack(number, timestamp) for number in numbers]
    return _ListOffsetsRequest(b"".join(parts))


def read_offsets(data: bytes) -> Iterable[tuple[TopicPartition, int, int]]:
    """Decode the answer to `list_offsets_request`: partition, error code, and offset or `NO_OFFSET`."""
    (count,), at = _INT32.unpack_from(data, 4), 8
    for _ in range(count):
        topic, at = read_text(data, at)
        (partitions,) = _INT32.unpack_from(data, at)
        end = at + 4 + partitions * _OFFSET.size
        for number, error, _, offset in _OFFSET.iter_unpack(memoryview(data)[at + 4 : end]):
            yield TopicPartition(topic, number), error, offset
        at = end


def fetch_body(
    positions: Mapping[TopicPartition, int],
    forgotten: Iterable[TopicPartition],
    *,
    session: tuple[int, int],
    wait_ms: int,
    least: int,
    most: int,
    most_each: int,
    committed: bool,
    rack: str = "",
) -> bytes:
    """Encode the body of a `FetchRequest`.

    `session` is the session's id and the epoch of this fetch. `positions` are the offsets of partitions that are new
    to the session or whose offset has changed, `forgotten` those to remove from it. The broker may wait `wait_ms` for
    `least` bytes; the answer has at most `most` bytes, and `most_each` per partition. `committed` leaves out records of
    open or aborted transactions. With our `rack` the answer may name a replica there.
    """
    topics: dict[str, list[bytes]] = {}
    for (topic, number), offset in positions.items():
        topics.setdefault(topic, []).append(_FETCH_PARTITION.pack(number, -1, offset, -1, most_each))
    parts = [_FETCH_HEAD.pack(-1, wait_ms, least, most, _READ_COMMITTED if committed else 0, *session)]
    for named in (topics, _packed_numbers(forgotten)):
        parts.append(_INT32.pack(len(named)))
        for topic, packed in named.items():
            parts += (_text(topic), _INT32.pack(len(packed)), *packed)
    parts.append(_text(rack))
    return b"".join(parts)


def _packed_numbers(partitions: Iterable[TopicPartition]) -> dict[str, list[bytes]]:
    topics: dict[str, list[bytes]] = {}
    for topic, number in partitions:
        topics.setdefault(topic, []).append(_INT32.pack(number))
    return topics


def _text(value: str) -> bytes:
    encoded = value.encode()
    return _INT16.pack(len(encoded)) + encoded


def read_text(data: bytes, at: int) -> tuple[str | None, int]:
    """Return a nullable string and the position after it."""
    (size,) = _INT16.unpack_from(data, at)
    at += 2
    if size < 0:
        return None, at
    return data[at : at + size].decode(), at + size


# Since KIP-482 ("flexible versions") lengths are unsigned varints of length + 1, and fields can be added as tags.


def _length(count: int) -> bytes:
    return unsigned(count + 1)


def unsigned(value: int) -> bytes:
    """Encode an unsigned varint, as in Protocol Buffers."""
    if value <= 0x7F:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_unsigned(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := data[at]) > 0x7F:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
    return value | byte << shift, at + 1


def _read_length(data: bytes, at: int) -> tuple[int, int]:
    """Return a length, 0 for null, and the position after it."""
    byte = data[at]
    if 0 < byte <= 0x7F:  # nearly all
        return byte - 1, at + 1
    value, at = _read_unsigned(data, at)
    return max(0, value - 1), at


def _compact_text(value: str) -> bytes:
    encoded = value.encode()
    return _length(len(encoded)) + encoded


def _read_compact_text(data: bytes, at: int) -> tuple[str | None, int]:
    size, at = _read_unsigned(data, at)
    if not size:
        return None, at
    return data[at : at + size - 1].decode(), at + size - 1


def _skip_tags(data: bytes, at: int) -> int:
    if not data[at]:
        return at + 1
    count, at = _read_unsigned(data, at)
    for _ in range(count):
        _, at = _read_unsigned(data, at)
        size, at = _read_unsigned(data, at)
        at += size
    return at
