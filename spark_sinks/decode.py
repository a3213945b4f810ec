"""From a record's value to the columns that a job declares, its time, and what is wrong with it.

Native functions only, and nothing that can raise: one malformed value must never stop a stream. Every cast of a
sender's text is a `try_cast` behind a pattern, and every number is finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from spark_sinks.records import text_of
from spark_sinks.spec.parts import Column as Declared
from spark_sinks.spec.parts import Source

NUMBER: Final = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$"
MILLISECONDS: Final = r"^([0-9]{1,14}(\.[0-9]*)?|[0-9](\.[0-9]+)?E1[0-3])$"  # Spark writes a fraction with an exponent
ISO_TIME: Final = (
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.,][0-9]{1,9})?)?(Z|[+-][0-9]{2}:?[0-9]{2})?$"
)
LARGEST: Final = 1.7976931348623157e308
WHITE_SPACE: Final = " \t\r\n"
_TYPES: Final[Mapping[str, DataType]] = {
    "double": DoubleType(), "long": LongType(), "boolean": BooleanType(), "string": StringType(),
}  # fmt: skip
_PATTERNS: Final = {"double": NUMBER, "long": r"^-?(0|[1-9][0-9]{0,18})$", "boolean": r"^(true|false)$", "string": ""}

NOT_READABLE: Final = {
    "json": "the value is no JSON object in UTF-8",
    "number": "the value is no number",
    "csv": "the value is no single line of UTF-8 with the fields declared",
}
BAD_TIME: Final = "time is neither epoch milliseconds nor ISO 8601"


def readings(records: DataFrame, source: Source, needed: Iterable[tuple[str, Column]] = ()) -> DataFrame:
    """Decode each record.

    The time is the first of header `creation-time`, the field `source.time` and Kafka's timestamp that is there and not
    further than `source.ahead` in front of Kafka's. A field of time that is there and no time is an error.

    Args:
        records: of `spark_sinks.records.records`.
        source: what is declared.
        needed: what else a good reading must have, by the name that its error tells.

    Returns:
        the columns of `records` without `sent_at`; the declared ones; `time`; `error` (null: a good reading).
    """
    known = [column for column in records.columns if column != "sent_at"]
    text = F.trim(text_of(F.col("value")), F.lit(WHITE_SPACE))
    opened = records if source.decode == "none" else _FIELDS[source.decode](records.withColumn("_text", text), source)
    own = F.col("_time") if source.time is not None else F.lit(None).cast("string")
    ahead = F.col("timestamp") + F.expr(f"interval {source.ahead.ms} milliseconds")
    decoded = opened.select(
        *known,
        "sent_at",
        *(_judged(name, column).alias(name) for name, column in source.columns.items()),
        *((F.col("_readable"),) if source.decode != "none" else ()),
        own.alias("_own_time"),
        instant(own).alias("_time"),
    )
    error = F.lit(None).cast("string")
    if source.decode != "none":
        error = F.when(~F.coalesce("_readable", F.lit(False)), NOT_READABLE[source.decode])
        for name, column in source.columns.items():
            if not column.optional:
                error = error.when(F.col(name).isNull(), f"{name} is missing or no {_NAMES[column.type]}")
        error = error.when(F.col("_own_time").isNotNull() & F.col("_time").isNull(), BAD_TIME)
    for name, value in needed:
        missing = F.when(value.isNull(), f"{name} is missing or no text")
        error = F.coalesce(error, missing)
    return decoded.select(
        *known,
        *source.columns,
        F.coalesce(*(F.when(F.col(one) <= ahead, F.col(one)) for one in ("sent_at", "_time")), "timestamp").alias(
            "time"
        ),
        error.alias("error"),
    )


_NAMES: Final = {"double": "finite number", "long": "whole number", "boolean": "true or false", "string": "text"}


def _judged(name: str, column: Declared) -> Column:
    value = F.col(f"_of_{name}")
    return F.when(F.abs(value) <= LARGEST, value) if column.type == "double" else value


def instant(text: Column) -> Column:
    """A sender's time, epoch milliseconds or ISO 8601 (UTC without a zone); null where it is neither."""
    return F.when(
        text.rlike(MILLISECONDS), F.timestamp_millis(text.try_cast("double").try_cast("bigint"))
    ).when(text.rlike(ISO_TIME), F.regexp_replace(text, ",", ".").try_cast("timestamp"))  # fmt: skip


def _json(records: DataFrame, source: Source) -> DataFrame:
    paths = {name: (column.field or name, _TYPES[column.type]) for name, column in source.columns.items()}
    wanted = dict(paths.values())
    if source.time is not None:
        wanted[source.time] = StringType()
    opened = records.withColumn("_objects", F.when(F.col("_text").startswith("{"), objects(F.col("_text"), wanted)))
    found = F.get("_objects", F.lit(0))
    return opened.select(
        *records.columns,
        (F.size("_objects") == 1).alias("_readable"),
        *(_at(found, path).alias(f"_of_{name}") for name, (path, _) in paths.items()),
        *(() if source.time is None else (_at(found, source.time).alias("_time"),)),
    )


def json_columns(text: Column, columns: Mapping[str, Declared]) -> list[Column]:
    """The declared columns of one JSON object; nulls where it has none of them, or is no object."""
    paths = {name: (column.field or name, _TYPES[column.type]) for name, column in columns.items()}
    found = F.get(F.when(text.startswith("{"), objects(text, dict(paths.values()))), F.lit(0))
    return [_at(found, path).alias(name) for name, (path, _) in paths.items()]


def objects(text: Column, wanted: Mapping[str, DataType]) -> Column:
    """Of a text with a JSON object an array with it alone, and with its fields of these paths and types."""
    # As the only element of an array: alone, Spark's parser overlooks what follows the object's end.
    options = {"allowNonNumericNumbers": "false", "allowSingleQuotes": "false"}
    return F.from_json(F.concat(F.lit("["), text, F.lit("]")), ArrayType(_schema(wanted)), options)


def _schema(wanted: Mapping[str, DataType]) -> StructType:
    """Of an object, from paths with dots to their types."""
    below: dict[str, Any] = {}
    for path, kind in wanted.items():
        place = below
        *objects, last = path.split(".")
        for name in objects:
            place = place.setdefault(name, {})
        place[last] = kind

    def made(of: Mapping[str, Any]) -> StructType:
        return StructType(
            [StructField(name, made(kind) if isinstance(kind, dict) else kind) for name, kind in of.items()]
        )

    return made(below)


def _at(found: Column, path: str) -> Column:
    for name in path.split("."):
        found = found.getField(name)
    return found


def _number(records: DataFrame, source: Source) -> DataFrame:
    [(name, column)] = source.columns.items()
    return records.select(
        *records.columns,
        F.col("_text").rlike(NUMBER).alias("_readable"),
        _converted(F.col("_text"), column, f"_of_{name}"),
    )


def _csv(records: DataFrame, source: Source) -> DataFrame:
    line = F.when(~F.col("_text").rlike("[\r\n]") & (F.col("_text") != ""), F.col("_text"))
    schema = ", ".join(f"_{place} string" for place in range(len(source.fields) + 1))  # one more: a field too many
    split = records.withColumn("_line", F.from_csv(line, schema, {"sep": source.separator, "mode": "PERMISSIVE"}))
    place = {name: F.col(f"_line._{number}") for number, name in enumerate(source.fields)}
    return split.select(
        *records.columns,
        (F.col("_line").isNotNull() & F.col(f"_line._{len(source.fields)}").isNull()).alias("_readable"),
        *(_converted(place[column.field or name], column, f"_of_{name}") for name, column in source.columns.items()),
        *(() if source.time is None else (place[source.time].alias("_time"),)),
    )


def _converted(text: Column, column: Declared, name: str) -> Column:
    kind = column.type
    return (text if kind == "string" else F.when(text.rlike(_PATTERNS[kind]), text.try_cast(_TYPES[kind]))).alias(name)


_FIELDS: Final[Mapping[str, Callable[[DataFrame, Source], DataFrame]]] = {
    "json": _json, "number": _number, "csv": _csv,
}  # fmt: skip
