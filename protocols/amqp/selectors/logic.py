"""The operators of JMS selectors: each function here builds a function that evaluates a message (see `parser`).

Logic has three values (JMS 2.0, 3.8.1.2); unknown is None. A comparison of values of different types is FALSE, for `=`
and for `<>` (3.8.1.1).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

LIKE_LIMIT: Final = 8192  # characters; LIKE on a longer text is unknown
_LONG_LOW, _LONG_HIGH = -(1 << 63), 1 << 63

Value = bool | int | float | str | bytes | None
"""The value of a name; None when the message has none. Bytes are not NULL, but match nothing."""

Truth = bool | None
Getter = Callable[[Any], Value]
Calculate = Callable[[Any, Any], int | float | None]


class Untyped(str):
    """A text without a type (a Kafka header): compared with a number or a boolean, it is parsed as one."""

    __slots__ = ()


def combination(parts: Sequence[Getter], *, decisive: bool) -> Getter:
    """Build OR (`decisive` is True) or AND (False); without a decisive part, an unknown one makes the whole unknown."""

    def combined(message: Any) -> Truth:
        result: Truth = not decisive
        for part in parts:
            truth = part(message)
            if truth is decisive:
                return decisive
            if truth is None:
                result = None
        return result

    return combined


def negation(part: Getter) -> Getter:
    """Build NOT; NOT unknown is unknown."""

    def negated(message: Any) -> Truth:
        truth = part(message)
        return None if truth is None else not truth

    return negated


def as_condition(get: Getter) -> Getter:
    """Build a condition from a name; a value that is no boolean is unknown."""
    return lambda message: _boolean(get(message))


_BOOLEANS: Final = {"true": True, "false": False}
_DECIMAL: Final = re.compile(
    r"([+-]?[0-9]{1,19})|[+-]?(?:[0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,3})?"
)


def _boolean(value: Value) -> Truth:
    """Return the value as a boolean, or None if it is none."""
    if type(value) is bool:
        return value
    return _BOOLEANS.get(value.lower()) if type(value) is Untyped else None


def _number(value: Value) -> int | float | None:
    """Return the value as a number, or None if it is none."""
    kind = type(value)
    if kind is int or kind is float:
        return value  # type: ignore[return-value]
    if kind is Untyped:
        match = _DECIMAL.fullmatch(value)  # type: ignore[arg-type]
        if match is not None:
            return int(match[0]) if match[1] else float(match[0])
    return None


def text_equality(get: Getter, text: str, *, equal: bool) -> Getter:
    """Build `=` or `<>` of a name and a string literal, the fast case of nearly all selectors."""
    if equal:
        return lambda message: None if (value := get(message)) is None else value == text
    return lambda message: None if (value := get(message)) is None else isinstance(value, str) and value != text


def equality(left: Getter, right: Getter, *, equal: bool) -> Getter:
    """Build `=` or `<>`; with values of different types both are FALSE."""

    def compared(message: Any) -> Truth:
        first = left(message)
        second = right(message)
        if first is None or second is None:
            return None
        same = _same(first, second)
        return False if same is None else same is equal

    return compared


def _same(first: Value, second: Value) -> bool | None:
    """Whether two values are equal; None when their types differ."""
    if isinstance(first, str) and isinstance(second, str):
        return first == second
    if type(first) is bool or type(second) is bool:
        truth, other = _boolean(first), _boolean(second)
        return None if truth is None or other is None else truth is other
    number, another = _number(first), _number(second)
    return None if number is None or another is None else number == another


_ORDERS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def ordering(sign: str, left: Getter, right: Getter) -> Getter:
    """Build a comparison by order; it is FALSE if a value is no number (3.8.1.1)."""
    holds = _ORDERS[sign]

    def compared(message: Any) -> Truth:
        first = left(message)
        second = right(message)
        if first is None or second is None:
            return None
        number, other = _number(first), _number(second)
        return False if number is None or other is None else holds(number, other)

    return compared


def membership(get: Getter, texts: frozenset[str], numbers: frozenset[int | float]) -> Getter:
    """Build IN: whether the value equals one of the literals."""

    def member(message: Any) -> Truth:
        value = get(message)
        if value is None:
            return None
        if isinstance(value, str) and value in texts:
            return True
        return bool(numbers) and _number(value) in numbers

    return member


def _fitted(number: int | float) -> int | float:
    return float(number) if type(number) is int and not _LONG_LOW <= number < _LONG_HIGH else number


def _divided(number: Any, by: Any) -> int | float | None:
    """Divide as Java does: integers are truncated towards zero. Division by zero is unknown."""
    if by == 0:
        return None
    if type(number) is int and type(by) is int:
        whole = abs(number) // abs(by)
        return _fitted(whole if (number < 0) == (by < 0) else -whole)
    return float(float(number) / by)


ARITHMETIC: Final[dict[str, Calculate]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": _divided,
}  # fmt: skip


def calculation(first: Getter, steps: Sequence[tuple[Calculate, Getter]]) -> Getter:
    """Build an expression that is calculated from left to right; an operand that is no number makes it unknown."""

    def calculated(message: Any) -> int | float | None:
        total = _number(first(message))
        for calculate, operand in steps:
            number = _number(operand(message))
            if total is None or number is None:
                return None
            total = calculate(total, number)
            if total is not None:
                total = _fitted(total)
        return total

    return calculated


def matches_like(get: Getter, fits: Callable[[str], bool]) -> Getter:
    """Build LIKE; `fits` comes from `pattern`."""

    def like(message: Any) -> Truth:
        text = get(message)
        if text is None:
            return None
        if not isinstance(text, str):
            return False
        return fits(text) if len(text) <= LIKE_LIMIT else None

    return like


def pattern(text: str, escape: str) -> tuple[Callable[[str], bool], int]:
    """Compile a LIKE pattern; return its test and the total length of the parts that contain `_`.

    `%` matches any text, `_` any character. The parts between two `%` have a fixed length, so the first place where one
    matches is the best one, and no backtracking is needed. A part with `_` costs its length at every position.

    Raises:
        ValueError: the pattern ends with an escape character.
    """
    parts: list[list[str | None]] = [[]]  # None matches any character
    characters = iter(text)
    for character in characters:
        if character == escape:
            literal = next(characters, None)
            if literal is None:
                raise ValueError("an escape character at the end of a pattern")
            parts[-1].append(literal)
        elif character == "%":
            parts.append([])
        else:
            parts[-1].append(None if character == "_" else character)
    wild = sum(len(part) for part in parts if None in part)
    forms = ["".join("." if character is None else re.escape(character) for character in part) for part in parts]
    first, *middle = (re.compile(form, re.DOTALL) for form in forms)
    if not middle:
        return (lambda text: first.fullmatch(text) is not None), wild
    last = middle.pop()
    last_length = len(parts[-1])

    def fits(text: str) -> bool:
        match = first.match(text)
        for expression in middle:
            if match is None:
                return False
            match = expression.search(text, match.end())
        end = len(text) - last_length
        return match is not None and match.end() <= end and last.match(text, end) is not None

    return fits, wild
