"""Opens a table of any format. Needs no Spark, but the packages of the extra `lake`."""

from __future__ import annotations

from typing import Any

from spark_sinks.archive.contract import Table
from spark_sinks.spec.parts import Lake


def table_of(lake: Lake, archive: str = "") -> Table[Any]:
    """Return the Delta or Iceberg table of these settings; for `archive` see `Table`."""
    if lake.format == "delta":
        from spark_sinks.archive.delta import DeltaArchive  # noqa: PLC0415

        return DeltaArchive(lake.archive, archive, lake.options)
    from spark_sinks.archive.iceberg import IcebergArchive  # noqa: PLC0415

    return IcebergArchive(lake.archive, archive, lake.catalog, lake.options)
