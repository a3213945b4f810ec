"""JMS message selectors (JMS 2.0, 3.8.1), a subset of SQL-92's conditions: parsed once, evaluated for each message.

The parser does not know the message's type: `resolve` is called for each name in the text and returns its getter.

    matches = compile_selector("colour = 'red' AND weight > 2.5", resolve)
    matches(message)

Logic has three values (3.8.1.2); unknown is None here, and a message is selected only when the whole selector is TRUE.
A comparison of values of different types is FALSE, for `=` and for `<>` (3.8.1.1). Extensions to JMS: names in double
quotes may contain any character, and IN accepts numbers.

The cost of a selector is limited by its text's length: nesting has a limit, chains are loops, LIKE does not backtrack,
and integers beyond 64 bits become floating point.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from protocols.amqp.selectors.logic import (
    ARITHMETIC,
    Calculate,
    Getter,
    Value,
    as_condition,
    calculation,
    combination,
    equality,
    matches_like,
    membership,
    negation,
    ordering,
    pattern,
    text_equality,
)

TEXT_LIMIT: Final = 8192  # characters of a selector
DEPTH_LIMIT: Final = 50  # nested parentheses
WILD_LIMIT: Final = 256  # total length of the parts between two % that contain _, in all LIKE patterns of a selector
_LONG: Final = 1 << 63  # the magnitude of Java's smallest long


class SelectorError(ValueError):
    """The text is no valid selector."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(f"{reason}, at character {position + 1}")
        self.position = position  # of the offending character, from 0


def compile_selector(text: str, resolve: Callable[[str], Getter]) -> Callable[[Any], bool]:
    """Compile a selector into a function that returns whether a message is selected.

    `resolve` returns a function that reads a name's value from a message, or raises ValueError for an unknown name.

    Raises:
        SelectorError: the text is no valid selector; no text raises another error.
    """
    if len(text) > TEXT_LIMIT:
        raise SelectorError(f"longer than {TEXT_LIMIT} characters", TEXT_LIMIT)
    condition = _Parser(text, resolve).selector()
    return lambda message: condition(message) is True


# Lexer.

_KEYWORDS: Final = frozenset({"NOT", "AND", "OR", "BETWEEN", "LIKE", "IN", "IS", "ESCAPE", "NULL", "TRUE", "FALSE"})
_WORDS: Final = re.compile(
    r"""\s*(?:
        (?P<float>(?:[0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)[fFdD]?
            |[0-9]+[fFdD])
        |(?P<hex>0[xX][0-9a-fA-F]+)[lL]?
        |(?P<int>[0-9]+)[lL]?
        |(?P<text>'[^']*(?:''[^']*)*')
        |"(?P<quoted>[^"]+)"
        |(?P<name>amqp\.annotation\.[\w$.-]+|(?:[^\W\d]|\$)[\w$.]*)
        |(?P<sign><>|<=|>=|[=<>+\-*/(),])
        |(?P<end>\Z)
    )""",
    re.VERBOSE,
)
_JOINED: Final = re.compile(r"[\w$.]")  # characters that may not follow a number directly


class _Word(NamedTuple):
    """One token: `kind` is `number`, `text`, `name`, `end`, or the keyword or sign itself."""

    kind: str
    value: Any
    position: int


def _words(text: str) -> list[_Word]:
    words: list[_Word] = []
    at = 0
    while True:
        match = _WORDS.match(text, at)
        if match is None:
            while text[at].isspace():
                at += 1
            raise SelectorError("an unterminated string" if text[at] == "'" else "an unexpected character", at)
        kind = match.lastgroup or ""
        value: Any = match[kind]
        start, at = match.start(kind), match.end()
        if kind in ("float", "hex", "int"):
            if _JOINED.match(text, at):
                raise SelectorError("a number that runs into a name", start)
            kind, value = "number", _literal(kind, value, start)
        elif kind == "text":
            value = value[1:-1].replace("''", "'")
        elif kind == "name" and value.upper() in _KEYWORDS:
            kind = value.upper()
        elif kind == "quoted":
            kind = "name"
        elif kind == "sign":
            kind = value
        words.append(_Word(kind, value, start))
        if kind == "end":
            return words


def _literal(kind: str, text: str, position: int) -> int | float:
    """Parse a numeric literal as Java does (3.8.1.1): decimal, octal with a leading 0, hexadecimal, floating point."""
    if kind == "float":
        number = float(text.rstrip("fFdD"))
        if number in (float("inf"), float("-inf")):
            raise SelectorError("a number out of range", position)
        return number
    if len(text) > 24:
        raise SelectorError("a number out of range", position)
    try:
        whole = int(text, 16 if kind == "hex" else 8 if text[0] == "0" else 10)
    except ValueError:
        raise SelectorError("a number with a leading 0 is octal", position) from None
    if whole > _LONG:
        raise SelectorError("a number out of range", position)
    return whole


# Parser.


class _Kind(enum.Enum):
    CONDITION = "a condition"
    NUMBER = "a number"
    TEXT = "a string"
    ANY = "a name"  # its type depends on the message


class _Node(NamedTuple):
    kind: _Kind
    get: Getter
    position: int
    literal: Value = None


class _Parser:
    """A recursive-descent parser: one method for each level of the grammar; only parentheses recurse."""

    def __init__(self, text: str, resolve: Callable[[str], Getter]) -> None:
        self._words = _words(text)
        self._next = 0
        self._depth = self._wild = 0
        self._resolve = resolve

    def selector(self) -> Getter:
        node = self._either()
        if self._word.kind != "end":
            raise self._unexpected("the end")
        return self._condition(node)

    @property
    def _word(self) -> _Word:
        return self._words[self._next]

    def _take(self, *kinds: str) -> _Word | None:
        """Consume and return the next token if it is one of `kinds`, else return None."""
        word = self._words[self._next]
        if word.kind not in kinds:
            return None
        self._next += 1
        return word

    def _need(self, kind: str, name: str | None = None) -> _Word:
        word = self._take(kind)
        if word is None:
            raise self._unexpected(name or kind)
        return word

    def _unexpected(self, wanted: str) -> SelectorError:
        word = self._word
        named = "the end" if word.kind == "end" else repr(str(word.value)[:40])
        return SelectorError(f"expected {wanted}, found {named}", word.position)

    def _condition(self, node: _Node) -> Getter:
        if node.kind is _Kind.ANY:
            return as_condition(node.get)
        if node.kind is not _Kind.CONDITION:
            raise SelectorError(f"expected a condition, found {node.kind.value}", node.position)
        return node.get

    @staticmethod
    def _of(node: _Node, *kinds: _Kind) -> Getter:
        if node.kind is not _Kind.ANY and node.kind not in kinds:
            raise SelectorError(f"expected {kinds[0].value}, found {node.kind.value}", node.position)
        return node.get

    def _either(self) -> _Node:
        return self._combined("OR", self._both, decisive=True)

    def _both(self) -> _Node:
        return self._combined("AND", self._negated, decisive=False)

    def _combined(self, keyword: str, part: Callable[[], _Node], *, decisive: bool) -> _Node:
        first = part()
        if self._word.kind != keyword:
            return first
        parts = [self._condition(first)]
        while self._take(keyword):
            parts.append(self._condition(part()))
        return _Node(_Kind.CONDITION, combination(parts, decisive=decisive), first.position)

    def _negated(self) -> _Node:
        position = self._word.position
        count = 0
        while self._take("NOT"):
            count += 1
        node = self._comparison()
        if not count:
            return node
        get = self._condition(node)
        return _Node(_Kind.CONDITION, negation(get) if count % 2 else get, position)

    def _comparison(self) -> _Node:
        left = self._sum()
        word = self._take("=", "<>", "<", "<=", ">", ">=")
        if word is not None:
            right, sign = self._sum(), word.kind
            if sign in ("=", "<>") and left.kind is _Kind.ANY and isinstance(right.literal, str):
                get = text_equality(left.get, right.literal, equal=sign == "=")
            elif sign in ("=", "<>"):
                get = equality(left.get, right.get, equal=sign == "=")
            else:
                get = ordering(sign, self._of(left, _Kind.NUMBER), self._of(right, _Kind.NUMBER))
            return _Node(_Kind.CONDITION, get, left.position)
        if self._take("IS"):
            negated = self._take("NOT") is not None
            self._need("NULL")
            value = left.get
            get = (lambda message: value(message) is not None) if negated else (lambda message: value(message) is None)
            return _Node(_Kind.CONDITION, get, left.position)
        negated = self._take("NOT") is not None
        if self._take("BETWEEN"):
            get = self._between(left, negated)
        elif self._take("IN"):
            get = self._in(left)
            get = negation(get) if negated else get
        elif self._take("LIKE"):
            get = self._like(left)
            get = negation(get) if negated else get
        elif negated:
            raise self._unexpected("BETWEEN, IN or LIKE")
        else:
            return left
        return _Node(_Kind.CONDITION, get, left.position)

    def _between(self, left: _Node, negated: bool) -> Getter:
        value = self._of(left, _Kind.NUMBER)
        low = self._of(self._sum(), _Kind.NUMBER)
        self._need("AND")
        high = self._of(self._sum(), _Kind.NUMBER)
        if negated:
            return combination([ordering("<", value, low), ordering(">", value, high)], decisive=True)
        return combination([ordering(">=", value, low), ordering("<=", value, high)], decisive=False)

    def _in(self, left: _Node) -> Getter:
        value = self._of(left, _Kind.TEXT, _Kind.NUMBER)
        self._need("(")
        texts: set[str] = set()
        numbers: set[int | float] = set()
        while True:
            if self._word.kind == "text":
                texts.add(self._need("text").value)
            else:
                sign = self._take("+", "-")
                number = self._need("number", "a string or a number").value
                numbers.add(-number if sign is not None and sign.kind == "-" else number)
            if not self._take(","):
                break
        self._need(")")
        return membership(value, frozenset(texts), frozenset(numbers))

    def _like(self, left: _Node) -> Getter:
        value = self._of(left, _Kind.TEXT)
        start = self._word.position
        text = self._need("text", "a pattern").value
        escape = ""
        if self._take("ESCAPE"):
            word = self._need("text", "an escape character")
            escape = word.value
            if len(escape) != 1:
                raise SelectorError("an escape is one character", word.position)
        try:
            fits, wild = pattern(text, escape)
        except ValueError as error:
            raise SelectorError(str(error), start) from None
        self._wild += wild
        if self._wild > WILD_LIMIT:
            raise SelectorError(f"patterns with more than {WILD_LIMIT} characters around _", start)
        return matches_like(value, fits)

    def _sum(self) -> _Node:
        return self._chain(self._product, "+", "-")

    def _product(self) -> _Node:
        return self._chain(self._signed, "*", "/")

    def _chain(self, operand: Callable[[], _Node], *signs: str) -> _Node:
        first = operand()
        if self._word.kind not in signs:
            return first
        start = self._of(first, _Kind.NUMBER)
        steps: list[tuple[Calculate, Getter]] = []
        while (word := self._take(*signs)) is not None:
            steps.append((ARITHMETIC[word.kind], self._of(operand(), _Kind.NUMBER)))
        return _Node(_Kind.NUMBER, calculation(start, steps), first.position)

    def _signed(self) -> _Node:
        position = self._word.position
        signs = negative = 0
        while (word := self._take("+", "-")) is not None:
            signs += 1
            negative += word.kind == "-"
        node = self._primary()
        if not signs:
            return node
        get = self._of(node, _Kind.NUMBER)
        if isinstance(node.literal, int | float):
            return _constant(_Kind.NUMBER, -node.literal if negative % 2 else node.literal, position)
        minus = [(ARITHMETIC["*"], lambda message: -1)] if negative % 2 else []
        return _Node(_Kind.NUMBER, calculation(get, minus), position)

    def _primary(self) -> _Node:
        word = self._word
        self._next += word.kind != "end"
        match word.kind:
            case "number":
                return _constant(_Kind.NUMBER, word.value, word.position)
            case "text":
                return _constant(_Kind.TEXT, word.value, word.position)
            case "TRUE" | "FALSE":
                return _constant(_Kind.CONDITION, word.kind == "TRUE", word.position)
            case "name":
                try:
                    return _Node(_Kind.ANY, self._resolve(word.value), word.position)
                except ValueError as error:
                    raise SelectorError(str(error), word.position) from None
            case "(":
                self._depth += 1
                if self._depth > DEPTH_LIMIT:
                    raise SelectorError(f"more than {DEPTH_LIMIT} parentheses deep", word.position)
                node = self._either()
                self._need(")")
                self._depth -= 1
                return node._replace(literal=None)
        self._next -= word.kind != "end"
        raise self._unexpected("a value")


def _constant(kind: _Kind, value: bool | int | float | str, position: int) -> _Node:
    return _Node(kind, lambda message: value, position, value)
