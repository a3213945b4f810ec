"""Runs the Python decoders in Spark's workers: a column of values in, a column of readings out, through Arrow.

Only the values are sent to the workers; the rest of a record stays in Spark, however many readings it has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import DataType

from spark_sinks.decoders.cbor import Cbor
from spark_sinks.decoders.protobuf import Protobuf
from spark_sinks.decoders.senml import Senml
from spark_sinks.decoders.values import Decoder, decoded, wanted
from spark_sinks.spec.parts import Source

TIME: Final = "_time"
_SQL: Final = {"double": "double", "long": "bigint", "boolean": "boolean", "string": "string"}


def decoder(source: Source) -> Decoder:
    """Return a job's decoder; OSError if its descriptor file cannot be read."""
    columns = wanted(source)
    if source.decode == "senml":
        return Senml(columns)
    if source.decode == "cbor":
        return Cbor(columns, source.time)
    assert source.schema_file is not None and source.message is not None  # noqa: PT018 - `Source._fits`
    return Protobuf(
        columns,
        source.time,
        Path(source.schema_file).read_bytes(),
        source.message,
        framed=source.framing == "confluent",
        schema_id=source.schema_id,
    )


def readings(value: Column, sent_ms: Column, source: Source) -> Column:
    """Decode a column of values.

    Args:
        value: binary.
        sent_ms: when each was sent, epoch ms.
        source: the declared source.

    Returns:
        a struct of `error` (null for a good value) and `readings`, an array of structs with the declared columns and
        the time as text, `TIME`.
    """
    decode = decoder(source)
    names = [*source.columns, TIME]
    reading = ", ".join(f"`{name}`: {_SQL[column.type]}" for name, column in source.columns.items())
    returned = DataType.fromDDL(f"struct<error: string, readings: array<struct<{reading}, {TIME}: string>>>")
    types = to_arrow_type(returned)

    def of_batch(values: pa.Array, sent: pa.Array) -> pa.Array:  # Spark derives the kind of function from the hints
        made = []
        for payload, at in zip(values.to_pylist(), sent.to_pylist(), strict=True):
            error, rows = decoded(decode, payload, at)
            made.append({"error": error, "readings": [dict(zip(names, row, strict=True)) for row in rows]})
        return pa.array(made, types)

    # Marked as nondeterministic; otherwise Spark decodes each value again for every condition on the result.
    make: Any = arrow_udf  # its stubs lack functions of two arrays
    made: Column = make(of_batch, returned).asNondeterministic()(value, sent_ms)
    return made
