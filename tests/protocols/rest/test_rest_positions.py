"""Positions: clients get them as an event's id, and send them back to continue there."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.rest.errors import RestError
from protocols.rest.positions import (
    BEGINNING,
    LARGEST_OFFSET,
    LARGEST_PARTITION,
    WantedPosition,
    format_position,
    parse_position,
    wanted,
)

positions = st.dictionaries(st.integers(0, LARGEST_PARTITION), st.integers(0, LARGEST_OFFSET), max_size=20)


@given(positions)
def test_formatted_positions_are_parsed(position: dict[int, int]) -> None:
    assert parse_position(format_position(position), "x") == position


@given(st.text(max_size=30))
def test_no_text_is_more_than_a_position_or_a_refusal(text: str) -> None:
    with contextlib.suppress(RestError):
        position = parse_position(text, "x")
        assert parse_position(format_position(position), "x") == position


@pytest.mark.parametrize("text", ["0", "0:", ":1", "0:1,", "0:1,0:2", "0:-1", "0:1;1:2", f"0:{2**63}", "²:1", " 0:1"])
def test_an_invalid_position_is_refused(text: str) -> None:
    with pytest.raises(RestError) as caught:
        parse_position(text, "the field")
    assert caught.value.status == 422


def test_ways_to_give_the_start_exclude_each_other() -> None:
    assert wanted({}) == WantedPosition()
    assert wanted({"from": "beginning", "partition": 2}) == WantedPosition(edge=BEGINNING, partition=2)
    assert wanted({"from": "0:7"}) == WantedPosition(position={0: 7})
    assert wanted({"offset": 7, "partition": 1}) == WantedPosition(position={1: 7}, partition=1)
    assert wanted({"timestamp": 5}) == WantedPosition(timestamp=5)
    assert wanted({"from": "end"}, "0:3") == WantedPosition(position={0: 3}), "who comes back goes on where it was"
    for contradiction in ({"offset": 1}, {"from": "end", "timestamp": 1}, {"offset": 1, "partition": 0, "from": "end"}):
        with pytest.raises(RestError) as caught:
            wanted(contradiction)
        assert caught.value.status == 422
