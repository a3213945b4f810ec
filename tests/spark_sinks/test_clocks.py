"""Jobs under wrong clocks: no device's clock makes the readings of another one late."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from spark_sinks.run.declared import DeclaredOptions
from spark_sinks.run.job_file import read
from spark_sinks.spec.triggers import MICRO_BATCH, REAL_TIME
from tests.support.topics import read_all

JOB = """
job = "window-stats"
source = { topics = ["SOURCE"], columns = { load = "double" }, time = "at", dead_letters = "DEAD" }
window = { length = "1s" }
sink = { kafka = "TARGET" }
aggregates = { n = "count(*)" }
[run]
checkpoint = "CHECKPOINT"
trigger = "TRIGGER"
conf = { "spark.sql.streaming.realTimeMode.minBatchDuration" = "1s" }
"""
GOOD = [f"good-{number}" for number in range(5)]
ROUNDS = 3


@pytest.mark.parametrize("trigger", [MICRO_BATCH, REAL_TIME])
async def test_a_fast_clock_makes_no_other_reading_late(
    *, run_job: Any, producer: AIOKafkaProducer, new_topic: Any, bootstrap: str, tmp_path: Path,
    trigger: str,
) -> None:  # fmt: skip
    source, target, dead = [await new_topic(partitions=1) for _ in range(3)]
    text = JOB.replace("SOURCE", source).replace("TARGET", target).replace("DEAD", dead).replace("TRIGGER", trigger)
    path = tmp_path / "job.toml"
    path.write_text(text.replace("CHECKPOINT", str(tmp_path / "checkpoint")))
    file = read(path)
    job = await run_job(
        DeclaredOptions(
            file=file, bootstrap_servers=bootstrap, checkpoint=file.streaming.run.checkpoint, trigger=trigger,
            interval_ms=1_000 if trigger == REAL_TIME else None,
        )
    )  # fmt: skip
    sent = 0
    for number in range(ROUNDS):
        now = round(time.time() * 1000)
        fields: dict[str, dict[str, Any]] = {key: {"load": 1, "at": now - number} for key in GOOD}
        fields |= {"fast": {"load": 1, "at": now + 50_000}, "very-fast": {"load": 1, "at": now + 600_000}}
        for key, value in {**fields, "seconds": {"load": 1, "at": now // 1000}, "jms": {"load": 1}}.items():
            headers = [("creation-time", b"%d" % (now + 600_000))] if key == "jms" else []
            await producer.send(source, json.dumps(value).encode(), key.encode(), headers=headers)
            sent += 1
        await producer.flush()
        await job.wait_for(lambda done: sum(one.rows for one in done) == sent, 120)  # noqa: B023 - awaited here
    totals = await job.stop()
    assert (totals.malformed, totals.late_readings, totals.late_rows) == (0, 0, 0)
    assert await read_all(bootstrap, dead) == []
    newest = {}
    for record in await read_all(bootstrap, target):
        value = json.loads(record.value)
        newest[value["key"], value["start"]] = value["n"]
    counted: Counter[str] = Counter()
    for (key, _), count in newest.items():
        counted[key] += count
    assert counted == dict.fromkeys((*GOOD, "fast", "very-fast", "seconds", "jms"), ROUNDS)


async def test_readings_that_others_made_late_are_told_apart(
    *, run_job: Any, producer: AIOKafkaProducer, new_topic: Any, read_until: Any, bootstrap: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    """A native producer's timestamps are its own, and it may be ahead of the others; `late` and the reason say so."""
    source, target, dead = [await new_topic(partitions=1) for _ in range(3)]
    text = JOB.replace("SOURCE", source).replace("TARGET", target).replace("DEAD", dead).replace("TRIGGER", MICRO_BATCH)
    path = tmp_path / "job.toml"
    path.write_text(text.replace("CHECKPOINT", str(tmp_path / "checkpoint")))
    file = read(path)
    job = await run_job(
        DeclaredOptions(file=file, bootstrap_servers=bootstrap, checkpoint=file.streaming.run.checkpoint)
    )
    now = round(time.time() * 1000)
    await producer.send_and_wait(source, b'{"load": 1}', b"ahead", timestamp_ms=now + 600_000)
    await job.wait_for(lambda done: sum(one.rows for one in done) == 1 and done[-1].watermark_ms > now, 120)
    await producer.send_and_wait(source, b'{"load": 1}', b"in-time", timestamp_ms=now)
    await producer.send_and_wait(source, b'{"load": 1, "at": %d}' % (now - 60_000), b"late", timestamp_ms=now)
    letters = await read_until(dead, lambda records: len(records) == 2, 120)
    await job.wait_for(lambda _: sum(found.late for found in job.examined) == 2)
    totals = await job.stop()
    reasons = {record.key: dict(record.headers)["error"] for record in letters}
    assert reasons == {
        b"in-time": b"late: newer readings closed every window of the reading, which was in time at its arrival",
        b"late": b"late: every window of the reading was closed",
    }
    assert (totals.late_readings, totals.late_by_others) == (2, 1)
