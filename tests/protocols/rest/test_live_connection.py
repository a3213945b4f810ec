"""The live WebSocket without a socket: messages split anywhere, bad messages answered, bad frames close it."""

from __future__ import annotations

import itertools
import json
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.connection import ConnectionClosed, ConnectionFailed
from protocols.rest.errors import RestError
from protocols.rest.media import Format
from protocols.rest.streams.live_connection import SILENT_HEARTBEATS, LiveConnection, text_frame
from protocols.rest.streams.live_messages import (
    Acknowledge,
    BadMessage,
    Credit,
    LiveProduce,
    LiveSubscribe,
    LiveUnsubscribe,
    Release,
    delivery_message,
    failed,
    record_message,
)
from tests.support.websocket import CLOSE, CONTINUATION, PING, PONG, TEXT, close_frame, frame, parse

SAID: list[tuple[dict[str, Any], Any]] = [
    (
        {"type": "produce", "id": "1", "topic": "t", "records": [{"value": 1}], "format": "text", "partition": 2},
        LiveProduce(id="1", topic="t", records=msgspec.Raw(b'[{"value": 1}]'), format=Format.TEXT, partition=2),
    ),
    (
        {"type": "subscribe", "id": "s", "topic": "t", "from": "0:1", "key": ["a"], "credit": 5},
        LiveSubscribe(id="s", topic="t", start="0:1", key=("a",), credit=5),
    ),
    ({"type": "credit", "id": "s", "credit": 3}, Credit(id="s", credit=3)),
    ({"type": "ack", "id": "s", "deliveries": [1, 2]}, Acknowledge(id="s", deliveries=(1, 2))),
    ({"type": "release", "id": "s", "deliveries": [3], "failed": True}, Release(id="s", deliveries=(3,), failed=True)),
    ({"type": "unsubscribe", "id": "s"}, LiveUnsubscribe(id="s")),
]
STREAM = b"".join(frame(json.dumps(message).encode(), TEXT) for message, _ in SAID) + frame(b"?", PING)


def connection(limit: int = 1000) -> LiveConnection:
    made = LiveConnection(limit, 10.0)
    assert made.tick(100.0) == []
    return made


def sent(live: LiveConnection) -> list[tuple[int, bytes]]:
    frames, rest = parse(live.data_to_send())
    assert rest == b""
    return frames


def code_of(live: LiveConnection) -> int:
    frames = sent(live)
    assert frames[-1][0] == CLOSE
    return int(struct.unpack("!H", frames[-1][1][:2])[0])


def test_messages_become_events() -> None:
    live = connection()
    assert live.receive_data(STREAM) == [event for _, event in SAID]
    assert sent(live) == [(PONG, b"?")]


def test_byte_by_byte_it_is_the_same() -> None:
    live = connection()
    events = [event for at in range(len(STREAM)) for event in live.receive_data(STREAM[at : at + 1])]
    assert events == [event for _, event in SAID]


@given(st.lists(st.integers(0, len(STREAM)), max_size=6))
def test_however_it_is_cut(cuts: list[int]) -> None:
    live = connection()
    edges = [0, *sorted(cuts), len(STREAM)]
    events = [event for begin, end in itertools.pairwise(edges) for event in live.receive_data(STREAM[begin:end])]
    assert events == [event for _, event in SAID]


def test_a_message_in_many_frames_is_one() -> None:
    live = connection()
    text = json.dumps(SAID[0][0]).encode()
    frames = [frame(text[:1], TEXT, fin=False)]
    frames += [frame(text[at : at + 1], CONTINUATION, fin=False) for at in range(1, len(text))]
    frames.append(frame(b"", CONTINUATION))
    assert live.receive_data(b"".join(frames)) == [SAID[0][1]]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("{x", None),
        ("[]", None),
        ('{"type": "nothing", "id": "7"}', "7"),
        ('{"id": "7"}', "7"),
        ('{"type": "produce", "id": "7", "topic": "t"}', "7"),
        ('{"type": "produce", "id": "7", "topic": "t", "records": [], "wrong": 1}', "7"),
        ('{"type": "credit", "id": "7", "credit": "many"}', "7"),
        ('{"type": "credit", "id": 7, "credit": 1}', None),
        ('{"type": "ack", "id": "' + "x" * 300 + '", "deliveries": []}', None),
        ("[" * 900, None),
    ],
)
def test_a_bad_message_gets_an_error_with_its_id_and_the_connection_stays_open(text: str, name: str | None) -> None:
    live = connection()
    (bad,) = live.receive_data(frame(text.encode(), TEXT))
    assert isinstance(bad, BadMessage)
    assert (bad.id, bad.error.status) == (name, 400)
    assert not live.closing
    assert live.receive_data(frame(json.dumps(SAID[2][0]).encode(), TEXT)) == [SAID[2][1]]


@given(st.text(max_size=40))
def test_no_text_raises(text: str) -> None:
    (event,) = connection().receive_data(frame(text.encode("utf-8", "replace"), TEXT))
    assert isinstance(event, BadMessage)


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_no_bytes_raise_and_bad_frames_close_the_connection_once(parts: list[bytes]) -> None:
    live = connection()
    events = [event for part in parts for event in live.receive_data(part)]
    assert sum(isinstance(event, ConnectionFailed | ConnectionClosed) for event in events) == live.closing


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(b"x" * 1001, TEXT), 1009),
        (frame(b"x" * 600, TEXT, fin=False) + frame(b"x" * 600, CONTINUATION), 1009),
        (frame(b"x"), 1003),
        (frame(b"\xff", TEXT), 1007),
        (frame(b"x", TEXT, masked=False), 1002),
        (frame(b"x", CONTINUATION), 1002),
    ],
)
def test_bad_frames_close_the_connection_with_their_code(data: bytes, code: int) -> None:
    live = connection()
    events = live.receive_data(data)
    assert [type(event) for event in events] == [ConnectionFailed]
    assert events[0].code == str(code)
    assert live.closing
    assert code_of(live) == code
    assert live.receive_data(frame(b"{}", TEXT)) == []
    live.send(b"too late")
    assert live.data_to_send() == b""


def test_close() -> None:
    live = connection()
    assert live.receive_data(close_frame(1000, "done")) == [ConnectionClosed("1000")]
    assert live.closing
    assert code_of(live) == 1000
    live = connection()
    assert [type(event) for event in live.receive_eof()] == [ConnectionFailed]
    live = connection()
    live.close()
    assert code_of(live) == 1001
    assert live.next_deadline() is None
    assert live.receive_eof() == []


def test_a_silent_peer_is_pinged_and_then_closed() -> None:
    live = connection()
    deadline = live.next_deadline()
    assert deadline == 110.0
    assert live.tick(110.0) == []
    assert sent(live) == [(PING, b"")]
    assert live.receive_data(frame(b"", PONG)) == []
    assert live.next_deadline() == 120.0
    for at in range(120, 110 + 10 * SILENT_HEARTBEATS, 10):
        assert live.tick(float(at)) == []
    assert [type(event) for event in live.tick(110.0 + 10 * SILENT_HEARTBEATS)] == [ConnectionFailed]


def test_a_peer_that_is_not_read_cannot_be_silent() -> None:
    live = connection()
    live.reading = False
    for at in range(110, 300, 10):
        assert live.tick(float(at)) == []
    live.reading = True
    assert live.tick(301.0) == []
    assert not live.closing


@pytest.mark.parametrize("size", [0, 125, 126, 65535, 65536])
def test_frames_are_as_long_as_they_say(size: int) -> None:
    assert parse(text_frame(b"x" * size)) == ([(TEXT, b"x" * size)], b"")


def test_answers_are_json() -> None:
    name = 'a"\u20ac'
    assert json.loads(record_message(name, b'{"x":1}', "0:1")) == {
        "type": "record", "id": name, "position": "0:1", "record": {"x": 1},
    }  # fmt: skip
    assert json.loads(delivery_message(name, b"{}", 3, 1)) == {
        "type": "record", "id": name, "delivery": 3, "attempts": 1, "record": {},
    }  # fmt: skip
    assert json.loads(failed(None, RestError(400, "m", validation_errors=("v",)))) == {
        "type": "error", "id": None, "error_code": 400, "message": "m", "validation_errors": ["v"],
    }  # fmt: skip
