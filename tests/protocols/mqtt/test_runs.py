"""Similar packets are parsed in runs: the result must not depend on which packet follows which."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.mqtt.properties import NONE, Properties
from tests.protocols.mqtt.client import opened

TOPICS = (b"\0\3a/b", b"\0\3a/c", b"\0\1\xff", b"\0\0", b"\0\3a")
IDENTIFIERS = (b"\0\1", b"\0\2", b"\1\0", b"\0\0")
PROPERTIES = (b"\0", b"\0", b"\2\1\1", b"\3\x23\0\1", b"\1\xff", b"\x80\0")
LENGTHS = (0, 1, 5, 5, 5, 121, 122, 123, 130, 16_400)
ANNOUNCED = (NONE, Properties(receive_maximum=3, topic_alias_maximum=1), Properties(maximum_packet_size=60))
FIRSTS = (0x30, 0x30, 0x31, 0x32, 0x32, 0x32, 0x3A, 0x34, 0x36, 0x40, 0xC0)


@st.composite
def packets(draw: Any, version: int) -> bytes:
    """PUBLISH packets, mostly good, with every mistake that a run could hide; a PUBACK or PINGREQ in between."""
    first = draw(st.sampled_from(FIRSTS))
    if first == 0xC0:
        return b"\xc0\0"
    if first == 0x40:
        return b"\x40\2\0\7"
    body = draw(st.sampled_from(TOPICS[:1] * 20 + TOPICS))
    if first & 0x06:
        body += draw(st.sampled_from(IDENTIFIERS[:2] * 10 + IDENTIFIERS))
    if version == 5:
        body += draw(st.sampled_from(PROPERTIES[:1] * 10 + PROPERTIES))
    body += b"x" * draw(st.sampled_from(LENGTHS))
    body = body[: draw(st.sampled_from((len(body),) * 20 + (1, 2, 5, 6, 7)))]
    length = len(body)
    header = bytes((length,)) if length < 0x80 else bytes((length & 0x7F | 0x80, length >> 7))
    if length > 0x3FFF:
        header = bytes((length & 0x7F | 0x80, length >> 7 & 0x7F | 0x80, length >> 14))
    elif length < 0x80 and draw(st.sampled_from((True,) + (False,) * 30)):
        header = bytes((length | 0x80, 0))  # longer than it needs to be
    return bytes((first,)) + header + body


def parsed(version: int, announced: Properties, pieces: list[bytes]) -> tuple[list[Any], bytes, int]:
    connection = opened(version, announced)
    events = [event for piece in pieces for event in connection.receive_data(piece)]
    return events, connection.data_to_send(), 0 if connection.closing else connection.inbound.used


@pytest.mark.parametrize("version", [5, 4])
@given(data=st.data())
def test_a_run_is_what_its_packets_are_one_by_one(version: int, data: st.DataObject) -> None:
    stream = data.draw(st.lists(packets(version), max_size=12))
    announced = data.draw(st.sampled_from(ANNOUNCED))
    one_by_one = parsed(version, announced, stream)
    whole = b"".join(stream)
    assert parsed(version, announced, [whole]) == one_by_one
    cut = data.draw(st.integers(0, len(whole)))
    assert parsed(version, announced, [whole[:cut], whole[cut:]]) == one_by_one
