"""Serial number arithmetic (RFC 1982) on 32 bits: AMQP's delivery counts and transfer numbers wrap.

Only these functions may compare or subtract such numbers.
"""

from __future__ import annotations

from typing import Final

BITS: Final = 32
MODULUS: Final = 1 << BITS
HALF: Final = 1 << (BITS - 1)


class SerialError(ValueError):
    """No serial number, or two whose order is undefined (RFC 1982 part 3.2)."""


def add(number: int, increment: int) -> int:
    """`number` plus `increment`, which is 0 to 2**31 - 1 (RFC 1982 part 3.1)."""
    _check(number)
    if not 0 <= increment < HALF:
        raise SerialError(f"an increment of {increment} is not defined")
    return (number + increment) % MODULUS


def distance(later: int, earlier: int) -> int:
    """How far `later` is ahead of `earlier`; negative when it is behind.

    Raises:
        SerialError: they are 2**31 apart, where the order is undefined.
    """
    _check(later)
    _check(earlier)
    ahead = (later - earlier) % MODULUS
    if ahead == HALF:
        raise SerialError(f"the order of {later} and {earlier} is undefined")
    return ahead - MODULUS if ahead > HALF else ahead


def is_before(first: int, second: int) -> bool:
    """Whether `first` precedes `second`; see `distance`."""
    return distance(second, first) > 0


def _check(number: int) -> None:
    if not 0 <= number < MODULUS:
        raise SerialError(f"{number} is no serial number of {BITS} bits")
