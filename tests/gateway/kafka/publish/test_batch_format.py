"""Our record batches hold the same bytes as aiokafka's own builder makes."""

from __future__ import annotations

import os
from typing import Any

import pytest
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from hypothesis import given
from hypothesis import strategies as st

from gateway.kafka.publish.batch_format import CODECS, HEADER, Records
from mapping.record import Record
from tests.reference.record_buffer import varint

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
values = st.none() | st.sampled_from([b"", b"v", b"x" * 63, b"x" * 64, b"x" * 200, b"x" * 8192, b"x" * 20_000])
headers = st.lists(st.tuples(texts, values), max_size=4).map(tuple)
times = st.integers(0, 20) | st.sampled_from([8191, 8192, 2**40, 2**55, 63, 64])
KINDS = st.lists(st.tuples(st.none() | st.binary(max_size=70), headers), min_size=1, max_size=3)
"""A batch has few kinds of records, so that equal kinds often follow each other."""


def theirs(limit: int, records: list[Any], state: tuple[int, int, int]) -> tuple[list[int], bytes]:
    builder = DefaultRecordBatchBuilder(
        2, 0, is_transactional=0, producer_id=-1, producer_epoch=-1, base_sequence=0, batch_size=limit
    )
    sizes = []
    for timestamp, key, value, pairs in records:
        metadata = builder.append(sum(map(bool, sizes)), timestamp, key=key, value=value, headers=list(pairs))
        sizes.append(0 if metadata is None else metadata.size)
    builder.set_producer_state(*state)
    return sizes, bytes(builder.build())


def ours(limit: int, records: list[Any], state: tuple[int, int, int]) -> tuple[list[int], bytes]:
    batch = Records(limit)
    sizes = [batch.append(*record) for record in records]
    batch.set_producer_state(*state)
    length = batch.size()
    built = bytes(batch.build())
    assert len(built) == length == HEADER.size + sum(sizes)
    return sizes, built


@pytest.mark.parametrize("name", ["lz4", "zstd"])
def test_compressed_is_what_makes_a_batch_smaller_and_aiokafka_reads_it(name: str) -> None:
    for value, count, code in ((b"x" * 100, 50, CODECS[name].code), (os.urandom(5000), 1, 0), (b"x", 2, 0)):
        plain, packed = Records(10**6), Records(10**6, CODECS[name])
        for records in (plain, packed):
            for number in range(count):
                records.append(1000 + number, b"k%d" % number, value, (("h", b"v"),))
            records.set_producer_state(7, 1, 3)
        built = bytes(packed.build())
        assert packed.size() == plain.size() == len(plain.build())
        assert bytes(packed.build()) == built, "`build` may be called again"
        batch = DefaultRecordBatch(built)
        assert batch.validate_crc()
        assert (batch.compression_type, len(built) < plain.size()) == (code, code != 0)
        assert (batch.producer_id, batch.next_offset) == (7, count)
        found = [(one.timestamp, one.key, one.value, tuple(one.headers)) for one in batch]
        assert found == [(1000 + number, b"k%d" % number, value, (("h", b"v"),)) for number in range(count)]


@given(data=st.data(), kinds=KINDS, limit=st.sampled_from([61, 200, 1000, 10**6]))
def test_the_bytes_are_aiokafkas(data: st.DataObject, kinds: list[Any], limit: int) -> None:
    kind = st.sampled_from(kinds)
    drawn = data.draw(st.lists(st.tuples(times, kind, values), min_size=1, max_size=12))
    records = [(timestamp, key, value, pairs) for timestamp, (key, pairs), value in drawn]
    state = data.draw(st.sampled_from([(-1, -1, 0), (2**40, 7, 2**31 - 1)]))
    written, expected = ours(limit, records, state), theirs(limit, records, state)
    # A batch may be as large as its limit; aiokafka's is not always.
    assert written == expected or HEADER.size + sum(written[0]) == limit


def test_more_records_than_any_short_form_counts() -> None:
    records = [(1000, b"k", b"v", ())] * 8200
    assert ours(10**6, records, (1, 2, 3)) == theirs(10**6, records, (1, 2, 3))


@given(
    run=st.lists(values.filter(lambda value: value is not None), max_size=12),
    begin=st.tuples(times, times, st.sampled_from([61, 200, 1000, 10**6]), st.sampled_from([1, 100, 10**6])),
    same=st.booleans(),
)
def test_a_run_is_what_its_records_would_be_one_by_one(
    run: list[Any], begin: tuple[int, int, int, int], same: bool
) -> None:
    first, timestamp, limit, room = begin
    pairs = (("h", b"x"),)
    before = (first, b"k", b"v", pairs) if same else (first, None, b"v", ())
    in_runs, one_by_one = Records(limit), Records(limit)
    for batch in (in_runs, one_by_one):
        batch.append(*before)
    for value in run:
        one_by_one.append(timestamp, b"k", value, pairs)
    records = [Record("t", b"k", value, pairs) for value in run]
    at = 0
    while at < len(run):
        count, size = in_runs.append_records(timestamp, records, at, room)
        assert (count == 0) == (size == 0)
        assert count <= 1 or size - len(run[at + count - 1]) - 30 < room
        at += count
        if at < len(run):
            in_runs.append(timestamp, b"k", run[at], pairs)
            at += 1
    if one_by_one._buffer.count == len(run) + 1:  # else a later, shorter one may have had room
        assert bytes(in_runs.build()) == bytes(one_by_one.build())
    assert in_runs.size() == len(in_runs.build()) <= max(limit, one_by_one.size())


def test_a_run_of_any_values_is_written_at_once() -> None:
    batch = Records(10_000)
    run = [Record("t", b"k", value) for value in (b"", b"v", b"w", b"x" * 9000, b"y" * 9000)]
    assert batch.append_records(5, run, 1, 10_000)[0] == 3
    read = [(record.timestamp, record.value) for record in DefaultRecordBatch(bytes(batch.build()))]
    assert read == [(5, b"v"), (5, b"w"), (5, b"x" * 9000)]


def test_equal_headers_of_another_record_are_not_taken_for_the_same() -> None:
    batch = Records(10_000)
    for content in (b"1", b"2"):
        assert batch.append(5, b"k" + content, b"v", (("h", content),))
    read = [(record.key, list(record.headers)) for record in DefaultRecordBatch(bytes(batch.build()))]
    assert read == [(b"k1", [("h", b"1")]), (b"k2", [("h", b"2")])]


def test_a_record_that_does_not_fit_leaves_no_trace() -> None:
    batch = Records(150)
    assert batch.append(5, None, b"x" * 60, ())
    before = batch.size()
    assert batch.append(9, b"k", b"x" * 60, (("h", b""),)) == 0
    assert (batch.size(), batch._buffer.count) == (before, 1)
    (record,) = DefaultRecordBatch(bytes(batch.build()))
    assert (record.timestamp, record.value) == (5, b"x" * 60)


@pytest.mark.parametrize("timestamp", [2**63, -(2**63), 2**80])
@pytest.mark.parametrize("before", [0, 1])
def test_a_timestamp_beyond_64_bits(timestamp: int, before: int) -> None:
    batch = Records(1000)
    for _ in range(before):
        batch.append(5, b"k", b"v", ())
    with pytest.raises(OverflowError):
        batch.append(timestamp, b"k", b"v", ())
    assert batch._buffer.count == before


def test_a_header_name_without_a_utf8_form() -> None:
    batch = Records(1000)
    with pytest.raises(UnicodeEncodeError):
        batch.append(5, b"k", b"v", (("\ud800", b""),))
    assert batch.append(5, b"k", b"v", (("h", b""),))
    (record,) = DefaultRecordBatch(bytes(batch.build()))
    assert list(record.headers) == [("h", b"")]


@pytest.mark.parametrize(
    ("value", "encoded"), [(0, "00"), (-1, "01"), (1, "02"), (63, "7e"), (64, "8001"), (-65, "8101"), (8192, "808001")]
)
def test_varint(value: int, encoded: str) -> None:
    assert varint(value).hex() == encoded
