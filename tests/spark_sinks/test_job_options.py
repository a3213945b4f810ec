"""Options, command line and progress of jobs. No Spark is started."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

from spark_sinks import jobs
from spark_sinks.run import runner
from spark_sinks.run.job import duration, known_jobs
from spark_sinks.spark.progress import Totals, progress_of
from spark_sinks.spark.session import driver_settings, session, workers_python

REPORT: dict[str, Any] = {
    "id": "d", "runId": "r", "name": "max-temperature", "batchId": 4, "numInputRows": 7,
    "processedRowsPerSecond": 12.3456, "durationMs": {"triggerExecution": 567},
    "eventTime": {"watermark": "2023-11-14T22:13:20.123Z"},
    "stateOperators": [{"numRowsTotal": 45, "numRowsDroppedByWatermark": 5}],
    "sources": [{
        "startOffset": {"sensors": {"0": 1, "1": 2}}, "endOffset": {"sensors": {"0": 3, "1": 7}},
        "latestOffset": {"sensors": {"0": 3, "1": 17}},
    }],
}  # fmt: skip


def test_progress_of_a_windowed_batch() -> None:
    progress = progress_of(REPORT)
    assert (progress.query, progress.batch, progress.rows, progress.rows_per_second) == ("max-temperature", 4, 7, 12.3)
    assert (progress.duration_ms, progress.late_rows, progress.state_rows) == (567, 5, 45)
    assert progress.watermark_ms == 1_700_000_000_123
    assert progress.lag == 10
    assert progress.end == {"sensors": {"0": 3, "1": 7}}


def test_progress_of_a_first_stateless_batch() -> None:
    report = {**REPORT, "eventTime": {}, "stateOperators": [], "sources": [{"startOffset": None, "endOffset": None}]}
    progress = progress_of(report)
    assert (progress.watermark_ms, progress.start, progress.end, progress.lag, progress.late_rows) == (None,) * 3 + (
        0,
        0,
    )


def test_totals_add_up() -> None:
    totals = Totals()
    totals.add(progress_of(REPORT))
    totals.add(progress_of(REPORT))
    assert totals == Totals(batches=2, rows=14, late_rows=10, end={"sensors": {"0": 3, "1": 7}})


@pytest.mark.parametrize(("text", "ms"), [("500ms", 500), ("5s", 5_000), ("10 m", 600_000), ("1h", 3_600_000)])
def test_duration(text: str, ms: int) -> None:
    assert duration(text) == ms


@pytest.mark.parametrize("text", ["", "5", "0s", "-1s", "5 seconds", "1.5s"])
def test_not_a_duration(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="a duration such as"):
        duration(text)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--slide=6s", "slide must not be longer than window"),
        ("--target=sensors", "must be three different topics"),
        ("--source=__consumer_offsets", "not a topic name"),
        ("--kafka=acks", "NAME=VALUE"),
        ("--trigger=continuous", "invalid choice"),
        ("--emit=final --trigger=real-time", "real time has no final results"),
    ],
)
def test_wrong_option_is_named_before_anything_starts(
    option: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        runner.main(["max-temperature", "--bootstrap-servers=127.0.0.1:1", "--checkpoint=unused", *option.split()])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


ECHO = """
import argparse
from spark_sinks.run.job import JobKind, JobOptions

class Options(JobOptions, frozen=True, kw_only=True):
    said: str

    @property
    def topics(self):
        return (self.said,)

def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--said", required=True, help="topic of what is said")

JOB = JobKind("echo", "says it again", Options, add_arguments, lambda spark, options: None)
"""


def test_a_new_job_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "echo.py").write_text(ECHO)
    monkeypatch.setattr(jobs, "__path__", [*jobs.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "spark_sinks.jobs.echo", raising=False)
    assert known_jobs().keys() == {"echo", "max-temperature"}
    for told, code, shown in (
        (["--help"], 0, "says it again"),
        (["echo", "--help"], 0, "topic of what is said"),
        (
            ["echo", "--bootstrap-servers=127.0.0.1:1", "--checkpoint=unused", "--said=a b"],
            2,
            "not a topic name: 'a b'",
        ),
    ):
        with pytest.raises(SystemExit) as ended:
            runner.main(told)
        assert ended.value.code == code
        written = capsys.readouterr()
        assert shown in written.out + written.err


def test_a_missing_jar_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such jar: .*connector\.jar"):
        session("unused", master="local[1]", jars=[tmp_path / "connector.jar"])


def test_the_driver_gets_the_jars_and_keeps_the_users_settings() -> None:
    jars = [Path("/a.jar"), Path("/b.jar")]
    told = {"spark.driver.extraClassPath": "/own.jar", "spark.driver.extraJavaOptions": "-Dx=1", "spark.jars": "/c.jar"}
    local = driver_settings("local[2]", jars, ("", "-Xshare:auto"), told)
    assert local["spark.driver.extraClassPath"] == "/a.jar:/b.jar:/own.jar"
    assert local["spark.driver.extraJavaOptions"] == "-Xshare:auto -Dx=1"
    assert local["spark.jars"] == "/c.jar"
    cluster = driver_settings("spark://host:7077", jars, ("",), told)
    assert cluster == {**told, "spark.jars": "/a.jar,/b.jar,/c.jar"}


@pytest.mark.parametrize(
    ("master", "given", "python"),
    [
        ("local[2]", {}, sys.executable),
        ("local[2]", {"PYSPARK_PYTHON": "/elsewhere/python3"}, sys.executable),  # another version would fail
        ("spark://host:7077", {"PYSPARK_PYTHON": "/opt/python3"}, "/opt/python3"),  # the path on the cluster
        ("spark://host:7077", {}, sys.executable),
    ],
)
def test_the_workers_use_the_same_python(master: str, given: dict[str, str], python: str) -> None:
    assert workers_python(master, given) == python


@pytest.mark.parametrize(
    ("trigger", "rows", "in_heap"),
    [
        ("micro-batch", None, False),
        ("micro-batch", 999_999, True),
        ("micro-batch", 1_000_000, False),
        ("real-time", 10, False),
    ],
)
def test_state_that_fits_is_in_the_heap(trigger: str, rows: int | None, *, in_heap: bool) -> None:
    assert runner.heap_holds_state(trigger, rows) == in_heap


def test_a_job_file_is_checked_before_anything_starts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('job = "archives"')
    assert runner.main([str(wrong)]) == 2
    assert "unknown kind 'archives' (did you mean archive?)" in capfd.readouterr().err
    example = Path(__file__).parents[2] / "examples" / "spark" / "sessionize.toml"
    for option, said in (
        ("--trigger=real-time", "real time does not support session windows"),
        ("--interval=1", "a duration"),
    ):
        with pytest.raises(SystemExit) as ended:
            runner.main([str(example), option])
        assert ended.value.code == 2
        assert said in capfd.readouterr().err
