"""From statistics to Prometheus families, read back by prometheus_client's own parser."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.observe.lag import LoopLag
from mapping.outcomes import Outcome
from telemetry.metrics import LABEL_VALUES, Metrics
from telemetry.statistics import Histogram, counter, gauge, histogram, structs_by


class Inner(msgspec.Struct, frozen=True):
    subscribers: Annotated[int, gauge("subscribers")]
    offered_total: Annotated[int, counter("offered")]


class Statistics(msgspec.Struct, frozen=True):
    records: Annotated[int, counter("records that were handed out")]
    open: Annotated[bool, gauge("open")]
    waited_ms_total: Annotated[float, counter("waited")]
    age_s: Annotated[float, gauge("age")]
    lag: Annotated[dict[str, int], gauge("lag", "topic")]
    positions: Annotated[dict[str, dict[int, int]], gauge("positions", "topic", "partition")]
    catch_up: Inner
    tables: Annotated[dict[str, Inner], structs_by("table")]
    name: str = "text is left out"
    nothing: Annotated[int | None, gauge("nothing")] = None


class One(msgspec.Struct, frozen=True):
    open: Annotated[int, gauge("open")]


class Both(msgspec.Struct, frozen=True):
    connections: Annotated[int, gauge("now")]
    connections_total: Annotated[int, counter("ever")]


class ByTopic(msgspec.Struct, frozen=True):
    records_total: Annotated[dict[str, int], counter("records", "topic")]
    outcomes: Annotated[dict[Outcome, int], counter("outcomes", "outcome")]


class Took(msgspec.Struct, frozen=True):
    batch_s: Annotated[Histogram, histogram("batches")]


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def types(metrics: Metrics) -> dict[str, str]:
    return {family.name: family.type for family in text_string_to_metric_families(metrics.render().decode())}


def test_a_struct_becomes_families() -> None:
    metrics = Metrics()
    value = Statistics(7, True, 1500.0, 2.5, {"sensors": 3}, {"sensors": {0: 5, 1: 6}}, Inner(2, 9), {"t": Inner(3, 8)})
    metrics.add_source("live_reader", lambda: value)
    found = samples(metrics)
    assert found["trivium_live_reader_records_total", ()] == 7
    assert found["trivium_live_reader_open", ()] == 1
    assert found["trivium_live_reader_waited_seconds_total", ()] == 1.5
    assert found["trivium_live_reader_age_seconds", ()] == 2.5
    assert found["trivium_live_reader_lag", (("topic", "sensors"),)] == 3
    assert found["trivium_live_reader_positions", (("partition", "1"), ("topic", "sensors"))] == 6
    assert found["trivium_live_reader_catch_up_subscribers", ()] == 2
    assert found["trivium_live_reader_catch_up_offered_total", ()] == 9
    assert found["trivium_live_reader_tables_offered_total", (("table", "t"),)] == 8
    assert b"# HELP trivium_live_reader_records_total Records that were handed out.\n" in metrics.render()
    assert not [name for name, _ in found if "nothing" in name or name == "trivium_live_reader_name"]
    kinds = types(metrics)
    assert kinds["trivium_live_reader_records"] == "counter"
    assert kinds["trivium_live_reader_lag"] == "gauge"


def test_sources_of_one_name_are_one_family() -> None:
    metrics = Metrics()
    for protocol, count in (("mqtt", 1), ("amqp", 2)):
        metrics.add_source("connections", lambda count=count: One(count), labels={"protocol": protocol})
    metrics.add_source("connections", lambda: One(3))
    found = samples(metrics)
    assert found["trivium_connections_open", (("protocol", "mqtt"),)] == 1
    assert found["trivium_connections_open", (("protocol", "amqp"),)] == 2
    assert found["trivium_connections_open", (("protocol", ""),)] == 3
    assert metrics.render().count(b"# TYPE trivium_connections_open ") == 1


def test_a_gauge_and_its_counter_stand_side_by_side() -> None:
    metrics = Metrics()
    metrics.add_source("http", lambda: Both(2, 9))
    found = samples(metrics)
    assert found["trivium_http_connections", ()] == 2
    assert found["trivium_http_connections_total", ()] == 9


def test_labels_of_a_mapping_are_named_and_bounded() -> None:
    metrics = Metrics()
    records = {f"topic-{number:04}": 1 for number in range(1000)}
    metrics.add_source("publisher", lambda: ByTopic(records, {Outcome.STORED: 4}))
    found = samples(metrics)
    assert found["trivium_publisher_outcomes_total", (("outcome", "stored"),)] == 4
    series = {labels: value for (name, labels), value in found.items() if name == "trivium_publisher_records_total"}
    assert len(series) == LABEL_VALUES
    assert sum(series.values()) == 1000
    assert series[("topic", "other"),] == 1000 - LABEL_VALUES + 1


def test_a_histogram() -> None:
    metrics = Metrics()
    took = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        took.observe(value)
    took.observe(0.2, times=10)
    metrics.add_source("publisher", lambda: Took(took))
    found = samples(metrics)
    buckets = {labels[0][1]: value for (name, labels), value in found.items() if name.endswith("_bucket")}
    assert buckets == {"0.1": 2, "1.0": 13, "+Inf": 14}
    assert found["trivium_publisher_batch_seconds_count", ()] == 14
    assert found["trivium_publisher_batch_seconds_sum", ()] == pytest.approx(9.65)
    with pytest.raises(ValueError, match="ascend"):
        Histogram((1.0, 0.5))


def test_one_broken_source_harms_no_other() -> None:
    metrics = Metrics()

    def broken() -> Any:
        raise KeyError("x")

    metrics.add_source("broken", broken)
    metrics.add_source("absent", lambda: None)
    metrics.add_source("fine", lambda: One(1))
    samples(metrics)
    found = samples(metrics)
    assert found["trivium_fine_open", ()] == 1
    assert found["trivium_scrape_failures_total", (("source", "broken"),)] == 2


def test_the_process_is_there_and_registries_are_apart() -> None:
    found = samples(Metrics())
    for name in ("process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"):
        assert found[name, ()] > 0
    samples(Metrics())


async def test_event_loop_lag() -> None:
    loop = asyncio.get_running_loop()
    lag = LoopLag(loop)
    lag.start()
    metrics = Metrics()
    metrics.add_source("event_loop", lag.statistics)
    blocked_until = loop.time() + 0.3
    while loop.time() < blocked_until:
        pass
    async with asyncio.timeout(60):
        while lag.statistics().worst_lag_s < 0.05:  # noqa: ASYNC110 - the timer says when
            await asyncio.sleep(0.005)
    assert samples(metrics)["trivium_event_loop_worst_lag_seconds", ()] >= 0.05
    before = samples(metrics)["trivium_event_loop_tasks", ()]
    asleep = asyncio.create_task(asyncio.Event().wait())
    assert samples(metrics)["trivium_event_loop_tasks", ()] == before + 1
    asleep.cancel()
    lag.stop()
    lag.stop()


async def test_a_turn_that_takes_long_is_counted_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    loop = asyncio.get_running_loop()
    lag = LoopLag(loop)
    lag.start()
    try:
        take_processor(0.5)
        async with asyncio.timeout(60):
            while not lag.statistics().longest_turn_s:  # noqa: ASYNC110 - the timer says when
                await asyncio.sleep(0.005)
        told = capsys.readouterr().out
        assert "slow turn of the event loop" in told
        assert "take_processor" in told
        metrics = Metrics()
        metrics.add_source("event_loop", lag.statistics)
        found = samples(metrics)
        assert found["trivium_event_loop_slow_turn_seconds_count", ()] == 1
        assert found["trivium_event_loop_longest_turn_seconds", ()] >= 0.3
    finally:
        lag.stop()


def take_processor(seconds: float) -> None:
    """Busy in our own code, which the watchdog samples; reading the clock is kernel code, so it is done rarely."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(100_000))
