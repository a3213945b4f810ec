"""A job's metrics, and how they are read. No Spark is started."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import termios

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from spark_sinks.run.metrics import JobMetrics, lag
from spark_sinks.run.output import Screen
from spark_sinks.run.status import NoFigures, read
from spark_sinks.spark.progress import Examined, Progress, Totals
from spark_sinks.spec.values import Listen
from telemetry.job_figures import Figures, figures
from tests.gateway.observe.test_declared_metrics import documented

RUN = "0d9f7c1e-run"
BATCH = Progress(
    query="hall", trigger="micro-batch", run=RUN, batch=7, rows=60, rows_per_second=900.0, duration_ms=250,
    late_rows=2, state_rows=40, state_bytes=4_096, watermark_ms=1_700_000_000_000, start=None,
    end={"sensors": {"0": 30, "1": 30}}, lag=0,
)  # fmt: skip
ENDS = {"sensors": {"0": 35, "1": 30, "2": 4}}


class Clock:
    now = 1_700_000_010.0

    def __call__(self) -> float:
        return self.now


def told(metrics: JobMetrics) -> Figures:
    [found] = figures(metrics.render().decode())
    return found


def test_metrics_are_labelled_by_query_and_never_by_run_id() -> None:
    metrics = JobMetrics("maxima", restarts=3)
    metrics.reads("micro-batch", {}, ENDS, counts_rejects=True)
    first = told(metrics)
    assert (first.rows, first.lag, first.batch, first.last_batch, first.dead_letters) == (0, None, None, None, 0)
    assert BATCH.end is not None
    metrics.finished(BATCH)
    metrics.finished(msgspec.structs.replace(BATCH, batch=8))
    metrics.reads("real-time", BATCH.end, ENDS, counts_rejects=True)
    metrics.examined(Examined(query="hall", batch=8, rows=120, malformed=1, late=4, duration_ms=5))
    now = told(metrics)
    assert (now.job, now.query, now.trigger, now.restarts) == ("maxima", "maxima", "real-time", 3)
    assert (now.rows, now.lag, now.batch, now.batch_s, now.late, now.malformed) == (120, 9, 8, 0.25, 4, 1)
    assert (now.dead_letters, now.state_rows, now.state_bytes) == (5, 40, 4_096)
    text = metrics.render().decode()
    assert RUN not in text
    assert 'trivium_spark_lag{job="maxima",partition="2",query="maxima",topic="sensors"} 4.0' in text
    assert 'trivium_spark_position{job="maxima",partition="0",query="maxima",topic="sensors"} 30.0' in text
    assert "trivium_spark_late_rows_total" in text
    page = {name for name in documented() if name.startswith("trivium_spark_")}
    named = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    assert {name for name in named if name.startswith("trivium_")} - {"trivium_scrape_failures_total"} == page


def test_a_rate_covers_the_last_minute_or_a_longer_batch() -> None:
    clock = Clock()
    query = JobMetrics("hall", clock=clock)
    query.reads("micro-batch", {}, {}, counts_rejects=False)
    clock.now += 30
    query.finished(BATCH)
    assert query.statistics().rows_per_second == pytest.approx(60 / 30)
    clock.now += 59
    assert query.statistics().rows_per_second == pytest.approx(60 / 60)
    clock.now += 2
    assert query.statistics().rows_per_second == 0
    query.finished(msgspec.structs.replace(BATCH, rows=3_000, duration_ms=300_000))  # a real-time batch
    assert query.statistics().rows_per_second == pytest.approx(3_060 / 300)
    assert query.statistics().watermark_lag_ms == 101_000


def test_dead_letters_are_reported_only_by_queries_that_count_them() -> None:
    metrics = JobMetrics("archive")
    metrics.reads("micro-batch", {}, {}, counts_rejects=False)
    assert told(metrics).dead_letters is None
    metrics = JobMetrics("alarms")
    metrics.finished(msgspec.structs.replace(BATCH, dead_letters=2))
    metrics.finished(msgspec.structs.replace(BATCH, dead_letters=3))
    assert (told(metrics).dead_letters, told(metrics).late) == (5, 0)


def test_lag_is_unknown_before_the_position_is() -> None:
    assert lag({}, ENDS) == {}
    assert lag({"sensors": {"0": 40}}, ENDS) == {"sensors": {"0": 0, "1": 30, "2": 4}}


def test_only_the_metrics_are_served() -> None:
    metrics = JobMetrics("hall")
    metrics.finished(BATCH)
    with metrics.serve(Listen("127.0.0.1:0")) as address:
        [found] = read(address)
        assert (found.job, found.rows) == ("hall", 60)
        with pytest.raises(OSError, match="in use"), JobMetrics("other").serve(address):
            pass
    with pytest.raises(NoFigures, match="refused"):
        read(address)


def test_an_unreachable_job_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(NoFigures, match=address):
            read(address, answer_s=0.05)


@pytest.mark.parametrize("text", ["trivium_spark_lag Inf", "trivium_spark_batch NaN", "trivium_spark_lag", "{"])
def test_a_value_that_is_no_number_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the parser's own, mostly without words
        figures(text)


@given(st.text() | st.text(alphabet='trivium_spark_lag{job="a"} 1\n#TYPE\\,', max_size=60))
def test_invalid_metrics_are_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(figures(f"trivium_spark_lag {text}"), tuple)


@pytest.mark.parametrize("text", ["", "9101", "host:", "host:65536", "a b:1", "::1:9101", "http://host:1"])
def test_not_an_address(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        Listen.parse(text)


def test_addresses_of_ipv6_have_brackets() -> None:
    assert (Listen.parse("[::1]:9101").host, Listen.of("::1", 5)) == ("::1", "[::1]:5")


def test_on_a_terminal_the_metrics_are_a_table_with_lines_for_people_above_it() -> None:
    metrics = JobMetrics("hall")
    metrics.finished(BATCH)
    main, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (40, 120))
    screen = Screen("hall", metrics, terminal)
    screen.say("waiting for topic sensors")
    screen.ready("micro-batch")
    screen.summary({"hall": Totals(batches=2, rows=12_345)})
    screen.close()
    screen.close()
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # Linux raises OSError at the end
        while part := os.read(main, 65_536):
            shown += part
    os.close(main)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for line in ("waiting for topic sensors", "hall reads (micro-batch).", "hall: 12,345 records in 2 batches."):
        assert line in lines
    assert "job trigger rows/s lag batch s late dead letters state rows last batch" in lines
    assert any(re.fullmatch(r"hall - [\d,]+ - 0\.2 - - 40 \d+ s ago", line) for line in lines), lines
