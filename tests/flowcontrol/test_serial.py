"""RFC 1982 on 32 bits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcontrol.serial import HALF, MODULUS, SerialError, add, distance, is_before

numbers = st.integers(0, MODULUS - 1)


@given(numbers, st.integers(0, HALF - 1))
def test_distance_undoes_add(number: int, increment: int) -> None:
    later = add(number, increment)
    assert distance(later, number) == increment
    assert distance(number, later) == -increment
    assert is_before(number, later) == (increment > 0)


@given(numbers)
def test_half_way_round_has_no_order(number: int) -> None:
    opposite = (number + HALF) % MODULUS
    with pytest.raises(SerialError, match="undefined"):
        distance(number, opposite)


@given(numbers, numbers)
def test_one_precedes_the_other(one: int, other: int) -> None:
    if (one - other) % MODULUS == HALF:
        return
    assert (one == other) + is_before(one, other) + is_before(other, one) == 1


def test_it_wraps() -> None:
    assert add(MODULUS - 1, 1) == 0
    assert distance(0, MODULUS - 2) == 2


@pytest.mark.parametrize("bad", [-1, MODULUS])
def test_what_is_no_serial_number(bad: int) -> None:
    with pytest.raises(SerialError):
        add(bad, 1)
    with pytest.raises(SerialError):
        distance(0, bad)
    with pytest.raises(SerialError):
        add(0, HALF)
    with pytest.raises(SerialError):
        add(0, -1)
