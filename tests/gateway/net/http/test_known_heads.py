"""A known head gives the same request that aiohttp's parser would read, and no other."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterator
from typing import Any, cast

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpRequestParser
from aiohttp.http_exceptions import HttpProcessingError
from hypothesis import example, given
from hypothesis import strategies as st

from flowcontrol.budget import UNBOUNDED, Budget
from gateway.net.http.known_heads import MAX_HEAD_BYTES, MAX_HEADS, TRIES, KnownHeads

FIELDS = st.lists(
    st.sampled_from(
        [b"Host: here", b"host:here", b"Accept: */*", b"X-A: Content-Length: 3", b"X-B:", b"Connection: keep-alive"]
    ),
    max_size=4,
)
LENGTH = st.sampled_from([b"Content-Length: ", b"content-length: ", b"Content-length: ", b"CONTENT-LENGTH: "])
LINE = st.sampled_from([b"POST /topics/a HTTP/1.1", b"POST /topics/a?async=false HTTP/1.1", b"PUT /a HTTP/1.1"])
BODY = st.binary(max_size=30) | st.sampled_from([b"", b"\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"])


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop that never runs: aiohttp needs one."""
    made = asyncio.new_event_loop()
    yield made
    made.close()


def read(data: bytes, loop: asyncio.AbstractEventLoop) -> list[tuple[str, str, list[tuple[str, str]], bytes]] | None:
    """The requests that aiohttp reads; None if it refuses them, or if one is incomplete."""
    parser: Any = HttpRequestParser(cast("Any", BaseProtocol(loop)), loop, 2**16, auto_decompress=False)
    try:
        messages, _, _ = parser.feed_data(data)
    except HttpProcessingError:
        return None
    if not messages or not all(payload.is_eof() for _, payload in messages):
        return None
    return [
        (message.method, message.path, list(message.headers.items()), payload.read_nowait() if size(message) else b"")
        for message, payload in messages
    ]


def size(message: Any) -> int:
    return int(message.headers.get("Content-Length", 0))


def request(line: bytes, fields: list[bytes], length: bytes, body: bytes, at: int) -> bytes:
    lines = [line, b"Host: it", *fields]
    lines.insert(1 + at % (len(fields) + 2), length + b"%d" % len(body))
    return b"\r\n".join([*lines, b"", body])


@given(LINE, FIELDS, LENGTH, BODY, BODY, st.integers(0, 5), st.integers(0, 400), st.binary(max_size=3), st.booleans())
@example(b"POST /topics/a HTTP/1.1", [], b"Content-Length: ", b"abc", b"abcdefghijklm", 0, 0, b"", False)
def test_a_known_head_gives_the_request_that_the_parser_reads(  # noqa: PLR0917 - the parts of two requests
    loop: asyncio.AbstractEventLoop,
    line: bytes,
    fields: list[bytes],
    length: bytes,
    first: bytes,
    second: bytes,
    at: int,
    where: int,
    change: bytes,
    keep: bool,
) -> None:
    known = KnownHeads[object](UNBOUNDED)
    learnt = request(line, fields, length, first, at)
    was = read(learnt, loop)
    if was is None or len(was) != 1:
        return  # it was refused and is not remembered
    known.remember(learnt[: learnt.find(b"\r\n\r\n") + 4], object())
    data = request(line, fields, length, second, at)
    if not keep:
        where %= len(data)
        data = data[:where] + change + data[where + len(change) :]
    taken = known.find(data)
    body = None if taken is None else taken[1]
    if keep and length in (b"Content-Length: ", b"content-length: "):
        assert body == second
    if body is not None:
        found = read(data, loop)
        assert found is not None
        assert len(found) == 1
        assert found[0][3] == body
        assert found[0][:2] == was[0][:2]
        without = [field for field in found[0][2] if field[0].lower() != "content-length"]
        assert without == [field for field in was[0][2] if field[0].lower() != "content-length"]


def test_a_request_in_pieces_or_with_bytes_behind_it_is_parsed() -> None:
    known = KnownHeads[object](UNBOUNDED)
    whole = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nX: y\r\n\r\nabcde"
    known.remember(whole[:-5], object())
    found = known.find(whole)
    assert found is not None
    assert found[1] == b"abcde"
    for end in range(len(whole)):
        assert known.find(whole[:end]) is None
    assert known.find(whole + b"f") is None
    assert known.find(whole + whole) is None
    for written in (b"+5", b"05", b" 5", b"5 ", b"", b"-5", b"5\t", b"\xc2\xb2"):
        assert known.find(whole.replace(b": 5", b": " + written)) is None


def head(number: int, field: bytes = b"") -> bytes:
    return b"POST /%d HTTP/1.1\r\nHost: it\r\nContent-Length: 1\r\n%b\r\n" % (number, field)


def test_the_number_and_size_of_remembered_heads_is_limited() -> None:
    known = KnownHeads[object](UNBOUNDED)
    for number in range(TRIES):
        known.remember(head(number), object())
    assert known.find(head(TRIES - 1) + b"x") is not None
    assert sum(known.find(head(number) + b"x") is not None for number in range(TRIES)) <= MAX_HEADS
    long = head(0, b"X: %b\r\n" % (b"x" * MAX_HEAD_BYTES))
    known.remember(long, object())
    assert known.find(long + b"x") is None


def test_heads_are_no_longer_remembered_if_none_comes_again() -> None:
    known = KnownHeads[object](UNBOUNDED)
    for number in range(2 * TRIES):
        known.remember(head(0, b"X: %d\r\n" % number), object())
        assert known.find(head(0, b"X: %d\r\n" % (number + 1)) + b"x") is None
    assert known.find(head(0, b"X: %d\r\n" % (2 * TRIES - 1)) + b"x") is None
    assert known.find(head(0, b"X: %d\r\n" % (TRIES - 1)) + b"x") is not None


@pytest.mark.parametrize(("count", "length"), [(0, 0), (6, 10), (5, 700), (1, 3800), (95, 1), (95, 30)])
def test_the_counted_memory_is_the_memory_that_a_head_takes(
    loop: asyncio.AbstractEventLoop, count: int, length: int
) -> None:
    """The bytes of a head, and the objects that aiohttp has made of it."""
    budget = Budget(1 << 30, 1)
    data = head(1, b"".join(b"X-%d: %b\r\n" % (number, b"y" * length) for number in range(count))) + b"x"
    kept = []
    connections = 50
    tracemalloc.start()
    try:
        for _ in range(connections):
            parser: Any = HttpRequestParser(cast("Any", BaseProtocol(loop)), loop, 2**16)
            messages, _, _ = parser.feed_data(data)
            known = KnownHeads[object](budget)
            known.remember(bytes(memoryview(data)[:-1]), messages[0][0])
            kept.append(known)
            del parser, messages
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.9 * taken < budget.bytes < 2 * taken
    for known in kept:
        known.clear()
    assert budget.bytes == 0


def test_no_connection_remembers_more_than_is_free() -> None:
    """A head that is not remembered is parsed: nothing waits for memory."""
    budget = Budget(100_000, 1)
    connections = [KnownHeads[object](budget) for _ in range(20)]
    for number in range(MAX_HEADS):
        for known in connections:
            known.remember(head(number, b"X: %b\r\n" % (b"x" * 1000)), object())
    assert 50_000 < budget.bytes <= 100_000
    has = [known.find(head(0, b"X: %b\r\n" % (b"x" * 1000)) + b"x") is not None for known in connections]
    assert sum(has) > 15
    for known in connections:
        known.clear()
    assert budget.bytes == 0


def test_a_head_instead_of_another_is_counted_once() -> None:
    budget = Budget(100_000, 1)
    known = KnownHeads[object](budget)
    known.remember(head(0, b"X: 1\r\n"), object())
    once = budget.bytes
    known.remember(head(0, b"X: 2\r\n"), object())
    assert budget.bytes == once > 0
    for number in range(MAX_HEADS):
        known.remember(head(10 + number, b"X: 1\r\n"), object())
    assert budget.bytes < (MAX_HEADS + 1) * once
