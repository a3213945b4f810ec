"""The sections of a job file as typed settings: source, windows, sinks, run.

The text below a field is its description in the documentation. `Declaration` has the keys of every job file.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from spark_sinks.spec.values import (
    NUMBERS,
    RECORD_COLUMNS,
    ColumnName,
    ColumnType,
    Duration,
    FieldPath,
    Listen,
    TopicName,
)

MICRO_BATCH: Final = "micro-batch"
REAL_TIME: Final = "real-time"
PYTHON_DECODERS: Final = frozenset({"cbor", "protobuf", "senml"})
"""Decoders that run in Python, and therefore in micro-batches only."""
SENML_FIELDS: Final[Mapping[str, ColumnType]] = {
    "n": "string", "u": "string", "v": "double", "vs": "string", "vb": "boolean", "vd": "string", "s": "double",
    "ut": "double",
}  # fmt: skip
"""The fields of a resolved SenML record (RFC 8428, 4.2) that may be columns, with their types."""
_SCHEMA: Final = frozenset({"avro", "protobuf"})
_FRAMED: Final = frozenset({"json", "avro", "protobuf"})
_FIELDS: Final = frozenset({"json", "avro", "cbor", "protobuf", "senml"})
SHORTEST_REAL_TIME_MS: Final = 5_000  # Spark's own minimum between two checkpoints in real time


class Section(BaseModel):
    """A section of a job file; immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def lacks(self) -> Iterator[str]:
        """Yield one sentence for each contradiction between the keys of the section."""
        yield from ()

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (first := next(iter(self.lacks()), None)) is not None:
            raise ValueError(first)
        return self


class Column(Section):
    """A column decoded from a value; `temperature = "double"` is short for `{ type = "double" }`."""

    type: ColumnType = "double"
    """`double`, `long`, `boolean` or `string`"""
    field: FieldPath | None = None
    """the field of the value, with dots into objects (`position.lat`); not set: the column's name"""
    optional: bool = False
    """whether a record without the field is a good one, with a null. Otherwise it becomes a dead letter"""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        return {"type": given} if isinstance(given, str) else given


class Source(Section):
    """The topics a job reads, and how each record becomes columns."""

    topics: Annotated[tuple[TopicName, ...], Field(min_length=1)]
    """Kafka topics; the job waits until all of them exist"""
    decode: Literal["none", "json", "number", "csv", "avro", "cbor", "protobuf", "senml"] = "json"
    """how a value is decoded: a `json` object, a bare `number`, a line of `csv`, a record of `avro`, a map of `cbor`, a
    message of `protobuf`, a pack of `senml`, or `none`: only the columns that every record has"""
    columns: dict[ColumnName, Column] = {}
    """columns and their types: `{ load = "double", lat = { type = "double", field = "position.lat" } }`"""
    fields: tuple[str, ...] = ()
    """the names of the fields of a `csv` line, in order"""
    separator: Annotated[str, Field(min_length=1, max_length=1)] = ","
    """the character between two `csv` fields"""
    schema_file: str | None = None
    """`avro`: the writer's schema (JSON). `protobuf`: a descriptor set, written by `protoc --include_imports
    --descriptor_set_out=FILE`"""
    message: str | None = None
    """the full name of the `protobuf` message: `plant.Reading`"""
    framing: Literal["none", "confluent"] = "none"
    """`confluent`: each `json`, `avro` or `protobuf` value starts with the header of Confluent's serializers"""
    schema_id: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """the schema id required in that header. A value with another id is a dead letter; not set: any id is accepted"""
    time: FieldPath | None = None
    """the field of the value that has the time of the reading: epoch milliseconds or ISO 8601 (UTC without a zone). A
    number from 1e9 to 1e10 is epoch seconds"""
    ahead: Duration = Duration("1m")
    """how far a time may be ahead of the record's arrival (Kafka's timestamp). Up to there the arrival is used instead
    of it, so that a fast clock never closes the windows of every other sensor; what is further ahead is wrong"""
    beyond_ahead: Literal["next-clock", "dead-letter"] = "next-clock"
    """what is done with a time further ahead than that: the next of field `time`, header `creation-time` and arrival is
    used, or the record becomes a dead letter"""
    dead_letters: TopicName | None = None
    """topic for late readings and records that cannot be decoded, with the reason; required except for an archive"""

    def lacks(self) -> Iterator[str]:
        """Yield a sentence for each contradiction between its keys."""
        if len(set(self.topics)) != len(self.topics):
            yield "topics: a topic is listed twice"
        names = [name.lower() for name in self.columns]
        if len(set(names)) != len(names):
            yield "columns: two names differ only in case, which Spark ignores"
        if self.decode == "none" and (self.columns or self.time):
            yield 'decode = "none" reads no value: columns and time need another decoder'
        if self.decode == "number" and (len(self.columns) != 1 or self.time):
            yield 'decode = "number" gives one column and no time: columns = { temperature = "double" }'
        if self.decode == "number" and not NUMBERS.issuperset(column.type for column in self.columns.values()):
            yield 'columns: decode = "number" needs a double or a long'
        if self.decode in _FIELDS and not self.columns:
            yield 'columns: list the fields to decode with their types, or use decode = "none"'
        yield from self._lacks_of_binary()
        if (self.decode == "csv") != bool(self.fields):
            yield "fields: required for csv, and only allowed there"
        wanted = [*(column.field or name for name, column in self.columns.items()), *filter(None, [self.time])]
        if self.decode == "csv" and (missing := [name for name in wanted if name not in self.fields]):
            yield f"fields: {missing[0]} is not listed"
        if self.decode == "json":
            yield from _clashes(wanted)

    def _lacks_of_binary(self) -> Iterator[str]:
        if (self.decode in _SCHEMA) != (self.schema_file is not None):
            yield "schema_file: required for avro and protobuf, and only allowed there"
        if (self.decode == "protobuf") != (self.message is not None):
            yield "message: required for protobuf, and only allowed there"
        if self.framing == "confluent" and self.decode not in _FRAMED:
            yield f"framing: Confluent's header is supported for json, avro and protobuf, not for {self.decode}"
        if self.schema_id is not None and self.framing == "none":
            yield 'schema_id: needs framing = "confluent", whose header has the id'
        if self.decode == "senml":
            if self.time is not None:
                yield "time: each record of a SenML pack has its own time; remove this key"
            for name, column in self.columns.items():
                field = column.field or name
                if field not in SENML_FIELDS:
                    yield f"columns.{name}: SenML has no field {field}, only {', '.join(SENML_FIELDS)}"
                elif column.type != SENML_FIELDS[field]:
                    yield f"columns.{name}: {field} is a {SENML_FIELDS[field]} in SenML, not a {column.type}"

    def type_of(self, name: str) -> ColumnType | None:
        """Return the type of a decoded column or of one that every record has; KeyError if there is no such column."""
        return self.columns[name].type if name in self.columns else RECORD_COLUMNS[name]


def _clashes(paths: Sequence[str]) -> Iterator[str]:
    for one, other in itertools.permutations(paths, 2):
        if other.startswith(f"{one}."):
            yield f"columns: {one} cannot be a value and an object with {other} in it"


class Window(Section):
    """Windows of event time."""

    length: Duration
    """length of a window"""
    slide: Duration | None = None
    """time from one window's start to the next; not set: the length, so that each reading is in one window"""
    watermark: Duration = Duration("10s")
    """how late a reading may be. A window closes when the newest event time is this far past its end"""

    def lacks(self) -> Iterator[str]:
        """Yield a sentence for each contradiction between its keys."""
        if self.slide is not None and self.slide.ms > self.length.ms:
            yield f"slide ({self.slide}) is longer than length ({self.length}): readings between windows would be lost"


class Session(Section):
    """Session windows: they end when a device has been silent for `gap`."""

    gap: Duration
    """how long a device must be silent for its session to end"""
    watermark: Duration = Duration("10s")
    """how late a reading may be. A session ends when the newest event time is gap + watermark past its last reading"""


class TopicSink(Section):
    """A Kafka topic for results, at least once."""

    kafka: TopicName
    """topic of the results; MQTT clients receive them as `TOPIC/KEY`, AMQP and HTTP clients read the topic"""


class ResultSink(TopicSink):
    """A Kafka topic for the results of windows."""

    emit: Literal["updates", "final"] = "updates"
    """`updates`: a result each time its window changes; the last one is valid. `final`: one result, when the window has
    closed; micro-batches only"""


class LastSink(TopicSink):
    """A Kafka topic for the last value of each device."""

    retained: bool = False
    """also publish MQTT retained messages `TOPIC/KEY`, so that a new subscriber immediately receives the last values"""


class Lake(Section):
    """Where an archive is, and in which format."""

    archive: Annotated[str, Field(min_length=1)]
    """Parquet: a directory, or the URL of a file system with atomic directory renames (hdfs, abfss). Delta: the table's
    directory or URL (`s3://`, `gs://`, `abfss://`). Iceberg: the table's name, `NAMESPACE.TABLE`"""
    format: Literal["parquet", "delta", "iceberg"] = "parquet"
    """`parquet`: directories of plain files. `delta`, `iceberg`: a table, which needs the extra `lake`, also on the
    workers of a cluster"""
    catalog: str = "default"
    """Iceberg: the catalog's name in pyiceberg's own configuration (`.pyiceberg.yaml`, `PYICEBERG_CATALOG__...`)"""
    options: dict[str, str] = {}
    """Delta: storage options, such as `AWS_REGION`. Iceberg: catalog properties, such as `uri`. Both also read options
    and secrets from the environment"""

    def lacks(self) -> Iterator[str]:
        """Yield a sentence for each contradiction between its keys."""
        for name, formats in _FORMATS_OF.items():
            if name in self.model_fields_set and self.format not in formats:
                yield f"{name}: not used by the format {self.format}, only by {' and '.join(formats)}"
        if self.format == "iceberg" and not re.fullmatch(r"\w[\w-]*(\.\w[\w-]*)+", self.archive):
            yield f"archive: an Iceberg table is named NAMESPACE.TABLE, not {self.archive!r}"


class ArchiveSink(Lake):
    """Writes every record to files, exactly once."""

    files: Annotated[int, Field(ge=1, le=1_000)] = 1
    """files per batch, date and topic, each written by a task of its own. More files are written in parallel; fewer,
    larger files read faster"""
    segment: Annotated[int, Field(ge=1, le=1_000_000)] = 1_000
    """Parquet: batches per directory; `trivium spark maintain` merges a directory when all its batches are complete. An
    archive keeps the value of its first start"""

    def lacks(self) -> Iterator[str]:
        """Yield a sentence for each contradiction between its keys."""
        yield from super().lacks()
        scheme = self.archive.partition("://")[0] if "://" in self.archive else "file"
        if self.format == "parquet" and scheme in {"s3", "s3a", "s3n", "gs", "wasb", "wasbs", "oss", "cosn"}:
            yield (
                f"archive: {scheme} cannot rename a directory atomically, so a reader could see half a batch; use a "
                'file system that can (a local or network disk, hdfs, abfss), or format = "delta"'
            )


_FORMATS_OF: Final = {
    "segment": ("parquet",), "catalog": ("iceberg",), "options": ("delta", "iceberg"),
}  # fmt: skip


_SHORTEST_UNUSED_MS: Final = 3_600_000


class Maintain(Section):
    """Settings of `trivium spark maintain` for this archive."""

    file_mb: Annotated[int, Field(ge=1, le=4_096)] = 128
    """small files are merged up to this size, MiB"""
    keep_days: Annotated[int, Field(ge=1)] | None = None
    """records whose `date` is more than this many days ago are deleted; not set: no record is deleted"""
    unused: Duration = Duration("24h")
    """age at which files that are not part of the archive (replaced, or left by a killed job) and older table versions
    are deleted. Must be longer than the longest query and the longest batch, at least 1h; for Delta it is rounded up to
    whole hours"""

    def lacks(self) -> Iterator[str]:
        """Yield a sentence for each contradiction between its keys."""
        if self.unused.ms < _SHORTEST_UNUSED_MS:
            yield f"unused: {self.unused} could delete files that the job has not committed yet; at least 1h is needed"


class Registry(Section):
    """Properties of devices, from a compacted topic or a file."""

    topic: TopicName | None = None
    """a compacted topic: the newest record of each key is used; one without a value deletes the key"""
    file: str | None = None
    """a file of JSON lines, or CSV with a header line (`.csv`), with a field `key`; of two entries with one key the
    last is used"""
    columns: Annotated[dict[ColumnName, Column], Field(min_length=1)]
    """columns added to each reading, from the registry's JSON objects or fields; null if missing"""

    def lacks(self) -> Iterator[str]:
        """Yield a sentence for each contradiction between its keys."""
        if (self.topic is None) == (self.file is None):
            yield "either a topic or a file is required, not both"
        yield from _clashes([column.field or name for name, column in self.columns.items()])


class Threshold(Section):
    """When a column's value raises an alarm."""

    above: float | None = None
    """alarm if the value is greater than this"""
    below: float | None = None
    """alarm if the value is less than this"""
    deviations: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """alarm if the value is this many standard deviations off the mean of the device's earlier values; micro-batches
    only"""
    after: Annotated[int, Field(ge=2)] = 30
    """values that a mean needs before there are `deviations` alarms"""

    def lacks(self) -> Iterator[str]:
        """Yield a sentence for each contradiction between its keys."""
        if self.above is None and self.below is None and self.deviations is None:
            yield "at least one of above, below and deviations is required"
        if self.above is not None and self.below is not None and self.below > self.above:
            yield f"below ({self.below:g}) is greater than above ({self.above:g}): every value would be an alarm"
        if self.deviations is None and "after" in self.model_fields_set:
            yield "after: only allowed with deviations"


class Run(Section):
    """How a Spark job runs."""

    checkpoint: str
    """directory or URL from which a restarted job continues. Each job needs its own"""
    bootstrap_servers: str = "127.0.0.1:9092"
    """Kafka, `host:port,host:port`"""
    trigger: Literal["micro-batch", "real-time"] = "micro-batch"
    """`micro-batch`: the most readings per CPU second. `real-time`: milliseconds from reading to result"""
    interval: Duration | None = None
    """time between micro-batches (not set: each starts when the last one ends), or between checkpoints in real time
    (not set: 5m; 10s for `enrich` with a topic)"""
    max_offsets_per_trigger: Annotated[int, Field(ge=1)] = 100_000
    """the most records of a micro-batch; limits memory, and keeps partitions in step after an outage. Reduced
    automatically when such batches take long"""
    starting_offsets: Literal["earliest", "latest"] = "earliest"
    """where the first start begins; later starts continue from the checkpoint"""
    accept_data_loss: bool = False
    """continue when Kafka has deleted records before they were read, instead of ending"""
    shuffle_partitions: Annotated[int, Field(ge=1)] = 2
    """tasks of a stateful stage; a checkpoint keeps the number of its first start"""
    state_rows: Annotated[int, Field(ge=1)] | None = None
    """expected rows of state (groups times open windows). Below a million, micro-batches keep them in the heap, which
    is faster. Not set: on disk, in RocksDB"""
    driver_memory: Annotated[str, Field(pattern=r"^\d+[mg]$")] | None = None
    """Java heap; with a local master it is the heap of the whole job. Not set: 1 GiB plus room for state in the heap"""
    metrics: Listen = Listen("127.0.0.1:0")
    """address from which Prometheus, `trivium spark status` and the console read the job's metrics; with port 0, a free
    port, which `status` finds. There is no password: everyone who can reach the port can read them"""
    master: str | None = None
    """any Spark master; not set: local, with as many slots as the trigger needs"""
    kafka: dict[str, str] = {}
    """more Kafka client settings by their Kafka names, such as `security.protocol`"""
    conf: dict[str, str] = {}
    """more Spark settings; with `spark.python.sql.dataFrameDebugging.enabled` as `"true"`, Spark's errors name the line
    of a `transform`"""


class Declaration(Section):
    """A job declared in a file. `job` names its kind."""

    SUMMARY: ClassVar[str]
    SPARK: ClassVar[bool] = True
    """Whether the job needs Spark, and therefore Java."""
    job: str
    """the kind of job"""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] | None = None
    """name of the query in progress reports and logs; not set: the kind"""
    run: Any

    @property
    def title(self) -> str:
        """The name, or the kind if the job has no name."""
        return self.name or self.job

    @property
    def topics(self) -> tuple[str, ...]:
        """Every topic that must exist before the job starts."""
        raise NotImplementedError
