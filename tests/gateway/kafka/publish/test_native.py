"""The buffer of records in C is the one in Python, to the byte and to the error. `make sanitize` runs this, too."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.kafka.publish import _native as native
from gateway.kafka.publish.partitioner import Accepted
from mapping.record import Record
from tests.reference import partitions as partitions_in_python
from tests.reference import record_buffer

RecordBuffer, partition_of, by_partition = native.RecordBuffer, native.partition_of, native.by_partition


class Named(bytes):
    """Bytes of a class of their own."""


REFERENCE = record_buffer.RecordBuffer
texts = st.text(max_size=8) | st.sampled_from(["\ud800", "x" * 64, "ä" * 4000])
contents = (
    st.none()
    | st.binary(max_size=8)
    | st.sampled_from([b"x" * 63, b"x" * 64, b"x" * 8192, b"x" * 20_000, Named(b"mine")])
)
pairs = st.lists(st.tuples(texts, contents), max_size=4)
headers = pairs | pairs.map(tuple)
times = (
    st.integers(0, 20) | st.integers(-(2**64), 2**64) | st.sampled_from([2**63 - 1, 2**63, -(2**63), 1 - 2**63, True])
)
stamps = st.sampled_from([0, 7, 9, 2**63 - 1])
appends = st.tuples(st.just("append"), st.tuples(times, contents, contents, headers))
records = st.builds(
    Record,
    st.sampled_from(["t", "t", "t", "u"]),
    contents,
    contents,
    pairs.map(tuple),
    st.none() | stamps,
    st.sampled_from([None, None, None, 3]),
)
runs = st.tuples(
    st.just("append_records"),
    st.tuples(times, st.lists(records, max_size=6), st.integers(0, 3), st.sampled_from([-1, 1, 100, 10**6])),
)
limits = st.sampled_from([-1, 0, 61, 200, 1000, 30_000, 10**6])


def outcome(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return a call's result, or the type and text of its exception."""
    try:
        return call(*arguments)
    except (OverflowError, UnicodeEncodeError, BufferError) as error:
        return type(error), str(error)


@given(limit=limits, before=st.binary(max_size=70), calls=st.lists(appends | runs, max_size=12))
def test_it_does_what_the_reference_does(limit: int, before: bytes, calls: list[Any]) -> None:
    theirs, ours = bytearray(before), bytearray(before)
    reference, buffer = REFERENCE(theirs, limit), RecordBuffer(ours, limit)
    for name, arguments in calls:
        assert outcome(getattr(buffer, name), *arguments) == outcome(getattr(reference, name), *arguments)
        assert (buffer.count, buffer.first, buffer.last) == (reference.count, reference.first, reference.last)
    assert ours == theirs


class Number:
    """A timestamp that changes the headers when it is read."""

    def __init__(self, headers: list[Any]) -> None:
        self.headers = headers

    def __index__(self) -> int:
        self.headers.clear()
        return 5


class Topic(str):
    """A topic that changes the tokens when it is compared."""

    tokens: list[Any]

    def __eq__(self, other: object) -> bool:
        self.tokens.clear()
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_lists_may_change_while_they_are_read() -> None:
    headers: list[Any] = [(f"name-{number}", b"value") for number in range(50)]
    out = bytearray()
    assert RecordBuffer(out, 1000).append(Number(headers), b"k", b"v", headers) == len(out) == 9
    topic = Topic("t")
    topic.tokens = [object() for _ in range(3)]
    run = [Record("t", b"k", b"v"), Record(topic, b"k", b"v"), Record("t", b"k", b"v")]
    assert by_partition(run, topic.tokens, 0, Accepted(1, -1, 0, 9, 9))[0] == 2
    assert topic.tokens == []


def test_a_record_that_no_length_holds() -> None:
    part = bytes(2**26)  # of the system's zero page: neither form of the buffer reads it
    for made in (RecordBuffer, REFERENCE):
        found = outcome(made(bytearray(), 100).append, 5, None, None, [("n", part)] * 32)
        assert found == (OverflowError, "a record of more than 2147483647 bytes")


def test_a_run_ends_before_the_record_that_cannot_be_written() -> None:
    values: Any = [b"1", b"2", "no bytes", b"3"]
    run = [Record("t", b"k", value) for value in values]
    for made in (RecordBuffer, REFERENCE):
        buffer = made(bytearray(), 10**6)
        assert buffer.append_records(5, run, 0, 10**6) == (2, 18)
        assert buffer.append_records(5, run, 2, 10**6) == (0, 0)
        with pytest.raises(TypeError):
            buffer.append(5, b"k", values[2], ())
        assert buffer.append_records(5, run, 3, 10**6) == (1, 9)
        assert buffer.append_records(5, run, 4, 10**6) == (0, 0)


@given(
    run=st.lists(records, min_size=1, max_size=8), start=st.integers(0, 7), tokens=st.integers(6, 8),
    accepted=st.builds(Accepted, st.integers(1, 9), st.integers(-1, 2), stamps, stamps, st.integers(0, 3)),
)  # fmt: skip
def test_records_are_sorted_as_the_reference_sorts_them(
    run: list[Record], start: int, tokens: int, accepted: Accepted
) -> None:
    arguments = (run, list(range(tokens)), start % len(run), accepted)
    assert by_partition(*arguments) == partitions_in_python.by_partition(*arguments)


def test_bytes_with_a_memoryview_are_not_resized() -> None:
    for made in (RecordBuffer, REFERENCE):
        out = bytearray()
        buffer = made(out, 1000)
        size = buffer.append(5, b"k", b"v", ())
        with memoryview(out):
            for value in (b"w", bytes(500)):
                with pytest.raises(BufferError):
                    buffer.append(6, b"k", value, ())
            assert buffer.append_records(6, [Record("t", b"k", b"w")], 0, 100) == (0, 0)
        assert (buffer.count, buffer.last, len(out)) == (1, 5, size)
        assert buffer.append(6, b"k", b"w", ()) == size


KEY, VALUE, NAME = b"the key", b"the value", "the name"
PAIR = (NAME, VALUE)
PAIRS = [PAIR, (NAME, None)]
WRONG: list[tuple[str, tuple[Any, ...]]] = [
    ("append", (1, 2, VALUE, ())),
    ("append", (1, KEY, "v", ())),
    ("append", (1, KEY, bytearray(VALUE), ())),
    ("append", (1, KEY, VALUE, 7)),
    ("append", (1, KEY, VALUE, (b"hv",))),
    ("append", (1, KEY, VALUE, ((NAME,),))),
    ("append", (1, KEY, VALUE, ((b"h", VALUE),))),
    ("append", (1, KEY, VALUE, ((NAME, "v"),))),
    ("append", (1.5, KEY, VALUE, ())),
    ("append", ("1", KEY, VALUE, ())),
    ("append", (1, KEY, VALUE)),
    ("append", (1, KEY, VALUE, (), ())),
    ("append_records", (1, [Record("t", KEY, VALUE)], "0", 9)),
    ("append_records", (1, [Record("t", KEY, VALUE)], 0, None)),
    ("append_records", (1, [Record("t", KEY, VALUE)])),
]
RIGHT: list[tuple[str, tuple[Any, ...]]] = [
    ("append", (1, KEY, VALUE, tuple(PAIRS))),
    ("append", (1, None, None, iter(PAIRS))),
    ("append", (2**80, KEY, VALUE, ())),
    ("append", (1, KEY, VALUE, [("\ud800", VALUE)])),
    ("append", (1, KEY, bytes(2000), ())),
    ("append_records", (1, [Record("t", KEY, VALUE, (PAIR,)), Record("t", None, None)], 0, 9)),
    ("append_records", (1, [Record("t", KEY, VALUE), "no record"], 0, 900)),
    ("append_records", (1, [Record("t", KEY, VALUE), Record("t", KEY, "w")], 0, 900)),  # type: ignore[arg-type]
    ("append_records", (1, [Record("t", KEY, VALUE, (("\ud800", VALUE),))], 0, 9)),
]


@pytest.mark.parametrize(("name", "arguments"), WRONG)
def test_arguments_of_wrong_types_are_type_errors(name: str, arguments: tuple[Any, ...]) -> None:
    out = bytearray(b"before")
    buffer = RecordBuffer(out, 1000)
    with pytest.raises(TypeError):
        getattr(buffer, name)(*arguments)
    assert (buffer.count, out) == (0, b"before")


@pytest.mark.parametrize("arguments", [(1, [], -1, 9), (1, (), 0, 9)])
def test_a_run_is_a_list_from_a_position_on(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        RecordBuffer(bytearray(), 1000).append_records(*arguments)


@pytest.mark.parametrize("arguments", [(), (bytearray(),), (b"", 1), (bytearray(), "1"), (bytearray(), 2**63)])
def test_a_buffer_is_made_around_a_bytearray(arguments: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, OverflowError)):
        RecordBuffer(*arguments)


@given(key=st.binary(max_size=40), partitions=st.integers(1, 2**31 - 1))
def test_a_key_has_the_partition_that_the_reference_finds(key: bytes, partitions: int) -> None:
    assert partition_of(key, partitions) == partitions_in_python.partition_of(key, partitions)


WRONG_KEYS: list[tuple[Any, ...]] = [(KEY,), (KEY, 1, 2), ("k", 1), (None, 1), (KEY, "1"), (KEY, 2**80)]


RUN: list[Any] = [Record("t", KEY, VALUE), Record("t", None, VALUE), Record("t", KEY, None, (), 1)]
ALL: Final = Accepted(3, 1, 0, 9, 3)
RIGHT_RUNS: list[tuple[Any, ...]] = [(RUN, [NAME, PAIR, KEY], 0, ALL), (RUN, [NAME], 0, ALL._replace(keyless=-1))]
WRONG_RUNS: list[tuple[Any, ...]] = [
    (RUN, [NAME], 3, ALL), (RUN, [NAME], -1, ALL), (RUN, [NAME], 0, ALL._replace(partitions=0)),
    (RUN, [NAME], 0, ALL._replace(keyless=-2)), (["no record"], [NAME], 0, ALL),
    ([RUN[0], "no record"], [NAME, KEY], 0, ALL), (RUN, (NAME,), 0, ALL), (RUN,), (RUN, [NAME], 0, 7),
    ([Record("t", KEY, None, (), "now")], [NAME], 0, ALL),  # type: ignore[arg-type]
]  # fmt: skip


@pytest.mark.parametrize("arguments", WRONG_RUNS)
def test_what_cannot_be_sorted(arguments: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, ValueError)):
        by_partition(*arguments)


@pytest.mark.parametrize("arguments", WRONG_KEYS)
def test_what_has_no_partition(arguments: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, OverflowError)):
        partition_of(*arguments)
    with pytest.raises(ValueError, match="partitions"):
        partition_of(KEY, 0)


def test_no_reference_is_leaked() -> None:
    times = 500

    def everything() -> None:
        buffer = RecordBuffer(bytearray(), 1000)
        for name, arguments in (*WRONG, *RIGHT):
            try:
                getattr(buffer, name)(*arguments)
            except (OverflowError, UnicodeEncodeError, TypeError):
                continue
        for arguments in (*WRONG_KEYS, (KEY, 7)):
            with contextlib.suppress(OverflowError, TypeError):
                partition_of(*arguments)
        for arguments in WRONG_RUNS + RIGHT_RUNS:
            with contextlib.suppress(TypeError, ValueError):
                by_partition(*arguments)

    given: list[Any] = [KEY, VALUE, NAME, PAIR, PAIRS]
    everything()
    before, blocks = [sys.getrefcount(one) for one in given], sys.getallocatedblocks()
    for _ in range(times):
        everything()
    after = sys.getallocatedblocks()
    assert [sys.getrefcount(one) for one in given] == before
    assert after - blocks < times // 5
