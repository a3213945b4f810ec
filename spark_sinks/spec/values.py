"""Job file settings that are strings with a syntax: durations, terms, aggregates, names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from mapping.record import is_topic_name

ColumnType = Literal["double", "long", "boolean", "string"]
NUMBERS: Final = frozenset({"double", "long"})
TYPE_NAMES: Final[Mapping[ColumnType, str]] = {
    "double": "finite number", "long": "whole number", "boolean": "true or false", "string": "text",
}  # fmt: skip
"""The name of each type in the error of a value that does not have it."""
RECORD_COLUMNS: Final[Mapping[str, ColumnType | None]] = {
    "key": "string", "value": None, "topic": "string", "partition": "long", "offset": "long", "timestamp": None,
    "time": None, "levels": None, "content_type": "string", "headers": None, "record": None, "error": None,
}  # fmt: skip
"""The columns that every record has, typed if a term may use them. No decoded column may have these names."""


class _Text(str):
    """A string setting with a syntax."""

    __slots__ = ()
    _FORM: ClassVar[re.Pattern[str]]
    _EXPECTED: ClassVar[str]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return `text` as this type; ValueError if it has another syntax."""
        if cls._FORM.fullmatch(text) is None:
            raise ValueError(f"expected {cls._EXPECTED}")
        return cls(text)

    @property
    def _match(self) -> re.Match[str]:
        match = self._FORM.fullmatch(self)
        assert match is not None  # `parse`
        return match

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(cls.parse, core_schema.str_schema())


class Duration(_Text):
    """A time such as `500ms`, `5s`, `10m` or `1h`."""

    __slots__ = ()
    _FORM = re.compile(r"([1-9][0-9]*)\s*(ms|s|m|h)")
    _EXPECTED = "a duration such as 500ms, 5s, 10m or 1h"
    _UNITS: ClassVar = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}

    @property
    def ms(self) -> int:
        """The duration in milliseconds."""
        match = self._match
        return int(match[1]) * self._UNITS[match[2]]


class Listen(_Text):
    """A listen address, `HOST:PORT` (`[::1]:9101` for IPv6). Port 0 means a free port."""

    __slots__ = ()
    _FORM = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]/]+):([0-9]{1,5})")
    _EXPECTED = "HOST:PORT, such as 127.0.0.1:9101"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `HOST:PORT`; ValueError if the port is out of range."""
        made = super().parse(text)
        if made.port > 65_535:
            raise ValueError(f"expected {cls._EXPECTED}")
        return made

    @classmethod
    def of(cls, host: str, port: int) -> Listen:
        """Join a host, which may be an IPv6 address without brackets, and a port."""
        return cls(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")

    @property
    def host(self) -> str:
        """The host, without brackets."""
        return self.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port number."""
        return int(self.rpartition(":")[2])


class Term(_Text):
    """A grouping term: a column, or `key`, `topic`, `content_type`, `level[2]`, `header[unit]`."""

    __slots__ = ()
    _FORM = re.compile(r"(level)\[([1-9][0-9]?)\]|(header)\[([^\[\]]{1,100})\]|([A-Za-z_][A-Za-z0-9_]*)")
    _EXPECTED = "a column, key, topic, content_type, level[1] or header[NAME]"

    @property
    def parts(self) -> tuple[str, str]:
        """(`level`, its number from 1), (`header`, its name) or (`column`, its name)."""
        level, number, header, name, column = self._match.groups()
        return (level, number) if level else (header, name) if header else ("column", column)

    @property
    def name(self) -> str:
        """The term's name in results: `level[2]` is `level2`, `header[unit]` is `unit`."""
        kind, what = self.parts
        return f"level{what}" if kind == "level" else re.sub(r"[^A-Za-z0-9_]", "_", what)


AGGREGATES: Final[Mapping[str, str]] = {
    "count": "* or a column: how many",
    "rate": "*: readings per second of the window",
    "min": "a column",
    "max": "a column",
    "sum": "a number",
    "mean": "a number",
    "stddev": "a number: standard deviation of the sample",
    "percentile": "a number and a rank: `percentile(temperature, 0.95)`; within 1/10,000 of the rank",
    "distinct": "a column: approximate number of different values (5 %)",
}
"""The functions of `aggregates` and their arguments."""
MICRO_BATCH_ONLY: Final = frozenset({"percentile", "distinct"})


class Aggregate(_Text):
    """An aggregate over a window's readings: `count(*)`, `max(temperature)`, `percentile(temperature, 0.95)`."""

    __slots__ = ()
    _FORM = re.compile(rf"({'|'.join(AGGREGATES)})\(\s*(\*|[A-Za-z_][A-Za-z0-9_]*)\s*(?:,\s*(0?\.[0-9]+)\s*)?\)")
    _EXPECTED = f"a function such as max(temperature), one of {', '.join(AGGREGATES)}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse it, and check the function's arguments; ValueError if they do not fit."""
        made = super().parse(text)
        function, column, rank = made.parts
        if (function == "percentile") != (rank is not None):
            raise ValueError("percentile, and only percentile, needs a rank between 0 and 1: percentile(load, 0.95)")
        if column is None and function not in {"count", "rate"}:
            raise ValueError(f"{function} needs a column, such as {function}(temperature)")
        if function == "rate" and column is not None:
            raise ValueError("rate counts all readings: rate(*)")
        return made

    @property
    def parts(self) -> tuple[str, str | None, float | None]:
        """(function, column, rank). The column is None for `*`."""
        match = self._match
        return match[1], None if match[2] == "*" else match[2], None if match[3] is None else float(match[3])


def _topic_name(text: str) -> str:
    if not is_topic_name(text):
        raise ValueError("expected the name of a Kafka topic that is not internal")
    return text


def _column_name(text: str) -> str:
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", text) is None:
        raise ValueError("expected a column name: a letter, then letters, digits and _")
    if text.lower() in RECORD_COLUMNS:
        raise ValueError("every record already has a column of this name: rename it and set its field")
    return text


def _field_path(text: str) -> str:
    if not text or not all(text.split(".")):
        raise ValueError("expected a field name, or several joined by dots: position.lat")
    return text


TopicName = Annotated[str, AfterValidator(_topic_name)]
ColumnName = Annotated[str, AfterValidator(_column_name)]
FieldPath = Annotated[str, AfterValidator(_field_path)]
