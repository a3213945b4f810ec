"""Compressed batches are decompressed as aiokafka does it, up to a bound."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Callable
from typing import Any

import aiokafka.codec
import cramjam
import pytest
from aiokafka import TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from kafka_records.decompression import DECODERS, FLOOR, RATIO, TooLargeError, limit_of
from tests.kafka_records.test_fetched_records import read_to, reading
from tests.support.raw_batches import batch, produce_raw

CODECS = {
    1: aiokafka.codec.gzip_encode, 2: aiokafka.codec.snappy_encode, 3: aiokafka.codec.lz4_encode,
    4: aiokafka.codec.zstd_encode,
}  # fmt: skip


@given(st.sampled_from(sorted(CODECS)), st.binary(max_size=5000), st.integers(1, 200))
def test_all_codecs_give_what_was_compressed(codec: int, part: bytes, times: int) -> None:
    data = part * times
    assert DECODERS[codec](CODECS[codec](data)) == data


def test_several_members_and_raw_blocks() -> None:
    assert DECODERS[1](gzip.compress(b"one") + gzip.compress(b"two")) == b"onetwo"
    assert DECODERS[4](bytes(cramjam.zstd.compress(b"one")) + bytes(cramjam.zstd.compress(b"two"))) == b"onetwo"
    assert DECODERS[2](bytes(cramjam.snappy.compress_raw(b"one"))) == b"one"


@pytest.mark.parametrize("codec", [1, 3, 4])  # snappy's results are at most 21 times as large
def test_more_than_the_bound_is_refused(codec: int) -> None:
    encode: Callable[[bytes], bytes] = CODECS[codec]
    bomb = encode(bytes(FLOOR + (1 << 23)))
    with pytest.raises(TooLargeError, match=str(limit_of(bomb))):
        DECODERS[codec](bomb)
    assert len(DECODERS[codec](encode(bytes(FLOOR - (1 << 23))))) == FLOOR - (1 << 23)
    assert limit_of(bytes(FLOOR)) == RATIO * FLOOR


@given(st.sampled_from(sorted(CODECS)), st.binary(max_size=300), st.integers(0, 300), st.binary(min_size=1, max_size=8))
def test_damaged_data_raise_nothing_but_exceptions(codec: int, data: bytes, at: int, noise: bytes) -> None:
    damaged = bytearray(CODECS[codec](data * 10))
    at %= len(damaged)
    damaged[at : at + len(noise)] = noise
    with contextlib.suppress(Exception):  # whatever the codec raises but a panic: the reader steps over the batch
        assert len(DECODERS[codec](bytes(damaged))) <= FLOOR


@pytest.mark.parametrize("codec", [1, 4])
async def test_a_bomb_is_stepped_over_and_told(bootstrap: str, new_topic: Any, codec: int) -> None:
    partition = TopicPartition(await new_topic(partitions=1, max_message_bytes="10485760"), 0)
    await produce_raw(bootstrap, partition.topic, batch([b"before"]))
    await produce_raw(bootstrap, partition.topic, batch([bytes(FLOOR + (1 << 23))], codec=codec))
    await produce_raw(bootstrap, partition.topic, batch([b"after"]))
    async with reading(bootstrap, partition) as (consumer, told):
        found = await read_to(consumer, partition, 3)
    assert [record.value for record in found] == [b"before", b"after"]
    assert ["decompressed" in one.why for one in told] == [True]
