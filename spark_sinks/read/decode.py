"""Decodes a record's value into the columns that a job declares, its time, and an error.

Uses native Spark functions that cannot raise, because one malformed value must never stop a stream. Every cast of
untrusted text is a `try_cast` behind a pattern, and every number is finite.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.avro.functions import from_avro
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

from spark_sinks.decoders import avro, framing
from spark_sinks.decoders.values import WHOLE_FLOAT, wanted
from spark_sinks.read.records import text_of
from spark_sinks.spec.parts import PYTHON_DECODERS, Source
from spark_sinks.spec.parts import Column as Declared
from spark_sinks.spec.values import TYPE_NAMES

NUMBER: Final = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$"
MILLISECONDS: Final = (
    r"^([0-9]{1,14}(\.[0-9]*)?|[0-9](\.[0-9]+)?E(9|1[0-3]))$"  # Spark prints fractions with an exponent
)
MOST_MILLISECONDS: Final = 10**14 - 1
ISO_TIME: Final = (
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.,][0-9]{1,9})?)?(Z|[+-][0-9]{2}:?[0-9]{2})?$"
)
LARGEST: Final = 1.7976931348623157e308
MOST_FIELDS: Final = 20_000
"""The most separators in a line of CSV; inside quotes they count too."""
WHITE_SPACE: Final = " \t\r\n"
_TYPES: Final[Mapping[str, DataType]] = {
    "double": DoubleType(), "long": LongType(), "boolean": BooleanType(), "string": StringType(),
}  # fmt: skip
_PATTERNS: Final = {"double": NUMBER, "long": r"^-?(0|[1-9][0-9]{0,18})$", "boolean": r"^(true|false)$", "string": ""}

NOT_READABLE: Final = {
    "json": "the value is not a JSON object in UTF-8",
    "number": "the value is not a number",
    "csv": "the value is not a single line of UTF-8 with the declared fields",
    "avro": "the value is not a record of the schema",
}
_Paths = dict[str, tuple[str, DataType]]
"""By the name of a column: the dotted path of its field, and its type."""
PLACE: Final = "_place"
"""The index of a reading in its `senml` pack, from 0."""
BAD_TIME: Final = "time is neither epoch milliseconds nor ISO 8601"
BAD_TIMESTAMP: Final = "Kafka's timestamp is not in milliseconds: it is after the year 9999"
FIRST_INSTANT: Final = "0001-01-01 00:00:00"
LAST_INSTANT: Final = "9999-12-31 23:59:59.999999"
"""The instants that every reader of an archive can represent."""
_END: Final = f"end-{secrets.token_hex(8)}"
"""The field that must follow an object (`objects`). No sender knows it."""
AHEAD: Final = "time is ahead of the record's arrival by more than is allowed"
SECONDS: Final = (1e9, 1e10 - 1)
"""Numbers that are epoch seconds (from 2001 to 2286). As milliseconds they would be times in early 1970."""


def readings(records: DataFrame, source: Source, needed: Iterable[tuple[str, Column]] = ()) -> DataFrame:
    """Decode each record. A `senml` record becomes as many readings as its pack has, or one row with an error.

    The time is the first of field `source.time` (for `senml` the times in the pack), header `creation-time` and Kafka's
    timestamp that is present and at most `source.ahead` later than Kafka's; but never later than Kafka's, the record's
    arrival: one fast clock would close the windows of all others. A time field that is present but not a time is an
    error.

    Args:
        records: the result of `spark_sinks.read.records.records`.
        source: the declared source.
        needed: other columns that a good reading must have, with their names for the error.

    Returns:
        the columns of `records` without `sent_at`; the declared columns; `time`; `error` (null for a good reading); for
        `senml` also `PLACE`.
    """
    known = [column for column in records.columns if column != "sent_at"]
    text = F.trim(text_of(_value(source)), F.lit(WHITE_SPACE))
    opened = records if source.decode == "none" else _FIELDS[source.decode](records.withColumn("_text", text), source)
    by_python, packs = source.decode in PYTHON_DECODERS, source.decode == "senml"
    fault = "_fault" if by_python else "_readable"
    own = F.col("_time") if source.time is not None or packs else F.lit(None).cast("string")
    decoded = opened.withColumn("_epoch", epoch(own)).select(
        *known,
        "sent_at",
        *(_in_range(name, column).alias(name) for name, column in source.columns.items()),
        *((F.col(fault),) if source.decode != "none" else ()),
        *((F.col(PLACE),) if packs else ()),
        own.alias("_own_time"),
        instant(own, F.col("_epoch")).alias("_time"),
    )
    # One `when` for all: of a query that needs only good readings, Spark makes a condition without texts of it.
    error = F.when(~is_instant(F.col("timestamp")), BAD_TIMESTAMP)
    if source.decode != "none":
        error = _unreadable(error, source)
        for name, column in source.columns.items():
            if not column.optional:
                error = error.when(F.col(name).isNull(), f"{name} is missing or not a {TYPE_NAMES[column.type]}")
        error = error.when(F.col("_own_time").isNotNull() & F.col("_time").isNull(), BAD_TIME)
    if source.beyond_ahead == "dead-letter":
        error = error.when(F.coalesce("_time", "sent_at") > _ahead(source), AHEAD)
    for name, value in needed:
        error = error.when(value.isNull(), f"{name} is missing or not a text")
    made = decoded.select(
        *known,
        *source.columns,
        _first_of(source, "_time", "sent_at").alias("time"),
        error.alias("error"),
        *((F.col(PLACE),) if packs else ()),
    )
    return made.where(F.col("error").isNull() | (F.coalesce(PLACE, F.lit(0)) == 0)) if packs else made


def _ahead(source: Source) -> Column:
    """Return the latest time that is accepted for a record."""
    return F.col("timestamp") + F.expr(f"interval {source.ahead.ms} milliseconds")


def _first_of(source: Source, *times: str) -> Column:
    """Return the first of these times that is not too far ahead, else the arrival; never later than the arrival."""
    accepted = (F.when(F.col(column) <= _ahead(source), F.col(column)) for column in times)
    return F.least(F.coalesce(*accepted, "timestamp"), "timestamp")


def _value(source: Source) -> Column:
    """Return the value without Confluent's header."""
    value = F.col("value")
    return F.substring(value, framing.LENGTH + 1, 2**31 - 1) if source.framing == "confluent" else value


def _unreadable(error: Column, source: Source) -> Column:
    """Append to a `when` why a value cannot be decoded at all."""
    if source.decode in PYTHON_DECODERS:
        return error.when(F.col("_fault").isNotNull(), F.col("_fault"))
    if source.framing == "confluent":
        value = F.col("value")
        schema_id = F.conv(F.hex(F.substring(value, 2, 4)), 16, 10)
        none = (F.octet_length(value) < framing.LENGTH) | (F.substring(value, 1, 1) != F.lit(b"\0"))
        error = error.when(none, framing.NO_HEADER)
        if source.schema_id is not None:
            wrong = framing.wrong_schema(source.schema_id)
            error = error.when(schema_id != str(source.schema_id), F.format_string(wrong, schema_id))
    return error.when(~F.coalesce("_readable", F.lit(False)), NOT_READABLE[source.decode])


def _in_range(name: str, column: Declared) -> Column:
    value = F.col(f"_of_{name}")
    return _finite(value) if column.type == "double" else value


def _finite(value: Column) -> Column:
    return F.when(F.abs(value) <= LARGEST, value)


def epoch(text: Column) -> Column:
    """Return the number in a sender's time; null if it is none. As a column of its own, it is parsed once."""
    whole = text.try_cast("bigint")  # of nearly all; a pattern and a double cost four times as much
    usual = whole.between(0, MOST_MILLISECONDS) & (whole.cast("string") == text)
    return F.when(usual, whole.cast("double")).when(text.rlike(MILLISECONDS), text.try_cast("double"))


def instant(text: Column, number: Column) -> Column:
    """Parse a sender's time, epoch milliseconds or ISO 8601 (UTC without a zone); null if it is neither.

    `number` is its `epoch`. One among `SECONDS` is epoch seconds.
    """
    milliseconds = F.when(number.between(*SECONDS), F.round(number * 1_000)).otherwise(number)
    iso = F.regexp_replace(text, ",", ".").try_cast("timestamp")
    return F.when(number.isNotNull(), F.timestamp_millis(milliseconds.try_cast("bigint"))).when(
        text.rlike(ISO_TIME) & is_instant(iso), iso
    )


def is_instant(time: Column) -> Column:
    """Whether a time is in the years 1 to 9999, as UTC."""
    return time.between(*(F.lit(text).cast("timestamp") for text in (FIRST_INSTANT, LAST_INSTANT)))


def _json(records: DataFrame, source: Source) -> DataFrame:
    paths = {f"_of_{name}": (column.field or name, _TYPES[column.type]) for name, column in source.columns.items()}
    if source.time is not None:
        paths["_time"] = source.time, StringType()
    opened, made = records, list[Column]()
    for number, group in enumerate(_groups(paths)):
        opened = opened.withColumn(f"_objects_{number}", _group_objects(F.col("_text"), group))
        made += _fields(F.col("_text"), F.col(f"_objects_{number}"), group)
    return opened.select(*records.columns, is_one(F.col("_text"), F.col("_objects_0")).alias("_readable"), *made)


def json_columns(text: Column, columns: Mapping[str, Declared]) -> list[Column]:
    """Return the declared columns of one JSON object; null where missing, or where the text is not an object."""
    paths = {name: (column.field or name, _TYPES[column.type]) for name, column in columns.items()}
    made = [
        (name, kind, _field(text, _group_objects(text, group), path, kind))
        for group in _groups(paths)
        for name, (path, kind) in group.items()
    ]
    return [(_finite(value) if kind == DoubleType() else value).alias(name) for name, kind, value in made]


def _groups(paths: _Paths) -> list[_Paths]:
    """Split columns into those that one schema can parse, in which a field has one type; nearly always one group."""
    groups: list[_Paths] = []
    for name, (path, kind) in paths.items():
        group = next((column for column in groups if dict(column.values()).get(path, kind) == kind), None)
        if group is None:
            groups.append(group := {})
        group[name] = path, kind
    return groups


def _group_objects(text: Column, group: _Paths) -> Column:
    return F.when(text.startswith("{"), objects(text, dict(group.values())))


def _fields(text: Column, parsed: Column, group: _Paths) -> list[Column]:
    return [_field(text, parsed, path, kind).alias(name) for name, (path, kind) in group.items()]


def _field(text: Column, parsed: Column, path: str, kind: DataType) -> Column:
    value = _at(F.get(parsed, F.lit(0)), path)
    if kind == LongType():  # 1.0 and 1e3 are whole numbers too; Spark evaluates this only for a null
        return F.coalesce(value, whole(_at(F.get(_group_objects(text, {"": (path, DoubleType())}), F.lit(0)), path)))
    return value


def whole(value: Column) -> Column:
    """Return a double without a fraction as a long; null if it has one, or is so large that it may have lost digits."""
    return F.when((F.abs(value) <= WHOLE_FLOAT) & (F.floor(value) == value), value.try_cast("bigint"))


def objects(text: Column, wanted: Mapping[str, DataType]) -> Column:
    """Parse a text with one JSON object into an array with this object, of the wanted paths and types; see `is_one`."""
    # As an element of an array, because Spark's parser ignores what follows the end of an object or an array. A text
    # that may close the array itself has another element after it; for every text that would cost a sixth of parsing.
    options = {"allowNonNumericNumbers": "false", "allowSingleQuotes": "false"}
    schema = _schema(wanted).add(_END, BooleanType())
    end = F.when(_may_close(text), f',{{"{_END}":true}}]').otherwise("]")
    return F.from_json(F.concat(F.lit("["), text, end), ArrayType(schema), options)


def is_one(text: Column, parsed: Column) -> Column:
    """Whether the text that `objects` parsed was one JSON object, and nothing else."""
    marked = (F.size(parsed) == 2) & F.coalesce(F.get(parsed, F.lit(1))[_END], F.lit(False))
    return F.when(_may_close(text), marked).otherwise(F.size(parsed) == 1)


def _may_close(text: Column) -> Column:
    return text.contains("]")


def _schema(wanted: Mapping[str, DataType]) -> StructType:
    """Build an object's schema from dotted paths and their types."""
    below: dict[str, Any] = {}
    for path, kind in wanted.items():
        level = below
        *objects, last = path.split(".")
        for name in objects:
            level = level.setdefault(name, {})
        level[last] = kind

    def made(of: Mapping[str, Any]) -> StructType:
        return StructType(
            [StructField(name, made(kind) if isinstance(kind, dict) else kind) for name, kind in of.items()]
        )

    return made(below)


def _at(column: Column, path: str) -> Column:
    for name in path.split("."):
        column = column.getField(name)
    return column


def _number(records: DataFrame, source: Source) -> DataFrame:
    [(name, column)] = source.columns.items()
    return records.select(
        *records.columns,
        F.col("_text").rlike(NUMBER).alias("_readable"),
        _converted(F.col("_text"), column, f"_of_{name}"),
    )


def _csv(records: DataFrame, source: Source) -> DataFrame:
    text, length = F.col("_text"), F.octet_length("_text")
    # Spark's parser ends the query at a line of more fields than it has room for.
    separators = length - F.octet_length(F.replace(text, F.lit(source.separator), F.lit("")))
    fits = (length < MOST_FIELDS) | (separators < MOST_FIELDS)
    line = F.when(fits & ~text.rlike("[\r\n]") & (text != ""), text)
    schema = ", ".join(f"_{columns} string" for columns in range(len(source.fields) + 1))  # one more: a field too many
    split = records.withColumn("_line", F.from_csv(line, schema, {"sep": source.separator, "mode": "PERMISSIVE"}))
    columns = {name: F.col(f"_line._{number}") for number, name in enumerate(source.fields)}
    return split.select(
        *records.columns,
        (F.col("_line").isNotNull() & F.col(f"_line._{len(source.fields)}").isNull()).alias("_readable"),
        *(_converted(columns[column.field or name], column, f"_of_{name}") for name, column in source.columns.items()),
        *(() if source.time is None else (columns[source.time].alias("_time"),)),
    )


def _avro(records: DataFrame, source: Source) -> DataFrame:
    assert source.schema_file is not None  # `Source._fits`
    schema = avro.AvroSchema(Path(source.schema_file).read_text(encoding="utf-8"))
    columns = wanted(source)
    paths = [*(column.path for column in columns), *filter(None, [source.time])]
    decoded = from_avro(_value(source), schema.text, {"avroSchema": schema.reader(paths), "mode": "PERMISSIVE"})
    opened = records.withColumn("_record", decoded)
    made = []
    for column in columns:
        value = _at(F.col("_record"), column.path).cast(_TYPES[column.type])
        made.append(
            (F.when(F.is_valid_utf8(value), value) if column.type == "string" else value).alias(f"_of_{column.name}")
        )
    if source.time is not None:
        time, parts = _at(F.col("_record"), source.time), schema.milliseconds(source.time)
        time = time if parts == 1 else F.call_function("div", time, F.lit(parts))
        made.append(time.cast("string").alias("_time"))
    return opened.select(*records.columns, F.col(f"_record.{avro.READ}").isNotNull().alias("_readable"), *made)


def _python(records: DataFrame, source: Source) -> DataFrame:
    from spark_sinks.decoders import arrow  # noqa: PLC0415 - only these jobs need its packages

    sent = F.unix_millis(_first_of(source, "sent_at"))
    decoded = records.withColumn("_decoded", arrow.readings(F.col("value"), sent, source))
    known: list[str | Column] = [*records.columns, F.col("_decoded.error").alias("_fault")]
    if source.decode == "senml":
        known.append(F.posexplode_outer("_decoded.readings").alias(PLACE, "_reading"))
    else:
        known.append(F.get("_decoded.readings", F.lit(0)).alias("_reading"))
    opened = decoded.select(*known)
    kept = [name for name in opened.columns if name != "_reading"]
    return opened.select(
        *kept,
        *(F.col("_reading").getField(name).alias(f"_of_{name}") for name in source.columns),
        F.col("_reading").getField(arrow.TIME).alias("_time"),
    )


def _converted(text: Column, column: Declared, name: str) -> Column:
    kind = column.type
    if kind == "string":
        return text.alias(name)
    value = F.when(text.rlike(_PATTERNS[kind]), text.try_cast(_TYPES[kind]))
    if kind == "long":
        value = F.coalesce(value, F.when(text.rlike(NUMBER), whole(text.try_cast("double"))))
    return value.alias(name)


_FIELDS: Final[Mapping[str, Callable[[DataFrame, Source], DataFrame]]] = {
    "json": _json, "number": _number, "csv": _csv, "avro": _avro, "cbor": _python, "protobuf": _python,
    "senml": _python,
}  # fmt: skip
