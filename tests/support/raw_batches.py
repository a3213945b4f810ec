"""Record batches as bytes: made, broken in every way, and produced as they are, as any foreign producer can."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import aiokafka.codec
from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import NotLeaderForPartitionError, for_code
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy
from aiokafka.record.util import calc_crc32c

Header = tuple[bytes, bytes | None]
ATTRIBUTES_AT: Final = 21
CRC_AT: Final = 17
COUNT_AT: Final = 57
RECORDS_AT: Final = 61
TIME_MS: Final = 1_700_000_000_000


class _Name(str):
    """A header's name of any bytes, for aiokafka's builder."""

    def __new__(cls, raw: bytes) -> _Name:
        made = super().__new__(cls)
        made.raw = raw
        return made

    raw: bytes

    def encode(self, *_: object) -> bytes:
        return self.raw


def batch(
    values: Sequence[bytes | None], headers: Sequence[Header] = (), *, key: bytes | None = b"k", codec: int = 0
) -> bytes:
    """Return a batch of records that have the same key and headers; names of headers may be any bytes."""
    builder = _DefaultRecordBatchBuilderPy(2, 0, 0, -1, -1, -1, 1 << 30)
    named = [(_Name(name), value) for name, value in headers]
    for number, value in enumerate(values):
        builder.append(number, TIME_MS, key, value, named)
    made = bytearray(builder.build())
    body = bytes(made[RECORDS_AT:])
    encode = {
        0: bytes, 1: aiokafka.codec.gzip_encode, 2: aiokafka.codec.snappy_encode, 3: aiokafka.codec.lz4_encode,
        4: aiokafka.codec.zstd_encode,
    }[codec]  # fmt: skip
    made[ATTRIBUTES_AT + 1] |= codec
    return signed(bytes(made[:RECORDS_AT]) + encode(body))


def signed(raw: bytes) -> bytes:
    """Return a batch with its length and checksum set right."""
    sized = raw[:8] + struct.pack(">i", len(raw) - 12) + raw[12:]
    return sized[:CRC_AT] + struct.pack(">I", calc_crc32c(sized[ATTRIBUTES_AT:])) + sized[ATTRIBUTES_AT:]


def _wrong_checksum(raw: bytes) -> bytes:
    return raw[:CRC_AT] + bytes([raw[CRC_AT] ^ 1]) + raw[CRC_AT + 1 :]


def _unknown_codec(raw: bytes) -> bytes:
    return signed(raw[: ATTRIBUTES_AT + 1] + bytes([raw[ATTRIBUTES_AT + 1] | 7]) + raw[ATTRIBUTES_AT + 2 :])


def _not_compressed(raw: bytes) -> bytes:
    return signed(raw[: ATTRIBUTES_AT + 1] + bytes([raw[ATTRIBUTES_AT + 1] | 1]) + raw[ATTRIBUTES_AT + 2 :])


def _too_many(raw: bytes) -> bytes:
    return signed(raw[:COUNT_AT] + struct.pack(">i", 1000) + raw[RECORDS_AT:])


def _record_too_long(raw: bytes) -> bytes:
    return signed(raw[:RECORDS_AT] + b"\x7e" + raw[RECORDS_AT + 1 :])


def _too_long(raw: bytes) -> bytes:
    return raw[:8] + struct.pack(">i", 2**30) + raw[12:]


def _too_short(raw: bytes) -> bytes:
    return raw[:8] + struct.pack(">i", 3) + raw[12:]


def _negative_length(raw: bytes) -> bytes:
    return raw[:8] + struct.pack(">i", -7) + raw[12:]


def _unknown_format(raw: bytes) -> bytes:
    return raw[:16] + b"\x01" + raw[17:]


def _far_offset(raw: bytes) -> bytes:
    return struct.pack(">q", 2**40) + raw[8:]


BREAKS: Final[Mapping[str, Callable[[bytes], bytes]]] = {
    "wrong checksum": _wrong_checksum,
    "unknown codec": _unknown_codec,
    "not compressed": _not_compressed,
    "too many records": _too_many,
    "a record too long": _record_too_long,
    "too long": _too_long,
    "too short": _too_short,
    "negative length": _negative_length,
    "old format": _unknown_format,
    "far offset": _far_offset,
}
"""Batches that nothing can read, of the same size as the one that they are made of."""


async def produce_raw(bootstrap: str, topic: str, raw: bytes, partition: int = 0) -> int:
    """Produce the bytes of a batch and return its offset. Raises the broker's KafkaError."""
    client = AIOKafkaClient(bootstrap_servers=bootstrap)
    await client.bootstrap()
    async with contextlib.aclosing(_Closing(client)):
        await client.set_topics([topic])
        while True:
            await client.force_metadata_update()
            leader = client.cluster.leader_for_partition(TopicPartition(topic, partition))
            if leader in (None, -1):
                continue
            answer = await client.send(leader, ProduceRequest(None, -1, 30_000, [(topic, [(partition, raw)])]))
            ((_, ((_, error, offset, *_),)),) = answer.topics
            if error == NotLeaderForPartitionError.errno:
                continue  # the topic is new: the broker does not know yet that it leads it
            if error:
                raise for_code(error)(topic)
            return int(offset)


class _Closing:
    def __init__(self, client: AIOKafkaClient) -> None:
        self.aclose = client.close
