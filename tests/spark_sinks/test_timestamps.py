"""A record whose timestamp Spark cannot hold ends a job by a sentence that names it; the remedies it names work."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.structs import TopicPartition

from tests.spark_sinks.test_failures import failure, run_to_its_end
from tests.support.topics import read_all, read_committed

ROOT = Path(__file__).parents[2]
ANY_TIME = {"message_timestamp_after_max_ms": str(2**63 - 1)}
NANOSECONDS = time.time_ns()
JOBS = {
    "micro-batch": """
job = "anomalies"
source = { topics = ["TOPIC"], columns = { x = "double" }, dead_letters = "DEAD" }
thresholds = { x = { above = 40.0 } }
sink = { kafka = "TARGET" }
run = { checkpoint = "CHECKPOINT" }
""",
    "registry": """
job = "enrich"
source = { topics = ["OTHER"], columns = { x = "double" }, dead_letters = "DEAD" }
registry = { topic = "TOPIC", columns = { place = "double" } }
sink = { kafka = "TARGET" }
run = { checkpoint = "CHECKPOINT" }
""",
}
JOBS["real-time"] = JOBS["micro-batch"].replace('"CHECKPOINT"', '"CHECKPOINT", trigger = "real-time"')
REPLAY = """
job = "replay"
name = "TARGET"
source = { topics = ["TOPIC"] }
sink = { kafka = "TARGET", timestamp = "now" }
run = { bootstrap_servers = "BOOTSTRAP" }
"""


async def fill(producer: AIOKafkaProducer, topic: str, latest: int) -> None:
    """Write three readings; the second one has the timestamp `latest`."""
    for key, timestamp in ((b"first", None), (b"poison", latest), (b"last", None)):
        await producer.send_and_wait(topic, b'{"x": 50}', key, partition=0, timestamp_ms=timestamp)


@pytest.mark.parametrize("kind", JOBS)
async def test_a_record_that_spark_cannot_read_is_named(
    *, kind: str, run_job: Any, declare: Any, new_topic: Any, producer: AIOKafkaProducer, bootstrap: str
) -> None:
    topic, other, target, dead = [await new_topic(partitions=2, **ANY_TIME) for _ in range(4)]
    text = JOBS[kind].replace("TOPIC", topic).replace("OTHER", other).replace("TARGET", target).replace("DEAD", dead)
    await fill(producer, topic, NANOSECONDS)
    await producer.send_and_wait(other, b'{"x": 50}', b"first")
    said = await failure(run_to_its_end(run_job, declare(text)))
    assert said.startswith(
        f"topic {topic} has a record that Spark cannot read, in partition 0 at offset 1: its timestamp {NANOSECONDS} "
        "is not in milliseconds. A replay with"
    )
    if kind != "micro-batch":
        return
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.delete_records({TopicPartition(topic, 0): RecordsToDelete(before_offset=2)})
    finally:
        await admin.close()
    job = await run_job(declare(text, accept_data_loss=True))
    await job.wait_for(lambda done: sum(one.rows for one in done) == 1)
    await job.stop()
    assert b"last" in {record.key for record in await read_all(bootstrap, target)}


async def test_a_replay_copies_a_topic_with_such_a_record(
    *, new_topic: Any, producer: AIOKafkaProducer, bootstrap: str, tmp_path: Path
) -> None:
    topic, target = await new_topic(partitions=1, **ANY_TIME), await new_topic(partitions=1)
    await fill(producer, topic, NANOSECONDS)
    path = tmp_path / "replay.toml"
    path.write_text(REPLAY.replace("TOPIC", topic).replace("TARGET", target).replace("BOOTSTRAP", bootstrap))
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "spark_sinks", str(path), cwd=ROOT)
    async with asyncio.timeout(120):
        assert await process.wait() == 0
    assert {record.key for record in await read_committed(bootstrap, target, 3)} == {b"first", b"poison", b"last"}
