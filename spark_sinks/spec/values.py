"""Settings of a job file that are texts with a form of their own: durations, terms, aggregates, names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from mapping.record import is_topic_name

ColumnType = Literal["double", "long", "boolean", "string"]
NUMBERS: Final = frozenset({"double", "long"})
TYPE_NAMES: Final[Mapping[ColumnType, str]] = {
    "double": "finite number", "long": "whole number", "boolean": "true or false", "string": "text",
}  # fmt: skip
"""What a value is missing that is of no such type."""
RECORD_COLUMNS: Final[Mapping[str, ColumnType | None]] = {
    "key": "string", "value": None, "topic": "string", "partition": "long", "offset": "long", "timestamp": None,
    "time": None, "levels": None, "content_type": "string", "headers": None, "record": None, "error": None,
}  # fmt: skip
"""What every record has, with the type where it is one of a column's: names that no column may take."""


class _Text(str):
    """A setting that is a text with a form of its own; `parse` takes it apart and raises ValueError."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> _Text:
        """Check `text`."""
        raise NotImplementedError

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(cls.parse, core_schema.str_schema())


class Duration(_Text):
    """A time such as `500ms`, `5s`, `10m` or `1h`."""

    __slots__ = ()
    _FORM: ClassVar = re.compile(r"([1-9][0-9]*)\s*(ms|s|m|h)")
    _UNITS: ClassVar = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Check `text`; ValueError when it is no duration."""
        if cls._FORM.fullmatch(text) is None:
            raise ValueError("expected a duration such as 500ms, 5s, 10m or 1h")
        return cls(text)

    @property
    def ms(self) -> int:
        """In milliseconds."""
        match = self._FORM.fullmatch(self)
        assert match is not None
        return int(match[1]) * self._UNITS[match[2]]


class Listen(_Text):
    """Where to listen: `HOST:PORT` (`[::1]:9101` for IPv6); port 0: a free one."""

    __slots__ = ()
    _FORM: ClassVar = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]/]+):([0-9]{1,5})")

    @classmethod
    def parse(cls, text: str) -> Listen:
        """Check `text`; ValueError when it is no address."""
        match = cls._FORM.fullmatch(text)
        if match is None or int(match[2]) > 65_535:
            raise ValueError("expected HOST:PORT, such as 127.0.0.1:9101")
        return cls(text)

    @classmethod
    def of(cls, host: str, port: int) -> Listen:
        """The address of a host, which may be an IPv6 address without brackets, and a port."""
        return cls(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")

    @property
    def host(self) -> str:
        """Without brackets."""
        return self.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port."""
        return int(self.rpartition(":")[2])


class Term(_Text):
    """What results are grouped by: a column, or `key`, `topic`, `content_type`, `level[2]`, `header[unit]`."""

    __slots__ = ()
    _FORM: ClassVar = re.compile(r"(level)\[([1-9][0-9]?)\]|(header)\[([^\[\]]{1,100})\]|([A-Za-z_][A-Za-z0-9_]*)")

    @classmethod
    def parse(cls, text: str) -> Term:
        """Check `text`; ValueError when it has no such form."""
        if cls._FORM.fullmatch(text) is None:
            raise ValueError("expected a column, key, topic, content_type, level[1] or header[NAME]")
        return cls(text)

    @property
    def parts(self) -> tuple[str, str]:
        """(`level`, its number from 1), (`header`, its name) or (`column`, its name)."""
        match = self._FORM.fullmatch(self)
        assert match is not None
        level, number, header, name, column = match.groups()
        return (level, number) if level else (header, name) if header else ("column", column)

    @property
    def name(self) -> str:
        """In the results: `level[2]` is `level2`, `header[unit]` is `unit`."""
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
    "percentile": "a number and which: `percentile(temperature, 0.95)`; within 1/10,000 of the rank",
    "distinct": "a column: about how many different values (5 %)",
}
"""The functions of `aggregates` and what they take."""
MICRO_BATCH_ONLY: Final = frozenset({"percentile", "distinct"})


class Aggregate(_Text):
    """A function of a window's readings: `count(*)`, `max(temperature)`, `percentile(temperature, 0.95)`."""

    __slots__ = ()
    _FORM: ClassVar = re.compile(r"([a-z]+)\(\s*(\*|[A-Za-z_][A-Za-z0-9_]*)\s*(?:,\s*(0?\.[0-9]+)\s*)?\)")

    @classmethod
    def parse(cls, text: str) -> Aggregate:
        """Check `text`; ValueError when it is no such function, or its arguments are none of its own."""
        match = cls._FORM.fullmatch(text)
        if match is None or match[1] not in AGGREGATES:
            raise ValueError(f"expected a function of a column: {', '.join(AGGREGATES)}; such as max(temperature)")
        function, column, rank = match.groups()
        if (function == "percentile") != (rank is not None):
            raise ValueError("a rank between 0 and 1 belongs to percentile and to nothing else: percentile(load, 0.95)")
        if column == "*" and function not in {"count", "rate"}:
            raise ValueError(f"{function} is of a column, such as {function}(temperature)")
        if function == "rate" and column != "*":
            raise ValueError("rate counts all readings: rate(*)")
        return cls(text)

    @property
    def parts(self) -> tuple[str, str | None, float | None]:
        """Function, column (None: `*`), rank."""
        match = self._FORM.fullmatch(self)
        assert match is not None
        return match[1], None if match[2] == "*" else match[2], None if match[3] is None else float(match[3])


def _topic_name(text: str) -> str:
    if not is_topic_name(text):
        raise ValueError("expected the name of a Kafka topic that is not internal")
    return text


def _column_name(text: str) -> str:
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", text) is None:
        raise ValueError("expected a column's name: a letter, then letters, digits and _")
    if text.lower() in RECORD_COLUMNS:
        raise ValueError("every record has a column of this name: give it another, and the field of that name by field")
    return text


def _field_path(text: str) -> str:
    if not text or not all(text.split(".")):
        raise ValueError("expected a field's name, or several with dots between: position.lat")
    return text


TopicName = Annotated[str, AfterValidator(_topic_name)]
ColumnName = Annotated[str, AfterValidator(_column_name)]
FieldPath = Annotated[str, AfterValidator(_field_path)]
