"""Data files of a Delta table, written through delta-rs's own access to its store. Needs no Spark."""

from __future__ import annotations

import datetime
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake._internal import DeltaFileSystemHandler
from deltalake.transaction import AddAction
from pyarrow.fs import FileType


@dataclass(frozen=True, slots=True)
class DeltaFiles:
    """Writes rows to files, one for each date and topic (`contract.WriteFiles`).

    Attributes:
        table: the table's directory or URL.
        options: storage options by delta-rs's names.
        partition_by: the table's partition columns, of `date` and `topic`.
    """

    table: str
    options: Mapping[str, str]
    partition_by: Sequence[str]

    def __call__(self, rows: pa.Table) -> Iterator[AddAction]:
        """Write the rows; yield what adds each file to the table."""
        store = _store(self.table, self.options)
        for values, part in _parts(rows, self.partition_by):
            encoded = pa.BufferOutputStream()
            pq.write_table(part, encoded, compression="zstd")
            content = encoded.getvalue().to_pybytes()
            directory = "".join(f"{name}={value}/" for name, value in values.items())
            path = f"{directory}part-{uuid.uuid4().hex}.zstd.parquet"
            file: Any = store.open_output_stream(path)  # the stub lacks `close`
            file.write(content)
            file.close()
            yield AddAction(path, len(content), values, round(time.time() * 1000), data_change=True, stats=_stats(part))


def does_exist(table: str, options: Mapping[str, str], path: str) -> bool:
    """Whether a table's file can be read from here."""
    (info,) = _store(table, options).get_file_info([path])
    return bool(info.type == FileType.File)


def _store(table: str, options: Mapping[str, str]) -> DeltaFileSystemHandler:
    # Not as pyarrow's file system: delta-rs takes bytes, and pyarrow gives it buffers.
    return DeltaFileSystemHandler(table, dict(options))


def _parts(rows: pa.Table, by: Sequence[str]) -> Iterator[tuple[dict[str, str | None], pa.Table]]:
    """Yield the rows of each combination of values, in their order, without these columns."""
    if not by:
        yield {}, rows
        return
    order = [(name, "ascending") for name in by]
    parts = rows.group_by(list(by)).aggregate([([], "count_all")]).sort_by(order)
    if parts.num_rows > 1:
        rows = rows.take(pc.sort_indices(rows, order))  # a stable sort
    begin = 0
    for row in parts.to_pylist():
        count = row.pop("count_all")
        yield {name: str(value) for name, value in row.items()}, rows.slice(begin, count).drop_columns(list(by))
        begin += count


def _stats(rows: pa.Table) -> str:
    """Return what readers skip files by: the range of each number and time, as JSON of the Delta protocol."""
    least: dict[str, object] = {}
    most: dict[str, object] = {}
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        of = column.type
        if pa.types.is_integer(of) or pa.types.is_floating(of) or pa.types.is_timestamp(of):
            bounds = pc.min_max(column)
            least[name], most[name] = (_json(bounds[end].as_py()) for end in ("min", "max"))
    nulls = {name: rows[name].null_count for name in least}
    known = ({name: value for name, value in ends.items() if value is not None} for ends in (least, most))
    minimum, maximum = known
    return json.dumps({"numRecords": rows.num_rows, "minValues": minimum, "maxValues": maximum, "nullCount": nulls})


def _json(value: object) -> object:
    if not isinstance(value, datetime.datetime):
        return value
    return f"{value.astimezone(datetime.UTC).replace(tzinfo=None).isoformat(timespec='microseconds')}Z"
