"""The limit of records per micro-batch, with simulated batch durations and with a slow job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from hypothesis import given
from hypothesis import strategies as st

from spark_sinks.run import declared, flow_execution
from spark_sinks.run.declared import DeclaredOptions
from spark_sinks.run.job_file import read
from spark_sinks.spark.batch_size import LEAST, TOO_LONG, WORTH, BatchSize

SLOW = """
from pyspark.sql import functions as F
from spark_sinks.spec.jobs import Transform
from spark_sinks.spec.parts import ResultSink, Run, Source

JOB = Transform(
    name="slow",
    source=Source(topics=("SOURCE",), decode="none", dead_letters="DEAD"),
    sink=ResultSink(kafka="TARGET"),
    run=Run(checkpoint="unused", max_offsets_per_trigger=1000),
)

def transform(readings):
    a_millisecond = F.reflect(F.lit("java.lang.Thread"), F.lit("sleep"), F.lit(1).cast("bigint"))
    return readings.select("key", F.concat("key", a_millisecond).alias("value"))
"""


def run(size: BatchSize, batches: int, rate: float, each_s: float = 0.0) -> list[int]:
    """Return the batch sizes with a backlog, if a batch takes `each_s` plus its records divided by `rate`."""
    sizes = []
    for _ in range(batches):
        sizes.append(size.now)
        size.finished(size.now, each_s + size.now / rate)
    return sizes


def test_a_slow_job_gets_smaller_batches_and_larger_ones_when_it_is_fast_again() -> None:
    size = BatchSize(100_000, 10)
    assert run(size, 4, 1_000) == [100_000, 100_000, 10_000, 10_000]
    assert run(size, 5, 50_000) == [10_000, 10_000, 40_000, 40_000, 100_000]
    assert run(size, 5, 50_000) == [100_000] * 5


def test_one_slow_batch_or_one_without_backlog_changes_nothing() -> None:
    size = BatchSize(1_000, 10)
    told = [size.finished(rows, seconds) for rows, seconds in [(1_000, 60), (1_000, 9), (1_000, 60), (20, 300)] * 3]
    assert not any(told)
    assert size.now == 1_000


def test_a_batch_started_with_a_larger_size_does_not_count() -> None:
    size = BatchSize(100_000, 10)
    run(size, 2, 1_000)
    assert not any(size.finished(100_000, 100) for _ in range(5))
    assert size.now == 10_000


def test_batches_with_a_large_fixed_cost_stay_large() -> None:
    size = BatchSize(100_000, 10)
    assert set(run(size, 40, 100_000, each_s=30)[-30:]) == {100_000}


@given(most=st.integers(1, 1_000_000), wanted=st.floats(1, 100), rate=st.floats(1, 1e6), each=st.floats(0, 100))
def test_it_settles_where_batches_are_short_enough_or_would_cost_too_much(
    most: int, wanted: float, rate: float, each: float
) -> None:
    size = BatchSize(most, wanted)
    sizes = run(size, 60, rate, each)
    assert all(min(LEAST, most) <= one <= most for one in sizes)
    settled = set(sizes[-20:])
    assert len(settled) == 1
    [found] = settled
    seconds = each + found / rate
    if seconds > TOO_LONG * wanted * 1.01 and found > LEAST:
        smaller = max(LEAST, int(found / seconds * wanted))
        assert smaller / (each + smaller / rate) < WORTH * 1.01 * found / seconds


@given(st.lists(st.tuples(st.integers(0, 200_000), st.floats(0, 1_000)), max_size=50))
def test_the_size_stays_within_its_bounds(batches: list[tuple[int, float]]) -> None:
    size = BatchSize(100_000, 10)
    for rows, seconds in batches:
        before = size.now
        assert size.finished(rows, seconds) == (size.now != before)
        assert LEAST <= size.now <= 100_000


@pytest.mark.parametrize("most", [1, 50, LEAST])
def test_a_low_limit_of_records_is_kept(most: int) -> None:
    assert set(run(BatchSize(most, 10), 10, 0.01)) == {most}


async def test_the_batches_of_a_slow_job_with_a_backlog_become_smaller_and_lose_nothing(
    *, run_job: Any, producer: AIOKafkaProducer, new_topic: Any, read_until: Any, bootstrap: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(flow_execution, "SHORTEST_S", 0.3)  # the real value is too long for a test
    source, target = await new_topic(partitions=1), await new_topic(partitions=1)
    keys = {b"k%d" % number for number in range(4_000)}
    for key in keys:
        await producer.send(source, b"", key)
    await producer.flush()
    path = tmp_path / "slow.py"
    path.write_text(SLOW.replace("SOURCE", source).replace("TARGET", target).replace("DEAD", "unused"))
    file = read(path)
    job = await run_job(
        DeclaredOptions(file=file, bootstrap_servers=bootstrap, checkpoint=str(tmp_path), max_offsets_per_trigger=1_000)
    )
    await job.wait_for(lambda done: sum(one.rows for one in done) == len(keys), 300)
    await job.stop()
    sizes = [one.rows for one in job.progress if one.rows]
    assert sizes[:2] == [1_000, 1_000]
    assert any(size < 500 for size in sizes[2:4]), sizes
    results = await read_until(target, lambda records: len({one.key for one in records}) == len(keys), 180)
    assert {one.key for one in results} == keys


async def test_batches_of_a_table_are_bounded_by_bytes_from_the_first_one(
    *, run_once: Any, declare: Any, new_topic: Any, producer: AIOKafkaProducer, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(declared, "BATCH_BYTES", 1_000_000)
    source = await new_topic(partitions=1)
    for _ in range(60):
        await producer.send(source, b"x" * 50_000)
    await producer.flush()
    options = declare(
        f'job = "archive"\nsource = {{ topics = ["{source}"], decode = "none" }}\n'
        f'sink = {{ archive = "{tmp_path}/lake", format = "delta" }}\nrun = {{ checkpoint = "CHECKPOINT" }}\n'
    )
    batches = await run_once(options)
    assert [one.rows for one in batches if one.rows] == [19, 19, 19, 3]
