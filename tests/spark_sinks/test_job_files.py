"""Job files: which are valid, and the message for each error. No Spark is started."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from gateway.process.cli import app
from spark_sinks.archive.delta import DeltaArchive
from spark_sinks.run.job import known_jobs
from spark_sinks.run.job_file import SUFFIXES, JobFileError, made, read
from spark_sinks.spec.jobs import KINDS, NAMED
from spark_sinks.spec.values import AGGREGATES, Aggregate, Duration, Term
from tests.support.table_batches import append

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "spark"

STATS = """
job = "window-stats"
by = ["key"]
source = { topics = ["sensors"], columns = { temperature = "double", door = "boolean" }, dead_letters = "dlq" }
window = { length = "5s", slide = "1s" }
aggregates = { maximum = "max(temperature)" }
sink = { kafka = "maximum" }
run = { checkpoint = "unused" }
"""
SESSIONS = """
job = "sessionize"
source = { topics = ["sensors"], decode = "none", dead_letters = "dlq" }
session = { gap = "30s" }
sink = { kafka = "sessions", emit = "final" }
run = { checkpoint = "unused" }
"""
ARCHIVE = """
job = "archive"
source = { topics = ["sensors"], decode = "none" }
sink = { archive = "lake" }
run = { checkpoint = "unused" }
"""
ENRICH = """
job = "enrich"
source = { topics = ["sensors"], columns = { temperature = "double" }, dead_letters = "dlq" }
registry = { topic = "devices", columns = { room = "string" } }
sink = { kafka = "enriched" }
run = { checkpoint = "unused" }
"""
ANOMALIES = """
job = "anomalies"
source = { topics = ["sensors"], columns = { temperature = "double", door = "boolean" }, dead_letters = "dlq" }
thresholds = { temperature = { above = 30 } }
sink = { kafka = "alarms" }
run = { checkpoint = "unused" }
"""
REPLAY = """
job = "replay"
name = "again"
source = { topics = ["sensors"], since = 2026-11-23T06:00:00Z, until = 2026-11-23T06:30:00Z }
sink = { kafka = "sensors-again" }
run = { rate = 10, kafka = { "security.protocol" = "PLAINTEXT" } }
"""
LETTERS = """
job = "dlq-replay"
name = "letters"
source = { topics = ["dlq"] }
"""
BACKFILL = """
job = "backfill"
name = "past"
source = { archive = "lake", until = 2026-11-23 }
sink = { kafka = "past" }
"""
AUDIT = """
job = "bridge-audit"
name = "audit"
source = { topics = ["sensors"], gateways = ["http://127.0.0.1:8081"] }
sink = { kafka = "audit" }
"""
SENML = STATS.replace(
    'columns = { temperature = "double", door = "boolean" }',
    'decode = "senml", columns = { name = { type = "string", field = "n" }, temperature = { field = "v" } }',
).replace('["key"]', '["name"]')
MEANS = ANOMALIES.replace("above = 30", "deviations = 3")
PYTHON = """
from pyspark.sql import functions as F
from spark_sinks.spec.jobs import Transform
from spark_sinks.spec.parts import Column, ResultSink, Run, Source

JOB = Transform(
    source=Source(topics=("sensors",), columns={"temperature": Column()}, dead_letters="dlq"),
    sink=ResultSink(kafka="mine"),
    run=Run(checkpoint="unused", trigger="micro-batch"),
)

def transform(readings):
    return readings.select("key", "value")
"""


FILES = sorted(path for path in EXAMPLES.iterdir() if path.suffix in SUFFIXES)


@pytest.mark.parametrize("example", FILES, ids=lambda path: path.name)
def test_every_example_is_good(example: Path) -> None:
    assert read(example).spec.topics


def test_there_is_an_example_of_every_kind() -> None:
    there = {read(path).spec.job for path in FILES}
    assert there == KINDS.keys()
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in FILES if f"(spark/{path.name})" not in page] == []


@pytest.mark.parametrize(
    ("good", "old", "new", "said"),
    [
        (STATS, "max(temperature)", "max(humidity)", "aggregates.maximum: no column humidity; source.columns"),
        (STATS, "max(temperature)", "maximum(temperature)", "aggregates.maximum: expected a function such as"),
        (STATS, "max(temperature)", "mean(door)", "aggregates.maximum: mean needs a number, but door is a boolean"),
        (STATS, "max(temperature)", "max(*)", "max needs a column, such as max(temperature), not 'max(*)'"),
        (STATS, "max(temperature)", "percentile(temperature)", "needs a rank between 0 and 1"),
        (STATS, "maximum =", "start =", "aggregates.start: a result already has a field of this name"),
        (STATS, "maximum =", "Key =", "every record already has a column of this name"),
        (STATS, '"1s"', '"6s"', "window: slide (6s) is longer than length (5s): readings between"),
        (STATS, '"1s"', '"1.5 s"', "window.slide: expected a duration such as 500ms, 5s, 10m or 1h, not '1.5 s'"),
        (STATS, '"5s"', '"0s"', "window.length: expected a duration"),
        (STATS, "slide", "slid", "window.slid: unknown key (did you mean slide?); known are length, slide"),
        (STATS, "{ kafka =", "{ redis =", "sink.redis: unknown key; known are kafka, emit"),
        (STATS, "window = {", "windows = {", "windows: unknown key (did you mean window?); known are"),
        (STATS, 'length = "5s", ', "", "window.length: is required"),
        (STATS, '"key"', '"level"', "by: no column level; source.columns has temperature, door"),
        (STATS, '"key"', '"level[0]"', "expected a column, key, topic, content_type, level[1] or header[NAME]"),
        (STATS, '"key"', '"value"', "by: no column value"),
        (STATS, '"key"', '"header[a-b]", "header[a_b]"', "by: two terms have the same name in the results"),
        (STATS, '"double"', '"float"', "source.columns.temperature.type: Input should be 'double', 'long'"),
        (STATS, "temperature =", "time =", "every record already has a column of this name"),
        (STATS, "door =", "Temperature =", "columns: two names differ only in case"),
        (STATS, '["sensors"]', '["__consumer_offsets"]', "source.topics[1]: expected the name of a Kafka topic"),
        (STATS, '["sensors"]', '["maximum"]', "sink.kafka: maximum is a source of this job"),
        (STATS, ', dead_letters = "dlq"', "", "source.dead_letters: set a topic for records that cannot be decoded"),
        (STATS, '"dlq"', '"sensors"', "source.dead_letters: sensors is a source or a sink of this job"),
        (STATS, "temperature =", 'at = { field = "at" }, temperature =', None),
        (
            STATS, "temperature =", 'at = { field = "at" }, lat = { field = "at.lat" }, temperature =',
            "source: columns: at cannot be a value and an object with at.lat in it",
        ),
        (STATS, "columns =", 'decode = "csv", columns =', "fields: required for csv"),
        (STATS, "columns =", 'decode = "number", columns =', 'decode = "number" gives one column and no time'),
        (STATS, '"window-stats"', '"window-stat"', "unknown kind 'window-stat' (did you mean window-stats?)"),
        (STATS, 'job = "window-stats"', "", "job: names the kind of job"),
        (STATS, '"window-stats"', '"transform"', "job: a transform needs a Python file"),
        (STATS, "= {", "= {{", "not valid TOML"),
        (STATS, "columns =", 'decode = "avro", columns =', "schema_file: required for avro and protobuf"),
        (STATS, "columns =", 'schema_file = "x", columns =', "schema_file: required for avro and protobuf"),
        (STATS, "columns =", 'message = "x", columns =', "source: message: required for protobuf"),
        (STATS, "columns =", "schema_id = 7, columns =", "schema_id: needs framing"),
        (STATS, "columns =", 'framing = "confluent", schema_id = 7, columns =', None),
        (STATS, "columns =", 'decode = "cbor", columns =', None),
        (STATS, "columns =", 'decode = "cbor", framing = "confluent", columns =', "header is supported for json, avro"),
        (
            STATS, "columns =", 'decode = "avro", schema_file = "no.avsc", columns =',
            "source.schema_file: no.avsc: No such file or directory",
        ),
        (
            STATS, "columns =", f'decode = "avro", schema_file = "{__file__}", columns =',
            f"source.schema_file: {__file__}: not JSON",
        ),
        (
            STATS, "columns =",
            f'decode = "protobuf", message = "a.B", schema_file = "{EXAMPLES}/reading.avsc", columns =',
            "source.schema_file: no complete messages",
        ),
        (STATS, "columns =", 'decode = "senml", columns =', "columns.temperature: SenML has no field temperature,"),
        (SENML, 'field = "v"', 'field = "vb"', "columns.temperature: vb is a boolean in SenML, not a double"),
        (SENML, '"senml"', '"senml", time = "t"', "time: each record of a SenML pack has its own"),
        (SENML, 'field = "n"', 'field = "n", optional = true', "by: name is optional, but a SenML pack is accepted"),
        (SENML, '"unused"', '"unused", trigger = "real-time"', "source.decode: senml is decoded in Python, which"),
        (ARCHIVE, '"none"', '"senml", columns = { v = {} }', "an archive has one row per record, but"),
        (STATS, '"unused"', '"unused", trigger = "real-time"', None),
        (STATS, '"unused"', '"unused", trigger = "continuous"', "run.trigger: Input should be 'micro-batch' or"),
        (STATS, '"unused"', '"unused", trigger = "real-time", interval = "1s"', "is too short for real time"),
        (
            STATS.replace('kafka = "maximum"', 'kafka = "maximum", emit = "final"'), '"unused"',
            '"unused", trigger = "real-time"', "sink.emit: real time has no final results",
        ),
        (
            STATS.replace("max(temperature)", "percentile(temperature, 0.5)"), '"unused"',
            '"unused", trigger = "real-time"', "aggregates.maximum: percentile needs run.trigger",
        ),
        (SESSIONS, '"final"', '"updates"', "sink.emit: a session has a result only when it has ended"),
        (SESSIONS, '"unused"', '"unused", trigger = "real-time"', "real time does not support session windows"),
        (SESSIONS, '"none"', '"none", time = "t"', 'decode = "none" reads no value'),
        (ARCHIVE, '"unused"', '"unused", trigger = "real-time"', "run.trigger: real time does not support an archive"),
        (ARCHIVE, '"unused"', '"lake/checkpoint"', "run.checkpoint: must not be inside the archive"),
        (ARCHIVE, '"lake"', '"s3a://bucket/lake"', "s3a cannot rename a directory atomically"),
        (ARCHIVE, "archive =", "kafka =", "sink.archive: is required"),
        (ARCHIVE, '"lake"', '"s3://bucket/lake", format = "delta", options = { AWS_REGION = "eu-1" }', None),
        (ARCHIVE, '"lake"', '"plant.lake", format = "iceberg", catalog = "hall"', None),
        (ARCHIVE, '"lake"', '"lake", format = "iceberg"', "an Iceberg table is named NAMESPACE.TABLE, not 'lake'"),
        (ARCHIVE, "run =", 'maintain = { unused = "59m" }\nrun =', "maintain: unused: 59m could delete files"),
        (ARCHIVE, "run =", 'maintain = { unused = "1h" }\nrun =', None),
        (ARCHIVE, '"lake"', '"lake", format = "hudi"', "sink.format: Input should be 'parquet', 'delta' or 'iceberg'"),
        (ARCHIVE, '"lake"', '"lake", format = "delta", files = 2', None),
        (ARCHIVE, '"lake"', '"lake", format = "delta", segment = 2', "sink: segment: not used by the format delta"),
        (ARCHIVE, '"lake"', '"lake", catalog = "hall"', "sink: catalog: not used by the format parquet"),
        (ARCHIVE, "run =", "maintain = { keep_days = 0 }\nrun =", "maintain.keep_days: Input should be greater than"),
        (ENRICH, "room =", "temperature =", "registry.columns.temperature: source.columns has the same name"),
        (ENRICH, '"devices"', '"sensors"', "registry.topic: sensors is a source or a sink of this job"),
        (ENRICH, 'topic = "devices", ', "", "registry: either a topic or a file is required, not both"),
        (ANOMALIES, "above = 30", "above = 30, below = 40", "below (40) is greater than above (30)"),
        (ANOMALIES, "above = 30", "", "thresholds.temperature: at least one of above, below and deviations"),
        (ANOMALIES, "above = 30", "above = 30, after = 5", "temperature: after: only allowed with deviations"),
        (ANOMALIES, "above = 30", "deviations = 0", "temperature.deviations: Input should be greater than 0"),
        (ANOMALIES, "thresholds", 'forget = "1h"\nthresholds', "forget: only allowed if a threshold has deviations"),
        (MEANS, "deviations = 3", "deviations = 3, above = 30", None),
        (MEANS, '"unused"', '"unused", trigger = "real-time"', "deviations keep state in Python"),
        (MEANS, '"unused"', '"unused", state_rows = 1000', "run.state_rows: the means of devices are always kept on"),
        (ANOMALIES, "temperature = { above", "door = { above", "thresholds: door is a boolean, and only"),
        (REPLAY, 'name = "again"', "", "name: is required"),
        (REPLAY, '"sensors-again"', '"sensors"', "sink.kafka: sensors is a source of this job"),
        (REPLAY, "T06:30", "T05:30", "until (2026-11-23T05:30:00+00:00) is not after since"),
        (REPLAY, "since =", "offsets = { sensors = { 0 = [1, 9] } }, since =", "offsets cannot be combined with since"),
        (REPLAY, "since = 2026-11-23T06:00:00Z, until = 2026-11-23T06:30:00Z", "offsets = { sensors = { 0 = [9, 9] } }",
         "offsets.sensors.0: the range from 9 to 9 is empty"),
        (REPLAY, "rate = 10", "rate = 0", "run.rate: Input should be greater than 0"),
        (REPLAY, '"security.protocol" = "PLAINTEXT"', '"ssl.truststore.location" = "a.jks"',
         "kafka.ssl.truststore.type: this job supports PEM only"),
        (LETTERS, "source =", 'sink = { kafka = "dlq" }\nsource =', "dlq is also the source of the dead letters"),
        (AUDIT, "http://", "", "expected the address of a gateway's management listener"),
        (PYTHON, "def transform", "def transforms", "transform: the job needs a function transform(readings)"),
        (PYTHON, "JOB =", "JOBS =", "JOB: a Python job must set JOB = Transform(...)"),
        (PYTHON, '"mine"', '"sensors"', "sink.kafka: sensors is a source of this job"),
        (PYTHON, "import functions", "import function", "ImportError: cannot import name 'function'"),
        (PYTHON, '"micro-batch"', '"real-time"', None),
        (
            PYTHON.replace("readings.select", 'readings.groupBy(F.session_window("time", "1 minute")).count().select'),
            '"micro-batch"', '"real-time"', "line 13, session_window: real time has no session windows",
        ),
        (
            PYTHON.replace("readings.select", "readings.mapInPandas(None, '').select"),
            '"micro-batch"', '"real-time"', "line 13, mapInPandas: real time has no Python functions",
        ),
    ],
)  # fmt: skip
def test_each_error_is_one_sentence(tmp_path: Path, good: str, old: str, new: str, said: str | None) -> None:
    assert old in good
    path = tmp_path / ("job.py" if good.startswith("\nfrom ") else "job.toml")
    path.write_text(good)
    assert read(path)
    path.write_text(good.replace(old, new))
    if said is None:
        assert read(path)
        return
    with pytest.raises(JobFileError) as wrong:
        read(path)
    assert f"{path}: " in str(wrong.value)
    assert said in str(wrong.value)


def test_overrides_on_the_command_line_are_checked() -> None:
    file = read(EXAMPLES / "sessionize.toml")
    assert file.running_with({"interval": "10s"}).spec.run.interval == "10s"
    with pytest.raises(JobFileError, match="real time does not support session windows"):
        file.running_with({"trigger": "real-time"})
    with pytest.raises(JobFileError, match="percentile needs"):
        read(EXAMPLES / "window_stats.toml").running_with({"trigger": "real-time"})


@pytest.mark.parametrize(("text", "ms"), [("500ms", 500), ("5s", 5_000), ("10 m", 600_000), ("1h", 3_600_000)])
def test_duration(text: str, ms: int) -> None:
    assert Duration.parse(text).ms == ms


def test_terms_and_aggregates_are_parsed() -> None:
    assert [(Term.parse(text).parts, Term.parse(text).name) for text in ("key", "level[2]", "header[x-unit]")] == [
        (("column", "key"), "key"),
        (("level", "2"), "level2"),
        (("header", "x-unit"), "x_unit"),
    ]
    assert Aggregate.parse("percentile( load , 0.95 )").parts == ("percentile", "load", 0.95)
    assert Aggregate.parse("count(*)").parts == ("count", None, None)


TOML_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(sorted(AGGREGATES)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60)
@given(
    kind=st.sampled_from([STATS, SESSIONS, ARCHIVE, ENRICH, ANOMALIES, REPLAY, LETTERS, BACKFILL, AUDIT]),
    data=st.data(),
)
def test_any_file_is_valid_or_its_error_is_reported(kind: str, data: st.DataObject) -> None:
    declared = tomllib.loads(kind)
    part = data.draw(st.sampled_from(sorted(declared)))
    within = declared[part] if isinstance(declared[part], dict) and data.draw(st.booleans()) else declared
    key = data.draw(st.sampled_from(sorted(within)) | st.text(max_size=8))
    within[key] = data.draw(TOML_VALUES)
    try:
        told = [made(Path("job.toml"), declared).path.name]
    except JobFileError as wrong:
        told = str(wrong).splitlines()
    assert told
    assert all(line.startswith("job.toml") for line in told if line)


def test_check_and_list_on_the_command_line(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(STATS.replace("max(temperature)", "max(humidity)"))
    told = CliRunner().invoke(
        app, ["spark", "check", str(EXAMPLES / "archive.toml"), str(wrong), str(tmp_path / "no.toml")]
    )
    assert told.exit_code == 2
    assert f"{EXAMPLES / 'archive.toml'}: valid" in told.output
    assert "note: " not in told.output
    assert f"trivium: {wrong}: aggregates.maximum: no column humidity" in told.output
    assert f"{tmp_path / 'no.toml'}: No such file or directory" in told.output
    listed = CliRunner().invoke(app, ["spark", "list"]).output
    assert all(f"  {kind}" in listed for kind in (*KINDS, *NAMED))
    assert {name: job.summary for name, job in known_jobs().items()} == NAMED


@pytest.mark.parametrize(
    ("good", "package", "said"),
    [
        (SENML, "cbor2", "source.decode: senml needs the package cbor2: pip install 'trivium[spark]'"),
        (MEANS, "pandas", "thresholds: a running mean needs the package pandas: pip install 'trivium[spark]'"),
    ],
)
def test_a_missing_package_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, good: str, package: str, said: str
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(good)
    assert read(path)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(JobFileError) as wrong:
        read(path)
    assert str(wrong.value) == f"{path}: {said}"


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path) -> None:
    path = tmp_path / "lake.toml"
    path.write_text(ARCHIVE.replace('"lake"', '"lake", format = "delta"'))
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'deltalake': raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "from gateway.process.cli import app\n"
        "app()"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, "spark", "check", str(path)], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert told.returncode == 2
    assert "sink.format: delta needs the package deltalake: pip install 'trivium[lake]'" in told.stderr


def test_maintain_on_the_command_line(tmp_path: Path) -> None:
    stats, archive = tmp_path / "stats.toml", tmp_path / "archive.toml"
    stats.write_text(STATS)
    archive.write_text(ARCHIVE.replace('"lake"', f'"{tmp_path}/lake", format = "delta"'))
    told = CliRunner().invoke(app, ["spark", "maintain", str(stats)])
    assert told.exit_code == 2
    assert "job: only archives can be maintained, not window-stats" in told.output
    told = CliRunner().invoke(app, ["spark", "maintain", str(archive)])
    assert told.exit_code == 2
    assert f"{tmp_path}/lake: there is no Delta table" in told.output
    rows = {"date": ["2026-11-20"], "topic": ["sensors"], "offset": [1]}
    append(DeltaArchive(f"{tmp_path}/lake", "ours", {}), pa.table(rows), 0)
    told = CliRunner().invoke(app, ["spark", "maintain", str(archive)])
    assert told.exit_code == 0
    assert "0 files merged into 0 with their 0 rows, 0 rows deleted because of their age, 0 unused files" in told.output


def test_a_toml_file_is_checked_without_pyspark() -> None:
    code = (
        "import sys; sys.modules['pyspark'] = None\n"
        "from pathlib import Path; from spark_sinks.run.job_file import read\n"
        "read(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, str(EXAMPLES / "archive.toml")], check=True, cwd=ROOT)
