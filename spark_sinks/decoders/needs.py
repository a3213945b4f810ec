"""Checks what a job needs besides its file: packages, and schema files that match its columns."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from spark_sinks.decoders import avro
from spark_sinks.decoders.values import wanted
from spark_sinks.spec.backfill import Backfill
from spark_sinks.spec.jobs import Anomalies, Archive, JobSpec
from spark_sinks.spec.parts import Declaration, Source

_DECODERS: Final = {
    "cbor": ("cbor2", "pyarrow"), "senml": ("cbor2", "pyarrow"), "protobuf": ("google.protobuf", "pyarrow"),
}  # fmt: skip
_STATE: Final = ("pandas", "pyarrow", "google.protobuf")
_LAKE: Final = {"delta": ("deltalake", "pyarrow"), "iceberg": ("pyiceberg", "pyarrow")}


def lacks(spec: Declaration) -> Iterator[str]:
    """Yield one sentence for each thing that is missing or does not match."""
    if isinstance(spec, Backfill):
        yield from of_lake(spec.source.format, key="source")
    if not isinstance(spec, JobSpec):
        return
    if isinstance(spec, Archive):
        yield from of_lake(spec.sink.format)
    missing = _missing(_DECODERS.get(spec.source.decode, ()))
    if missing:
        yield f"source.decode: {spec.source.decode} {_needs(missing)}"
    if isinstance(spec, Anomalies) and spec.has_state and (gone := _missing(_STATE)):
        yield f"thresholds: a running mean {_needs(gone)}"
    if not missing and spec.source.schema_file is not None:
        yield from (f"source.{lack}" for lack in _of_schema(spec.source, Path(spec.source.schema_file)))


def of_lake(archive: str, *, key: str = "sink", upkeep: bool = False) -> Iterator[str]:
    """Yield one sentence for each missing package of the extra `lake` that an archive of this format needs."""
    for package in _missing(_LAKE.get(archive, ("pyarrow",) if upkeep else ())):
        what = "maintaining Parquet files" if archive == "parquet" else archive
        yield f"{key}.format: {what} needs the package {package}: pip install 'trivium[lake]'"


def _of_schema(source: Source, file: Path) -> Iterator[str]:
    try:
        content = file.read_bytes()
    except OSError as error:
        yield f"schema_file: {file}: {error.strerror}"
        return
    if source.decode == "avro":
        try:
            schema = avro.AvroSchema(content.decode())
        except (avro.SchemaError, UnicodeDecodeError) as error:
            yield f"schema_file: {file}: {error}"
        else:
            yield from schema.lacks(wanted(source), source.time)
    else:
        from spark_sinks.decoders import protobuf  # noqa: PLC0415 - only if the package is installed

        yield from protobuf.lacks(content, source.message or "", wanted(source), source.time)


def _missing(packages: Collection[str]) -> list[str]:
    return [name for name in packages if not _installed(name)]


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _needs(missing: Collection[str]) -> str:
    return f"needs the package {', '.join(missing)}: pip install 'trivium[spark]'"
