"""Kafka requests that grow with the number of topics or that aiokafka lacks, each encoded and decoded in one pass.

aiokafka makes an object of every field: the metadata of 15,000 partitions cost 125 ms of the event loop and their
offsets 85 ms, here 15 and 25. Each request has a fixed version, the oldest that suffices. Brokers since Kafka 2.1 know
those that the gateway cannot do without. Metadata have topic ids since 2.8; older brokers' are read by aiokafka.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from io import BytesIO
from struct import Struct as Layout
from typing import Any, Final, NamedTuple

from aiokafka import TopicPartition
from aiokafka.errors import IncompatibleBrokerVersion
from aiokafka.protocol.api import RequestStruct
from aiokafka.protocol.metadata import MetadataRequest_v4, MetadataResponse_v4
from aiokafka.protocol.types import Schema

from kafka_records.record_batch import read_unsigned

LATEST: Final = -1
"""Requests the end of a partition's log."""
EARLIEST: Final = -2
"""Requests the offset of a partition's first record."""
NO_OFFSET: Final = -1
"""The offset in an answer when no record is as new as the requested time."""
NO_LEADER: Final = -1
QUORUM_TOPIC: Final = "__cluster_metadata"
NOT_REPORTED: Final = -(2**31)
"""The operations in an answer when they were not requested."""

_READ_COMMITTED: Final = 1
_ALL: Final = -1  # acks: all in-sync replicas
_INT16: Final = Layout(">h")
_INT32: Final = Layout(">i")
_LIST_PARTITION: Final = Layout(">iq")  # of ListOffsets: partition, time
_OFFSET: Final = Layout(">ihqq")  # partition, error, time, offset
_FETCH_PARTITION: Final = Layout(
    ">iiqqi"
)  # of Fetch: partition, leader's epoch, offset, start of a follower's log, most bytes
_FETCH_HEAD: Final = Layout(">iiiibii")  # replica, wait, least, most bytes, isolation, session, epoch
_PARTITION: Final = Layout(">hiii")  # of Metadata: error, partition, leader, leader's epoch
_PRODUCE_HEAD: Final = Layout(">hhii")  # transactional id (null), acks, timeout, number of topics
_BATCH_HEAD: Final = Layout(">ii")  # of Produce: partition, length of the batch that follows
_PRODUCED: Final = Layout(">ihqqq")  # partition, error, first offset, time, start of the log
_QUORUM: Final = Layout(">ihiiq")  # of DescribeQuorum: partition, error, leader, its epoch, high watermark
_VOTER: Final = Layout(">iqqq")  # of DescribeQuorum: node, end of its log, times of its last fetch and last full fetch
_NULL_LENGTH: Final = b"\0"
_NO_TAGS: Final = b"\0"
_NO_ID: Final = bytes(16)


class Topic(NamedTuple):
    """A broker's metadata of a topic."""

    error: int  # Kafka's error code, or 0
    internal: bool  # a topic of Kafka itself
    leaders: tuple[int, ...]  # by partition, its leader's node, or `NO_LEADER`
    copies: int  # replication factor: the smallest of the partitions'; 0 without partitions
    id: bytes = b""  # differs after the topic was deleted and re-created (KIP-516); b"" from brokers without ids
    operations: int = NOT_REPORTED  # with `rights_request`, what we may do: a bit for each of Kafka's operation codes


class Metadata(NamedTuple):
    """The answer to `metadata_request` and `rights_request`."""

    brokers: list[tuple[int, str, int, str | None]]  # node, host, port, rack
    controller: int  # the controller's node
    topics: dict[str, Topic]  # by name; includes requested topics that do not exist, with their error
    operations: int = NOT_REPORTED  # on the cluster, as those of a topic


class Produced(NamedTuple):
    """The answer to `PRODUCE`, in the shape of aiokafka's."""

    topics: Sequence[tuple[str, Sequence[tuple[int, ...]]]]
    """By topic: partition, error code, first offset, time of append (-1 with the records' own), start of the log."""
    API_VERSION: int = 7


class AnswerDecoder:
    """Lets aiokafka's connections decode an answer's body by a function."""

    def __init__(self, read: Callable[[bytes], Any]) -> None:
        self.read = read

    def decode(self, frame: BytesIO) -> Any:
        """Called by the connection."""
        return self.read(frame.read())


class FixedRequest(RequestStruct):  # type: ignore[misc]  # aiokafka carries no types
    """A request of one version; aiokafka's connections send it like one of its own."""

    API_KEY = -1
    API_VERSION = -1
    RESPONSE_TYPE: Any = AnswerDecoder(bytes)
    SCHEMA = Schema()

    def prepare(self, versions: Mapping[int, tuple[int, int]]) -> RequestStruct:
        """Return the request for a broker's range of versions; IncompatibleBrokerVersion if there is none."""
        least, most = versions.get(self.API_KEY, (0, -1))
        if not least <= self.API_VERSION <= most:
            raise IncompatibleBrokerVersion(f"the broker lacks version {self.API_VERSION} of request {self.API_KEY}")
        return self


class EncodedRequest(FixedRequest):
    """A request whose body is encoded here."""

    def __init__(self, body: bytes) -> None:
        """`body` is the request without its header."""
        self._body = body

    def encode(self) -> bytes:
        """The body."""
        return self._body


def read_metadata(data: bytes, *, ids: bool = True) -> Metadata:
    """Decode the answer to `metadata_request` of a broker with topic ids, or to `rights_request`, without them."""
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
        topic_id = data[at : at + 16] if ids else b""
        at += len(topic_id)
        internal = bool(data[at])
        partitions, at = _read_length(data, at + 1)
        leaders: dict[int, int] = {}
        copies: set[int] = set()
        for _ in range(partitions):
            _, number, leader, _ = _PARTITION.unpack_from(data, at)
            replicas, at = _read_length(data, at + _PARTITION.size)
            in_sync, at = _read_length(data, at + 4 * replicas)
            offline, at = _read_length(data, at + 4 * in_sync)
            at += 4 * offline
            at = _skip_tags(data, at) if data[at] else at + 1
            leaders[number] = leader
            copies.add(replicas)
        (operations,) = _INT32.unpack_from(data, at)
        topics[name or ""] = Topic(error, internal, _leaders(leaders), min(copies, default=0), topic_id, operations)
        at = _skip_tags(data, at + 4)
    (operations,) = _INT32.unpack_from(data, at)
    return Metadata(brokers, controller, topics, operations)


def _leaders(by_partition: Mapping[int, int]) -> tuple[int, ...]:
    """Return the leaders in the order of the partitions, `NO_LEADER` for those that are not named."""
    return tuple(by_partition.get(number, NO_LEADER) for number in range(max(by_partition, default=-1) + 1))


def _read_older_metadata(data: bytes) -> Metadata:
    """Decode the answer of a broker before Kafka 2.8, without topic ids."""
    answer = MetadataResponse_v4.decode(data)
    topics = {
        name: Topic(
            error,
            internal,
            _leaders({number: leader for _, number, leader, *_ in partitions}),
            min((len(replicas) for _, _, _, replicas, _ in partitions), default=0),
        )
        for error, name, internal, partitions in answer.topics
    }
    return Metadata(answer.brokers, answer.controller_id, topics)


class _OlderMetadataRequest(MetadataRequest_v4):  # type: ignore[misc]
    RESPONSE_TYPE = AnswerDecoder(_read_older_metadata)


class _MetadataRequest(EncodedRequest):
    API_KEY = 3
    API_VERSION = 10
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = AnswerDecoder(read_metadata)

    def __init__(self, topics: Collection[str] | None) -> None:
        asked = [_NULL_LENGTH]
        if topics is not None:
            asked = [unsigned(len(topics) + 1)]
            asked += [b"".join((_NO_ID, _compact_text(topic), _NO_TAGS)) for topic in topics]
        # No topic is created, no authorized operations are requested.
        super().__init__(b"".join([*asked, b"\0\0\0", _NO_TAGS]))
        self._topics = topics

    def prepare(self, versions: Mapping[int, tuple[int, int]]) -> RequestStruct:
        """Use the version with topic ids if the broker has it."""
        newest = versions.get(self.API_KEY, (0, -1))[1]
        if _OlderMetadataRequest.API_VERSION <= newest < self.API_VERSION:
            return _OlderMetadataRequest(None if self._topics is None else list(self._topics), False)
        return super().prepare(versions)


def metadata_request(topics: Collection[str] | None) -> EncodedRequest:
    """Request the metadata of some topics, or of all (None), without creating any. The answer is a `Metadata`."""
    return _MetadataRequest(topics)


class _RightsRequest(EncodedRequest):
    API_KEY = 3
    API_VERSION = 9
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = AnswerDecoder(partial(read_metadata, ids=False))


def rights_request(topics: Collection[str]) -> EncodedRequest:
    """Request the metadata of topics with our authorized operations (KIP-430). The answer is a `Metadata`."""
    asked = (_compact_text(topic) + _NO_TAGS for topic in topics)
    return _RightsRequest(b"".join([unsigned(len(topics) + 1), *asked, b"\0\1\1", _NO_TAGS]))


def read_controller_time(data: bytes) -> int | None:
    """Return the active controller's clock in epoch ms; None when the answer has none, as before Kafka 3.3."""
    (error,) = _INT16.unpack_from(data)
    topics, at = _read_length(data, _INT16.size)
    if error or not topics:
        return None
    _, at = _read_compact_text(data, at)
    partitions, at = _read_length(data, at)
    if not partitions:
        return None
    _, error, leader, _, _ = _QUORUM.unpack_from(data, at)
    voters, at = _read_length(data, at + _QUORUM.size)
    for _ in range(0 if error else voters):
        voter, _, fetched, _ = _VOTER.unpack_from(data, at)
        if voter == leader:
            return fetched if fetched > 0 else None
        at = _skip_tags(data, at + _VOTER.size)
    return None


class _QuorumRequest(EncodedRequest):
    API_KEY = 55
    API_VERSION = 1
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = AnswerDecoder(read_controller_time)


def controller_time_request() -> EncodedRequest:
    """Request the state of the controller quorum (KIP-595); the answer is that of `read_controller_time`."""
    only = unsigned(1 + 1)
    parts = [only, _compact_text(QUORUM_TOPIC), only, _INT32.pack(0), _NO_TAGS, _NO_TAGS, _NO_TAGS]
    return _QuorumRequest(b"".join(parts))


def _read_produced(data: bytes) -> Produced:
    (count,), at = _INT32.unpack_from(data), 4
    topics = []
    for _ in range(count):
        topic, at = _read_text(data, at)
        (partitions,) = _INT32.unpack_from(data, at)
        end = at + 4 + partitions * _PRODUCED.size
        topics.append((topic or "", tuple(_PRODUCED.iter_unpack(_rows(data, at + 4, end)))))
        at = end
    return Produced(topics)


class _ProduceRequest(FixedRequest):
    API_KEY = 0
    API_VERSION = 7
    RESPONSE_TYPE = AnswerDecoder(_read_produced)


PRODUCE: Final = _ProduceRequest()
"""Requests to store batches in all in-sync replicas, with a `produce_body`. The answer is a `Produced`."""


def produce_body(
    batches: Iterable[tuple[TopicPartition, bytes | bytearray]], timeout_ms: int
) -> list[bytes | bytearray]:
    """Return the parts of the body of a `PRODUCE` request; each partition has at most one batch."""
    topics: dict[str, list[bytes | bytearray]] = {}
    for (topic, number), batch in batches:
        topics.setdefault(topic, []).extend((_BATCH_HEAD.pack(number, len(batch)), batch))
    parts: list[bytes | bytearray] = [_PRODUCE_HEAD.pack(-1, _ALL, timeout_ms, len(topics))]
    for topic, named in topics.items():
        parts += (_text(topic), _INT32.pack(len(named) // 2), *named)
    return parts


class _ListOffsetsRequest(EncodedRequest):
    API_KEY = 2
    API_VERSION = 2


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
        topic, at = _read_text(data, at)
        (partitions,) = _INT32.unpack_from(data, at)
        end = at + 4 + partitions * _OFFSET.size
        for number, error, _, offset in _OFFSET.iter_unpack(_rows(data, at + 4, end)):
            yield TopicPartition(topic, number), error, offset
        at = end


def _rows(data: bytes, start: int, end: int) -> memoryview:
    if not start <= end <= len(data):
        raise ValueError("the answer ends before its last partition")
    return memoryview(data)[start:end]


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
    """Encode the body of a fetch request in version 11.

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


def _read_text(data: bytes, at: int) -> tuple[str | None, int]:
    """Return a nullable string and the position after it."""
    (size,) = _INT16.unpack_from(data, at)
    at += 2
    if size < 0:
        return None, at
    return data[at : at + size].decode(), at + size


# Since KIP-482 ("flexible versions") lengths are unsigned varints of length + 1, and fields can be added as tags.


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


def _read_length(data: bytes, at: int) -> tuple[int, int]:
    """Return a length, 0 for null, and the position after it."""
    byte = data[at]
    if 0 < byte <= 0x7F:  # nearly all
        return byte - 1, at + 1
    value, at = read_unsigned(data, at)
    return max(0, value - 1), at


def _compact_text(value: str) -> bytes:
    encoded = value.encode()
    return unsigned(len(encoded) + 1) + encoded


def _read_compact_text(data: bytes, at: int) -> tuple[str | None, int]:
    size, at = read_unsigned(data, at)
    if not size:
        return None, at
    return data[at : at + size - 1].decode(), at + size - 1


def _skip_tags(data: bytes, at: int) -> int:
    if not data[at]:
        return at + 1
    count, at = read_unsigned(data, at)
    for _ in range(count):
        _, at = read_unsigned(data, at)
        size, at = read_unsigned(data, at)
        at += size
    return at
