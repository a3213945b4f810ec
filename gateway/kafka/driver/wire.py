"""Kafka's requests that grow with the number of topics, each encoded and decoded in one pass.

aiokafka makes objects of every field: 15,000 partitions cost 125 ms of the event loop for their metadata and 85 ms for
their offsets, here 15 and 25. A version is fixed for each request, the oldest that says what is needed here; brokers
since Kafka 2.1 know all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from io import BytesIO
from struct import Struct as Layout
from typing import Final, NamedTuple

from aiokafka import TopicPartition
from aiokafka.errors import IncompatibleBrokerVersion
from aiokafka.protocol.api import RequestStruct
from aiokafka.protocol.types import Schema

LATEST: Final = -1
"""Asks for the end of a partition's log."""
EARLIEST: Final = -2
"""Asks for its first record."""
NOWHERE: Final = -1
"""The offset in an answer when no record is as new as a time that was asked for."""
NO_LEADER: Final = -1

_READ_COMMITTED: Final = 1
_INT16: Final = Layout(">h")
_INT32: Final = Layout(">i")
_PLACE: Final = Layout(">iq")  # of ListOffsets: partition, time
_OFFSET: Final = Layout(">ihqq")  # partition, error, time, offset
_WANTED: Final = Layout(">iqqi")  # of Fetch: partition, offset, first offset of a follower's log, most bytes
_LIMITS: Final = Layout(">iiiibii")  # replica, wait, least, most bytes, isolation, session, epoch
_PARTITION: Final = Layout(">hiii")  # of Metadata: error, partition, leader, number of replicas


class Topic(NamedTuple):
    """What a broker tells of a topic.

    Attributes:
        error: Kafka's code; 0 when there is none.
        internal: Kafka's own.
        leaders: by partition, the node; `NO_LEADER` where there is none.
    """

    error: int
    internal: bool
    leaders: tuple[int, ...]


class Metadata(NamedTuple):
    """The answer to `metadata_of`.

    Attributes:
        brokers: node, host, port, rack.
        controller: the controller's node.
        topics: by name; also those that do not exist, with their error, when they were asked for.
    """

    brokers: list[tuple[int, str, int, str | None]]
    controller: int
    topics: dict[str, Topic]


class _Answer:
    """What aiokafka's connections make of an answer: its bytes behind the header."""

    @staticmethod
    def decode(frame: BytesIO) -> bytes:
        return frame.read()


class Question(RequestStruct):  # type: ignore[misc]  # aiokafka carries no types
    """A request of one version whose body is made here; aiokafka's connections send it like their own."""

    API_KEY = -1
    API_VERSION = -1
    RESPONSE_TYPE = _Answer
    SCHEMA = Schema()

    def __init__(self, body: bytes) -> None:
        """Take the bytes behind the header."""
        self._body = body

    def prepare(self, versions: Mapping[int, tuple[int, int]]) -> Question:
        """See aiokafka's `Request`. Raises IncompatibleBrokerVersion."""
        least, most = versions.get(self.API_KEY, (0, -1))
        if not least <= self.API_VERSION <= most:
            raise IncompatibleBrokerVersion(f"the broker lacks version {self.API_VERSION} of request {self.API_KEY}")
        return self

    def encode(self) -> bytes:
        """The body."""
        return self._body


class _MetadataQuestion(Question):
    API_KEY = 3
    API_VERSION = 4


class _OffsetsQuestion(Question):
    API_KEY = 2
    API_VERSION = 2


class FetchQuestion(Question):
    """A fetch; in this version brokers remember what was asked for before (KIP-227)."""

    API_KEY = 1
    API_VERSION = 7


def metadata_of(topics: Collection[str] | None) -> Question:
    """Ask for the metadata of some topics, or of all (None); none is created by it."""
    if topics is None:
        return _MetadataQuestion(_INT32.pack(-1) + b"\0")
    return _MetadataQuestion(b"".join([_INT32.pack(len(topics)), *map(_text, topics), b"\0"]))


def read_metadata(data: bytes) -> Metadata:
    """The answer to `metadata_of`."""
    brokers: list[tuple[int, str, int, str | None]] = []
    (count,), at = _INT32.unpack_from(data, 4), 8
    for _ in range(count):
        (node,) = _INT32.unpack_from(data, at)
        host, at = _read_text(data, at + 4)
        (port,) = _INT32.unpack_from(data, at)
        rack, at = _read_text(data, at + 4)
        brokers.append((node, host or "", port, rack))
    _, at = _read_text(data, at)  # the cluster's id
    (controller,) = _INT32.unpack_from(data, at)
    (count,) = _INT32.unpack_from(data, at + 4)
    at += 8
    topics: dict[str, Topic] = {}
    for _ in range(count):
        (error,) = _INT16.unpack_from(data, at)
        name, at = _read_text(data, at + 2)
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


def offsets_of(partitions: Iterable[TopicPartition], timestamp: int) -> Question:
    """Ask the leader of some partitions for the offsets of a time: ms since the epoch, `LATEST` or `EARLIEST`.

    What belongs to open transactions is not there yet.
    """
    topics: dict[str, list[int]] = {}
    for topic, number in partitions:
        topics.setdefault(topic, []).append(number)
    parts = [b"\xff\xff\xff\xff", bytes((_READ_COMMITTED,)), _INT32.pack(len(topics))]
    for topic, numbers in topics.items():
        parts += (_text(topic), _INT32.pack(len(numbers)))
        parts += [_PLACE.pack(number, timestamp) for number in numbers]
    return _OffsetsQuestion(b"".join(parts))


def read_offsets(data: bytes) -> Iterable[tuple[TopicPartition, int, int]]:
    """The answer to `offsets_of`: partition, error code, offset (`NOWHERE`: none)."""
    (count,), at = _INT32.unpack_from(data, 4), 8
    for _ in range(count):
        topic, at = _read_text(data, at)
        (partitions,) = _INT32.unpack_from(data, at)
        end = at + 4 + partitions * _OFFSET.size
        for number, error, _, offset in _OFFSET.iter_unpack(memoryview(data)[at + 4 : end]):
            yield TopicPartition(topic, number), error, offset
        at = end


def fetch_of(
    positions: Mapping[TopicPartition, int],
    forgotten: Iterable[TopicPartition],
    *,
    session: tuple[int, int],
    wait_ms: int,
    least: int,
    most: int,
    most_each: int,
    committed: bool,
) -> bytes:
    """The body of a `FetchQuestion`.

    Args:
        positions: from where to read what is new to the session, or read from elsewhere than before.
        forgotten: what is not to be read any more.
        session: its id and the epoch of this fetch.
        wait_ms: how long the broker may wait for `least` bytes.
        least: bytes.
        most: bytes in the answer; of each partition `most_each`.
        most_each: see `most`.
        committed: nothing of open or aborted transactions.
    """
    topics: dict[str, list[bytes]] = {}
    for (topic, number), offset in positions.items():
        topics.setdefault(topic, []).append(_WANTED.pack(number, offset, -1, most_each))
    parts = [_LIMITS.pack(-1, wait_ms, least, most, _READ_COMMITTED if committed else 0, *session)]
    for named in (topics, _packed_numbers(forgotten)):
        parts.append(_INT32.pack(len(named)))
        for topic, packed in named.items():
            parts += (_text(topic), _INT32.pack(len(packed)), *packed)
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
    (size,) = _INT16.unpack_from(data, at)
    at += 2
    if size < 0:
        return None, at
    return data[at : at + size].decode(), at + size
