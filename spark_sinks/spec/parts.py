"""The parts of a job file as typed settings: what is read, windows, sinks, how it runs.

The text below a field is its description.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self

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
DECODERS: Final[Mapping[str, tuple[str, str]]] = {
    "none": ("not looked at", "none of its own: only what every record has"),
    "json": ("one object", "fields by path (`at.lat`); a `string` takes any value as its JSON text"),
    "number": ("a bare number, as JSON has it", "one column"),
    "csv": ("one line", "by the names in `fields`"),
    "avro": (
        "one record, written with the schema in `schema_file`",
        "fields by path; numbers, booleans, texts and enums, each with or without null",
    ),
    "cbor": (
        "one map (RFC 8949)",
        "entries by path; a part that is a number is an integer key too. A `string` is a text",
    ),
    "protobuf": (
        "one `message` of `schema_file`",
        "fields by path, none repeated; enums are texts. A proto3 field without `optional` is never missing: it is 0",
    ),
    "senml": ("a pack (RFC 8428), in JSON or CBOR", "the resolved fields `n`, `u`, `v`, `vs`, `vb`, `vd`, `s`, `ut`"),
}
"""What a value is for each decoder, and what its columns are."""
PYTHON_DECODERS: Final = frozenset({"cbor", "protobuf", "senml"})
"""Decoders that are Python: micro-batches only."""
SENML_FIELDS: Final[Mapping[str, ColumnType]] = {
    "n": "string", "u": "string", "v": "double", "vs": "string", "vb": "boolean", "vd": "string", "s": "double",
    "ut": "double",
}  # fmt: skip
"""The fields of a resolved record of SenML (RFC 8428, 4.2) that may be columns, and their types."""
_SCHEMA: Final = frozenset({"avro", "protobuf"})
_FRAMED: Final = frozenset({"json", "avro", "protobuf"})
_FIELDS: Final = frozenset({"json", "avro", "cbor", "protobuf", "senml"})
SHORTEST_REAL_TIME_MS: Final = 5_000  # Spark's own bound for the time between two checkpoints in real time


class Section(BaseModel):
    """A part of a job: frozen, and unknown keys are errors. The text below a field is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Column(Section):
    """A column that a value is decoded into; `temperature = "double"` is short for `{ type = "double" }`."""

    type: ColumnType = "double"
    """`double`, `long`, `boolean` or `string`"""
    field: FieldPath | None = None
    """the value's field, with dots into objects (`position.lat`); not set: named as the column"""
    optional: bool = False
    """a record without it is good, and has a null there. Otherwise it is a dead letter"""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        return {"type": given} if isinstance(given, str) else given


class Source(Section):
    """What a job reads, and how a record becomes columns."""

    topics: Annotated[tuple[TopicName, ...], Field(min_length=1)]
    """Kafka topics; they must exist, the job waits until they do"""
    decode: Literal["none", "json", "number", "csv", "avro", "cbor", "protobuf", "senml"] = "json"
    """how a value is read: a `json` object, a bare `number`, a line of `csv`, a record of `avro`, a map of `cbor`, a
    message of `protobuf`, a pack of `senml`, or `none`: only what every record has"""
    columns: dict[ColumnName, Column] = {}
    """columns of the value and their types: `{ load = "double", lat = { type = "double", field = "position.lat" } }`"""
    fields: tuple[str, ...] = ()
    """the names of a `csv` line's fields, in order"""
    separator: Annotated[str, Field(min_length=1, max_length=1)] = ","
    """between two fields of `csv`"""
    schema_file: str | None = None
    """`avro`: the schema that values are written with (JSON). `protobuf`: a descriptor set, as `protoc
    --include_imports --descriptor_set_out=FILE` writes it"""
    message: str | None = None
    """the full name of the `protobuf` message: `plant.Reading`"""
    framing: Literal["none", "confluent"] = "none"
    """`confluent`: before each value of `json`, `avro` or `protobuf` is the header of Confluent's serializers"""
    schema_id: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """with that header: the schema's id. Values with another id are dead letters; not set: any is taken"""
    time: FieldPath | None = None
    """the value's field with the time of the reading: epoch milliseconds or ISO 8601 (UTC without a zone)"""
    ahead: Duration = Duration("1m")
    """how far a time may be ahead of the record's arrival. One further ahead is not believed: the next of header
    `creation-time`, field `time` and Kafka's timestamp counts; it would close every other sensor's windows"""
    dead_letters: TopicName | None = None
    """topic of what cannot be decoded, and of late readings, with the reason; every job but an archive has one"""

    @model_validator(mode="after")
    def _fits(self) -> Source:
        if len(set(self.topics)) != len(self.topics):
            raise ValueError("topics: one is named twice")
        names = [name.lower() for name in self.columns]
        if len(set(names)) != len(names):
            raise ValueError("columns: two differ only in capital letters, which Spark does not tell apart")
        if self.decode == "none" and (self.columns or self.time):
            raise ValueError('decode = "none" reads no value: columns and time need another')
        if self.decode == "number" and (len(self.columns) != 1 or self.time):
            raise ValueError('decode = "number" gives one column and no time: columns = { temperature = "double" }')
        if self.decode == "number" and not NUMBERS.issuperset(column.type for column in self.columns.values()):
            raise ValueError("columns: a number is a double or a long")
        if self.decode in _FIELDS and not self.columns:
            raise ValueError('columns: name the fields that are wanted, with their types; or decode = "none"')
        if (lack := next(self._lacks_of_binary(), None)) is not None:
            raise ValueError(lack)
        if (self.decode == "csv") != bool(self.fields):
            raise ValueError("fields: the names of a line's fields belong to csv, and csv needs them")
        wanted = [*(column.field or name for name, column in self.columns.items()), *filter(None, [self.time])]
        if self.decode == "csv" and (missing := [name for name in wanted if name not in self.fields]):
            raise ValueError(f"fields: no {missing[0]} among them")
        if self.decode == "json" and (clash := _clash(wanted)):
            raise ValueError(f"columns: {clash[0]} cannot be a value and an object with {clash[1]} in it")
        return self

    def _lacks_of_binary(self) -> Iterator[str]:
        if (self.decode in _SCHEMA) != (self.schema_file is not None):
            yield "schema_file: belongs to avro and protobuf, and they need it"
        if (self.decode == "protobuf") != (self.message is not None):
            yield "message: belongs to protobuf, which needs it"
        if self.framing == "confluent" and self.decode not in _FRAMED:
            yield f"framing: Confluent's header is before json, avro and protobuf, not {self.decode}"
        if self.schema_id is not None and self.framing == "none":
            yield 'schema_id: is in the header that framing = "confluent" tells of'
        if self.decode == "senml":
            if self.time is not None:
                yield "time: each record of a SenML pack has its own; leave it out"
            for name, column in self.columns.items():
                field = column.field or name
                if field not in SENML_FIELDS:
                    yield f"columns.{name}: SenML has no field {field}; there are {', '.join(SENML_FIELDS)}"
                elif column.type != SENML_FIELDS[field]:
                    yield f"columns.{name}: {field} is a {SENML_FIELDS[field]} in SenML, no {column.type}"

    def type_of(self, name: str) -> ColumnType | None:
        """The type of a column that is decoded or that every record has; KeyError when there is none."""
        return self.columns[name].type if name in self.columns else RECORD_COLUMNS[name]


def _clash(paths: Sequence[str]) -> tuple[str, str] | None:
    return next(((one, other) for one in paths for other in paths if other.startswith(f"{one}.")), None)


class Window(Section):
    """Windows of event time."""

    length: Duration
    """of a window"""
    slide: Duration | None = None
    """from one window's start to the next; not set: as long as a window, so that each reading is in one"""
    watermark: Duration = Duration("10s")
    """how late a reading may be. A window is done when the newest event time is so far past its end"""

    @model_validator(mode="after")
    def _fits(self) -> Window:
        if self.slide is not None and self.slide.ms > self.length.ms:
            raise ValueError(
                f"slide ({self.slide}) is longer than length ({self.length}): readings between windows would be lost"
            )
        return self


class Session(Section):
    """Windows that end when a device is silent."""

    gap: Duration
    """how long a device must be silent for its session to end"""
    watermark: Duration = Duration("10s")
    """how late a reading may be. A session is done when the newest event time is gap and watermark past its end"""


class TopicSink(Section):
    """Results to a Kafka topic, at least once."""

    kafka: TopicName
    """topic of the results; MQTT clients see them as `TOPIC/KEY`, AMQP and HTTP clients at the topic"""


class ResultSink(TopicSink):
    """Results of windows."""

    emit: Literal["updates", "final"] = "updates"
    """`updates`: a window's result whenever it changed, the last one counts. `final`: once, when the window is done;
    micro-batches only"""


class LastSink(TopicSink):
    """The last value of each device."""

    retained: bool = False
    """also as MQTT retained messages `TOPIC/KEY`: a new subscriber has the last values at once"""


class Lake(Section):
    """Where an archive is, and what it is."""

    archive: Annotated[str, Field(min_length=1)]
    """Parquet: a directory, or the URL of a file system that renames a directory in one step (hdfs, abfss). Delta: the
    table's directory, or its URL (`s3://`, `gs://`, `abfss://`). Iceberg: the table's name, `NAMESPACE.TABLE`"""
    format: Literal["parquet", "delta", "iceberg"] = "parquet"
    """`parquet`: directories of plain files, any amount. `delta`, `iceberg`: a table, which needs the extra `lake`;
    the batches of the job that writes it pass the driver's memory"""
    catalog: str = "default"
    """Iceberg: the catalog's name in pyiceberg's own configuration (`.pyiceberg.yaml`, `PYICEBERG_CATALOG__...`)"""
    options: dict[str, str] = {}
    """Delta: storage options, such as `AWS_REGION`. Iceberg: properties of the catalog, such as `uri`. Both also take
    them, and secrets, from the environment"""

    @model_validator(mode="after")
    def _is_of_its_format(self) -> Self:
        for name, formats in _FORMATS_OF.items():
            if name in self.model_fields_set and self.format not in formats:
                raise ValueError(f"{name}: an archive in {self.format} has none; {formats[0]} has")
        if self.format == "iceberg" and not re.fullmatch(r"\w[\w-]*(\.\w[\w-]*)+", self.archive):
            raise ValueError(f"archive: a table of Iceberg is NAMESPACE.TABLE, not {self.archive!r}")
        return self


class ArchiveSink(Lake):
    """Every record in files, exactly once."""

    files: Annotated[int, Field(ge=1, le=1_000)] = 1
    """Parquet: per batch, date and topic. More are written at once; fewer and larger ones are read faster"""
    segment: Annotated[int, Field(ge=1, le=1_000_000)] = 1_000
    """Parquet: so many batches have a directory that `trivium spark maintain` merges when they are complete. An archive
    keeps the number of its first start"""

    @model_validator(mode="after")
    def _can_be_written(self) -> Self:
        scheme = self.archive.partition("://")[0] if "://" in self.archive else "file"
        if self.format == "parquet" and scheme in {"s3", "s3a", "s3n", "gs", "wasb", "wasbs", "oss", "cosn"}:
            raise ValueError(
                f"archive: {scheme} cannot rename a directory in one step, so a reader could see half a batch; use a "
                'file system that can (a local or network disk, hdfs, abfss), or format = "delta"'
            )
        return self


_FORMATS_OF: Final = {
    "files": ("parquet",), "segment": ("parquet",), "catalog": ("iceberg",), "options": ("delta", "iceberg"),
}  # fmt: skip


class Maintain(Section):
    """What `trivium spark maintain` does to an archive."""

    file_mb: Annotated[int, Field(ge=1, le=4_096)] = 128
    """small files are merged up to this size, MiB"""
    keep_days: Annotated[int, Field(ge=1)] | None = None
    """records whose `date` is more than so many days ago are deleted; not set: none"""
    unused: Duration = Duration("24h")
    """files that are in the archive no more, or never were (a killed job's), are deleted after this time, and versions
    of a table before it are forgotten. Longer than the longest query, and than a batch"""


class Registry(Section):
    """What is known of devices: a compacted topic, or a file."""

    topic: TopicName | None = None
    """a compacted topic: the newest record of a key counts, one without a value deletes it"""
    file: str | None = None
    """a file of JSON lines, or of CSV with a header (`.csv`), with a field `key`"""
    columns: Annotated[dict[ColumnName, Column], Field(min_length=1)]
    """what is added to each reading, from the registry's JSON objects or fields; null where it is missing"""

    @model_validator(mode="after")
    def _fits(self) -> Registry:
        if (self.topic is None) == (self.file is None):
            raise ValueError("a topic or a file, one of them")
        if clash := _clash([column.field or name for name, column in self.columns.items()]):
            raise ValueError(f"columns: {clash[0]} cannot be a value and an object with {clash[1]} in it")
        return self


class Threshold(Section):
    """When a column's value is an alarm."""

    above: float | None = None
    """greater than this"""
    below: float | None = None
    """less than this"""
    deviations: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """further than so many standard deviations from the mean of the device's values before it; micro-batches only"""
    after: Annotated[int, Field(ge=2)] = 30
    """of how many values there must be a mean before a `deviations` alarm"""

    @model_validator(mode="after")
    def _fits(self) -> Threshold:
        if self.above is None and self.below is None and self.deviations is None:
            raise ValueError("above, below or deviations, one of them at least")
        if self.above is not None and self.below is not None and self.below > self.above:
            raise ValueError(
                f"below ({self.below:g}) is greater than above ({self.above:g}): every value would be an alarm"
            )
        if self.deviations is None and "after" in self.model_fields_set:
            raise ValueError("after: belongs to deviations")
        return self


class Run(Section):
    """How a job runs."""

    checkpoint: str
    """directory (or URL) that makes a restart go on where the last run ended. One job, one checkpoint"""
    bootstrap_servers: str = "127.0.0.1:9092"
    """Kafka, `host:port,host:port`"""
    trigger: Literal["micro-batch", "real-time"] = "micro-batch"
    """`micro-batch`: the most readings a CPU second. `real-time`: milliseconds from reading to result"""
    interval: Duration | None = None
    """between micro-batches (not set: one after the other), or between checkpoints in real time (not set: 5m, of
    `enrich` with a topic 10s)"""
    max_offsets_per_trigger: Annotated[int, Field(ge=1)] = 100_000
    """the most records of a micro-batch: bounds memory, and keeps the partitions abreast after an outage. Where such a
    batch takes long, fewer"""
    starting_offsets: Literal["earliest", "latest"] = "earliest"
    """of the first start; afterwards the checkpoint says where to go on"""
    accept_data_loss: bool = False
    """go on when Kafka has lost records that were not read yet, instead of ending"""
    shuffle_partitions: Annotated[int, Field(ge=1)] = 2
    """tasks of a stage with state; a checkpoint keeps the number of its first start"""
    state_rows: Annotated[int, Field(ge=1)] | None = None
    """about how many rows of state there will be (groups and their open windows): below a million, micro-batches keep
    them in the heap, which is faster. Not set: on disk, by RocksDB"""
    driver_memory: Annotated[str, Field(pattern=r"^\d+[mg]$")] | None = None
    """Java heap; with a local master the heap of everything. Not set: 1 GiB, and room for the rows of state in it"""
    metrics: Listen = Listen("127.0.0.1:0")
    """where Prometheus, `trivium spark status` and the console read the job's metrics; port 0: a free one, which
    `status` finds. There is no password: beyond loopback whoever reaches the port reads them"""
    master: str | None = None
    """any Spark master; not set: local, with the slots that the trigger needs"""
    kafka: dict[str, str] = {}
    """further Kafka client settings by their Kafka names, such as `security.protocol`"""
    conf: dict[str, str] = {}
    """further Spark settings"""
