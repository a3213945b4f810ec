"""Frames that cannot be decoded close the connection at once and with the reason: proton alone is silent about many."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocols.amqp import outcomes
from protocols.amqp.events import TransfersReceived
from protocols.connection import ConnectionFailed
from tests.support.amqp_frames import DATA, Frames


def raw(body: bytes, *, kind: int = 0, doff: int = 2, size: int | None = None) -> bytes:
    return struct.pack(">IBBH", 8 + len(body) if size is None else size, doff, kind, 0) + body


SILENT = {
    "an unknown performative": raw(Frames.performative(0x19)),
    "a SASL frame after SASL": raw(Frames.performative(0x41, Frames.symbol("PLAIN")), kind=1),
    "an unknown type of frame": raw(Frames.performative(0x13, Frames.uint(0)), kind=2),
    "no performative": raw(Frames.listed(Frames.uint(1))),
    "a list that ends too early": raw(b"\x00\x53\x13\xc0\x20\x09\x43"),
    "random bytes": raw(bytes(range(200, 240))),
    "a performative that is a map": raw(b"\x00\x53\x13\xc1\x01\x00"),
    "deep nesting": raw(b"\x00\x53\x12" + b"\xd0\x00\x00\x20\x00\x00\x00\x00\x01" * 300),
}
BROKEN = {
    "a size below the header's": raw(b"", size=4),
    "a data offset below the header's": raw(b"", doff=1),
    "a data offset beyond the frame": raw(b"", doff=64),
}


def opened(make_server: Any) -> Any:
    server = make_server()
    server.feed(Frames.begin() + Frames.attach())
    server.connection.data_to_send()
    return server


@pytest.mark.parametrize("name", [*SILENT, *BROKEN])
def test_it_is_closed_at_once_with_the_reason(make_server: Any, name: str) -> None:
    server = opened(make_server)
    server.feed((SILENT | BROKEN)[name])
    condition = outcomes.DECODE_ERROR if name in SILENT else outcomes.FRAMING_ERROR
    assert server.events[-1].code == condition
    assert server.connection.closing
    ((code, body),) = Frames.parse(server.connection.data_to_send())
    assert code == 0x18
    assert condition.encode() in body


def test_what_came_before_it_counts(make_server: Any) -> None:
    server = opened(make_server)
    server.feed(Frames.transfer(0, DATA) + SILENT["random bytes"])
    assert [type(event) for event in server.events[-2:]] == [TransfersReceived, ConnectionFailed]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60), st.sampled_from([b"", b"\x00\x53\x13\xc0", b"\x00\x53\x15\xd0", b"\x00\x53\x12"]))
def test_the_connection_is_closed_or_lives(make_server: Any, body: bytes, start: bytes) -> None:
    """After any frame the connection has ended with a reason, or a message is received as ever."""
    server = opened(make_server)
    server.feed(raw(start + body))
    if not server.connection.closing:
        server.feed(Frames.transfer(0, DATA))
        assert server.received or server.connection.closing or not server.links["s"].attached
