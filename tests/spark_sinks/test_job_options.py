"""Options, command line and progress of the jobs; no Spark is started."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from spark_sinks import jobs
from spark_sinks.progress import Totals, progress_of
from spark_sinks.session import session

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
    assert jobs.duration(text) == ms


@pytest.mark.parametrize("text", ["", "5", "0s", "-1s", "5 seconds", "1.5s"])
def test_not_a_duration(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="a duration such as"):
        jobs.duration(text)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--slide=6s", "slide must not be longer than window"),
        ("--target=sensors", "must be three topics"),
        ("--source=__consumer_offsets", "not a topic name"),
        ("--kafka=acks", "NAME=VALUE"),
        ("--trigger=continuous", "invalid choice"),
    ],
)
def test_wrong_option_is_named_before_anything_starts(
    option: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        jobs.main(["max-temperature", "--bootstrap-servers=127.0.0.1:1", "--checkpoint=unused", option])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_jar_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such jar: .*connector\.jar"):
        session("unused", master="local[1]", jars=[tmp_path / "connector.jar"])
