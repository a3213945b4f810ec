"""What a job says when Spark, Kafka or an archive ends it: the cause, its place and what helps, in one line."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from spark_sinks.run.failures import told
from spark_sinks.spark.checkpoint import MEANING
from tests.spark_sinks.test_edited_jobs import STATS, Job, run, send
from tests.spark_sinks.test_edited_jobs import job as job  # noqa: PLC0414 - a fixture

ARCHIVE = """
job = "archive"
source = { topics = ["SOURCE"], decode = "none" }
sink = { archive = "CHECKPOINT-lake", format = "delta" }
run = { checkpoint = "CHECKPOINT" }
"""


async def failure(ending: Awaitable[None]) -> str:
    """Wait until a job fails, and return what it says."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - what it says is the test
        await ending
    return told(caught.value)


async def run_to_its_end(run_job: Any, options: Any) -> None:
    running = await run_job(options)
    await running.wait_for(lambda _: False, 120)


async def test_deleted_records_are_named_with_what_helps(
    *, run_job: Any, job: Job, producer: AIOKafkaProducer, admin: AIOKafkaAdminClient
) -> None:
    topic = job.topics["SOURCE"]
    await send(producer, topic, 100)
    await run(run_job, job.options(STATS), 100)
    await send(producer, topic, 100)
    await admin.delete_records({TopicPartition(topic, 0): RecordsToDelete(before_offset=150)})
    said = await failure(run_to_its_end(run_job, job.options(STATS)))
    place = f"Could not read records in offset [100, 200) for topic partition {topic}-0"
    assert said.startswith(f"Kafka has deleted records that the job had not read ({place}). With accept_data_loss")
    await run(run_job, job.options(STATS, accept_data_loss=True), 50)  # as it says


async def test_a_state_of_other_columns_is_told_with_what_helps(
    run_job: Any, job: Job, producer: AIOKafkaProducer
) -> None:
    await send(producer, job.topics["SOURCE"], 10)
    options = job.options(STATS)
    await run(run_job, options, 10)
    (Path(options.checkpoint) / "window-stats" / MEANING).unlink()  # as of a version that kept none
    await send(producer, job.topics["SOURCE"], 10)
    more = job.options(STATS, 'n = "count(*)"', 'n = "count(*)", low = "min(b)"')
    said = await failure(run_to_its_end(run_job, more))
    assert said == (
        "the state in the checkpoint has other columns than the job needs now (Spark's "
        "STATE_STORE_VALUE_SCHEMA_NOT_COMPATIBLE): use another checkpoint, or start once with --fresh, which moves "
        "this one aside and begins anew"
    )


async def test_an_archives_error_is_told_and_not_the_proxy_that_brought_it(
    run_job: Any, job: Job, producer: AIOKafkaProducer
) -> None:
    await send(producer, job.topics["SOURCE"], 10)
    options = job.options(ARCHIVE)
    running = await run_job(options)
    await running.wait_for(lambda done: sum(one.rows for one in done) == 10, 120)
    log = Path(f"{options.checkpoint}-lake") / "_delta_log"
    for commit in log.iterdir():
        commit.write_text("no commit")
    await send(producer, job.topics["SOURCE"], 10)
    said = await failure(running.wait_for(lambda _: False, 120))
    assert "Proxy" not in said
    assert "expected" in said
    assert "Error: " in said
