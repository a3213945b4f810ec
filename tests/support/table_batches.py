"""Adds batches to a table as a job does."""

from __future__ import annotations

import pickle
from typing import Any

import pyarrow as pa

from spark_sinks.archive.contract import Table


def append(archive: Table[Any], rows: pa.Table, number: int) -> None:
    """Add a batch: a task's process writes the files, and the driver commits their descriptions."""
    write = archive.writer(rows.schema, number)
    if write is not None:
        task = pickle.loads(pickle.dumps(write))
        archive.commit([pickle.loads(pickle.dumps(file)) for file in task(rows)], number)
