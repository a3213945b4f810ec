"""JMS selectors: the examples of the specification, a second evaluator on random trees, and text of any kind."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.amqp.selectors.logic import LIKE_LIMIT, Untyped
from protocols.amqp.selectors.parser import DEPTH_LIMIT, TEXT_LIMIT, WILD_LIMIT, SelectorError, compile_selector

Message = dict[str, Any]


def name_of(name: str) -> Callable[[Message], Any]:
    if name.startswith("Forbidden"):
        raise ValueError("no such name")
    return lambda message: message.get(name)


def selected(text: str, **message: Any) -> bool:
    return compile_selector(text, name_of)(message)


@pytest.mark.parametrize(
    ("text", "message", "expected"),
    [
        # 3.8.1.1: literals
        ("a = 'literal''s'", {"a": "literal's"}, True),
        ("a = 57 AND b = -957 AND c = +62", {"a": 57, "b": -957, "c": 62}, True),
        ("a = 0x1F AND b = 017 AND c = 7L", {"a": 31, "b": 15, "c": 7}, True),
        ("a = 7E3 AND b = -57.9E2 AND c = 7. AND d = .5f", {"a": 7e3, "b": -5790.0, "c": 7, "d": 0.5}, True),
        ("a = -9223372036854775808", {"a": -(2**63)}, True),
        ("flag = true", {"flag": True}, True),
        ("flag", {"flag": True}, True),
        ("flag", {"flag": "true"}, False),
        ("NOT flag", {"flag": False}, True),
        ("TRUE", {}, True),
        # names are case sensitive, words are not
        ("colour = 'red'", {"Colour": "red"}, False),
        ("colour iS nOt nULL aNd nOt colour LiKe 'x'", {"colour": "red"}, True),
        ("$a_1.b = 1", {"$a_1.b": 1}, True),
        ("größe = 1", {"größe": 1}, True),
        ('"x-level" = 1', {"x-level": 1}, True),
        ("amqp.annotation.x-opt-offset = '1'", {"amqp.annotation.x-opt-offset": "1"}, True),
        # order of evaluation
        ("a = 1 OR b = 1 AND c = 1", {"a": 1, "b": 0, "c": 0}, True),
        ("(a = 1 OR b = 1) AND c = 1", {"a": 1, "b": 0, "c": 0}, False),
        ("NOT a = 1 AND b = 1", {"a": 0, "b": 1}, True),
        ("2 + 3 * 4 = 14 AND (2 + 3) * 4 = 20 AND 10 - 2 - 3 = 5 AND 2 - -3 = 5", {}, True),
        ("- a = 3 AND - - a = -3 AND -(a + 1) = 2", {"a": -3}, True),
        # arithmetic as in Java
        ("5 / 2 = 2 AND -7 / 2 = -3 AND 7 / -2 = -3 AND 5 / 2.0 = 2.5", {}, True),
        ("a / 0 = 1 OR a / 0 <> 1 OR a / 0.0 IS NOT NULL", {"a": 1}, False),
        ("9223372036854775807 + 1 > 9.2E18", {}, True),
        # kinds are never compared
        ("a = 5", {"a": "5"}, False),
        ("a <> 5", {"a": "5"}, False),
        ("a = '5'", {"a": 5}, False),
        ("a <> '5'", {"a": 5}, False),
        ("a > 5", {"a": "6"}, False),
        ("a = TRUE", {"a": 1}, False),
        ("a <> TRUE", {"a": False}, True),
        ("a = 1", {"a": 1.0}, True),
        ("a = 'x'", {"a": b"x"}, False),
        ("a IS NOT NULL", {"a": b"x"}, True),
        ("a + 1 = 2", {"a": "1"}, False),
        # BETWEEN
        ("age BETWEEN 15 AND 19 AND age NOT BETWEEN 20 AND 30", {"age": 15}, True),
        ("age NOT BETWEEN 15 AND 19", {"age": 20}, True),
        ("age NOT BETWEEN 15 AND 19", {"age": "20"}, False),
        ("age BETWEEN low + 1 AND high", {"age": 3, "low": 2, "high": 3}, True),
        # IN
        ("Country IN (' UK', 'US', 'France')", {"Country": "US"}, True),
        ("Country NOT IN (' UK', 'US', 'France')", {"Country": "Peru"}, True),
        ("Country NOT IN ('UK')", {}, False),
        ("a IN (1, -2, 'x') AND NOT b IN (1)", {"a": -2, "b": True}, True),
        # LIKE
        ("phone LIKE '12%3'", {"phone": "123"}, True),
        ("phone LIKE '12%3'", {"phone": "12993"}, True),
        ("phone LIKE '12%3'", {"phone": "1234"}, False),
        ("word LIKE 'l_se'", {"word": "lose"}, True),
        ("word LIKE 'l_se'", {"word": "loose"}, False),
        ("underscored LIKE '\\_%' ESCAPE '\\'", {"underscored": "_foo"}, True),
        ("underscored LIKE '\\_%' ESCAPE '\\'", {"underscored": "bar"}, False),
        ("phone NOT LIKE '12%3'", {"phone": "1234"}, True),
        ("a LIKE 'a%b' OR a LIKE '%aa%a'", {"a": "aa"}, False),
        ("a LIKE '%' AND a LIKE '%%' AND b LIKE ''", {"a": "x\ny", "b": ""}, True),
        ("a LIKE '.*'", {"a": "xx"}, False),
        ("a NOT LIKE 'x'", {"a": 5}, True),
        # 3.8.1.2: null
        ("a IS NULL AND b IS NOT NULL", {"b": ""}, True),
        ("a = 1 OR NOT a = 1 OR a <> 1 OR a IN ('x') OR a LIKE '%' OR a BETWEEN 1 AND 2 OR a", {}, False),
        ("a = 1 OR b = 1", {"b": 1}, True),
        ("NOT (a = 1 AND b = 1)", {"b": 0}, True),
        ("NOT (a = 1 AND b = 1)", {"b": 1}, False),
        # a header without a type
        ("a = 5 AND a > 4.5 AND a + 1 = 6 AND a IN (5) AND a BETWEEN 5 AND 5", {"a": Untyped("5")}, True),
        ("a = '5' AND a LIKE '_' AND a IN ('5') AND a <> '6'", {"a": Untyped("5")}, True),
        ("a = 2.5E-1 AND b = TRUE AND b", {"a": Untyped(".25"), "b": Untyped("True")}, True),
        ("NOT a AND a <> TRUE", {"a": Untyped("false")}, True),
        ("a = 1 OR a <> 1 OR a > 1 OR a = TRUE OR a", {"a": Untyped("nan")}, False),
    ],
)  # fmt: skip
def test_examples(text: str, message: Message, expected: bool) -> None:
    assert selected(text, **message) is expected


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("", 0),
        ("   ", 3),
        ("a =", 3),
        ("a = 'x", 4),
        ("a = 'x'''' y'z", 13),
        ("a @ b", 2),
        ("a = 1 = 2", 6),
        ("5", 0),
        ("'x'", 0),
        ("a AND 5", 6),
        ("a > 'x'", 4),
        ("a + 'x' = 1", 4),
        ("TRUE > 1", 0),
        ("12abc = 1", 0),
        ("a = 09", 4),
        ("a = 9223372036854775809", 4),
        ("a = 1E999", 4),
        ("a NOT 5", 6),
        ("a IS 5", 5),
        ("a IN ()", 6),
        ("a IN ('x',)", 10),
        ("a IN (b)", 6),
        ("a LIKE b", 7),
        ("a LIKE 'x' ESCAPE 'xy'", 18),
        ("a LIKE 'x!' ESCAPE '!'", 7),
        ("a BETWEEN 1 OR 2", 12),
        ("(a = 1", 6),
        ("a = 1)", 5),
        ("NOT", 3),
        ("AND", 0),
        ("b = 1 AND Forbidden = 1", 10),
        ("a LIKE '_" + "x" * WILD_LIMIT + "'", 7),
        ("(" * (DEPTH_LIMIT + 1) + "a" + ")" * (DEPTH_LIMIT + 1), DEPTH_LIMIT),
        ("a" * (TEXT_LIMIT + 1), TEXT_LIMIT),
    ],
)
def test_errors_have_a_position(text: str, position: int) -> None:
    with pytest.raises(SelectorError, match=f"at character {position + 1}$") as caught:
        compile_selector(text, name_of)
    assert caught.value.position == position


# A second evaluator: it walks trees, has one rule per operator, and knows nothing of text.

NAMES = ("a", "b", "c")
Tree = tuple[Any, ...]

texts = st.sampled_from(["", "x", "xy", "yx%", "it's", "_"])
numbers = st.one_of(st.integers(-5, 5), st.sampled_from([0.5, -1.5, 2.0]), st.just(2**63 - 1))
messages = st.fixed_dictionaries(
    {}, optional={name: st.one_of(st.booleans(), numbers, texts, st.just(b"x")) for name in NAMES}
)
names = st.sampled_from(NAMES).map(lambda name: ("name", name))
arithmetic = st.recursive(
    st.one_of(names, numbers.map(lambda number: ("number", number))),
    lambda inner: st.tuples(st.sampled_from("+-*/"), inner, inner),
    max_leaves=5,
)
patterns = st.text("xy%_'", max_size=5)
conditions: st.SearchStrategy[Tree] = st.recursive(
    st.one_of(
        st.tuples(st.sampled_from(["<", "<=", ">", ">=", "=", "<>"]), arithmetic, arithmetic),
        st.tuples(st.sampled_from(["=", "<>"]), names, texts.map(lambda text: ("text", text))),
        st.tuples(st.sampled_from(["=", "<>"]), names, st.booleans().map(lambda truth: ("boolean", truth))),
        st.tuples(st.just("null"), names, st.booleans()),
        st.tuples(st.just("between"), arithmetic, arithmetic, arithmetic, st.booleans()),
        st.tuples(st.just("in"), names, st.lists(st.one_of(texts, numbers), min_size=1, max_size=3), st.booleans()),
        st.tuples(st.just("like"), names, patterns, st.booleans()),
        names,
    ),
    lambda inner: st.one_of(
        st.tuples(st.just("not"), inner),
        st.tuples(st.sampled_from(["and", "or"]), st.lists(inner, min_size=2, max_size=4)),
    ),
    max_leaves=8,
)


def quoted(value: Any) -> str:
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)


def written(tree: Tree) -> str:
    match tree:
        case ("name", name):
            return str(name)
        case ("number" | "text", value):
            return quoted(value)
        case ("boolean", value):
            return str(value)
        case ("null", inner, negated):
            return f"{written(inner)} is {'not ' if negated else ''}null"
        case ("between", inner, low, high, negated):
            return f"({written(inner)}{' not' if negated else ''} between {written(low)} and {written(high)})"
        case ("in", inner, items, negated):
            return f"{written(inner)}{' NOT' if negated else ''} IN ({','.join(map(quoted, items))})"
        case ("like", inner, pattern, negated):
            return f"({written(inner)}{' NOT' if negated else ''} LIKE {quoted(pattern)})"
        case ("not", inner):
            return f"(NOT {written(inner)})"
        case ("and" | "or", parts):
            return "(" + f" {tree[0]} ".join(map(written, parts)) + ")"
        case (sign, left, right):
            return f"({written(left)} {sign} {written(right)})"
    raise AssertionError(tree)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def value_of(tree: Tree, message: Message) -> Any:
    match tree:
        case ("name", name):
            return message.get(name)
        case ("number" | "text" | "boolean", value):
            return value
    sign, left, right = tree[0], value_of(tree[1], message), value_of(tree[2], message)
    if not is_number(left) or not is_number(right) or (sign == "/" and right == 0):
        return None
    if sign == "/":
        whole = isinstance(left, int) and isinstance(right, int)
        result = (abs(left) // abs(right)) * (1 if (left < 0) == (right < 0) else -1) if whole else left / right
    else:
        result = {"+": left + right, "-": left - right, "*": left * right}[sign]
    return float(result) if isinstance(result, int) and not -(2**63) <= result < 2**63 else result


def kind_of(value: Any) -> str:
    return "number" if is_number(value) else type(value).__name__


def compared(sign: str, left: Any, right: Any) -> bool | None:
    if left is None or right is None:
        return None
    if kind_of(left) != kind_of(right) or isinstance(left, bytes) or (sign not in ("=", "<>") and not is_number(left)):
        return False
    holds: bool = {
        "=": lambda: left == right,
        "<>": lambda: left != right,
        "<": lambda: left < right,
        "<=": lambda: left <= right,
        ">": lambda: left > right,
        ">=": lambda: left >= right,
    }[sign]()
    return holds


def all_of(truths: list[bool | None]) -> bool | None:
    return False if False in truths else None if None in truths else True


def negation_of(truth: bool | None) -> bool | None:
    return None if truth is None else not truth


def any_of(truths: list[bool | None]) -> bool | None:
    return negation_of(all_of([negation_of(truth) for truth in truths]))


def truth_of(tree: Tree, message: Message) -> bool | None:
    match tree:
        case ("name", name):
            value = message.get(name)
            return value if isinstance(value, bool) else None
        case ("not", inner):
            return negation_of(truth_of(inner, message))
        case ("and", parts):
            return all_of([truth_of(part, message) for part in parts])
        case ("or", parts):
            return any_of([truth_of(part, message) for part in parts])
        case ("null", inner, negated):
            return (value_of(inner, message) is None) is not negated
        case ("between", inner, low, high, negated):
            value, least, most = (value_of(part, message) for part in (inner, low, high))
            if negated:
                return any_of([compared("<", value, least), compared(">", value, most)])
            return all_of([compared(">=", value, least), compared("<=", value, most)])
        case ("in", inner, items, negated):
            value = value_of(inner, message)
            found = any_of([compared("=", value, item) for item in items])
            return negation_of(found) if negated else found
        case ("like", inner, pattern, negated):
            value = value_of(inner, message)
            if value is None:
                return None
            form = "".join(".*" if one == "%" else "." if one == "_" else re.escape(one) for one in pattern)
            found = isinstance(value, str) and re.fullmatch(form, value, re.DOTALL) is not None
            return not found if negated else found
        case (sign, left, right):
            return compared(sign, value_of(left, message), value_of(right, message))
    raise AssertionError(tree)


@given(conditions, messages)
def test_the_second_evaluator_agrees(tree: Tree, message: Message) -> None:
    assert compile_selector(written(tree), name_of)(message) is (truth_of(tree, message) is True)


@given(st.text("xy", max_size=12), st.text("xy%_!", max_size=8))
def test_like_with_an_escape(text: str, pattern: str) -> None:
    form, escaped = "", False
    for one in pattern:
        special = not escaped and one in "%_!"
        escaped = special and one == "!"
        form += "" if escaped else {"%": ".*", "_": "."}[one] if special else re.escape(one)
    source = f"a LIKE '{pattern}' ESCAPE '!'"
    if escaped:
        with pytest.raises(SelectorError):
            compile_selector(source, name_of)
    else:
        assert selected(source, a=text) is (re.fullmatch(form, text) is not None)


signs = "()=<>+-*/,'\"%_.$aE019 \t\n\0é\ud800"
words = "<>|>=|AND |OR |NOT |IN |LIKE |ESCAPE |BETWEEN |IS |NULL |TRUE |'x' |name |1.5e3 |0x|amqp.annotation.x-"
pieces = st.sampled_from([*signs, *words.split("|")])


@given(st.one_of(st.text(), st.lists(pieces, max_size=30).map("".join)), messages)
def test_any_text_is_a_selector_or_the_one_error(text: str, message: Message) -> None:
    position, chosen = 0, False
    try:
        chosen = compile_selector(text, name_of)(message)
    except SelectorError as error:
        position = error.position
    assert 0 <= position <= len(text)
    assert isinstance(chosen, bool)


@pytest.mark.parametrize(
    "text",
    [
        "(" * TEXT_LIMIT,
        "NOT " * (TEXT_LIMIT // 4 - 1) + "a",
        "-" * (TEXT_LIMIT - 4) + "a=1",
        "a=1 OR " * 1000 + "a=2",
        "+".join(["a"] * 4000) + "=1",
        "*".join(["9223372036854775807"] * 400) + "=1",
        "(" * DEPTH_LIMIT + "NOT - - a + a * a BETWEEN 1 AND 2 AND a=1 OR a=2" + ")" * DEPTH_LIMIT,
        "a LIKE '" + "%x" * 4000 + "'",
        "a LIKE '%" + "_" * (WILD_LIMIT - 1) + "y%'",
        "a LIKE '%" + "x" * 8000 + "y%'",
        "a LIKE '%x%' OR " * 400 + "a LIKE '%y'",
        "a = '" + "''" * 4000,
        " " * TEXT_LIMIT,
        "1" * TEXT_LIMIT,
        "a.1" * 2000,
    ],
    ids=lambda text: text[:12],
)
def test_no_text_costs_much(text: str) -> None:
    """It needs no deep stack either; the worst texts take less than a second on a usual machine."""
    began = time.process_time()
    try:
        matches = compile_selector(text, name_of)
    except SelectorError:
        pass
    else:
        matches({"a": "x" * LIKE_LIMIT})
        matches({"a": 1 << 62})
        assert not compile_selector("a LIKE '%'", name_of)({"a": "x" * (LIKE_LIMIT + 1)})
    assert time.process_time() - began < 5.0
