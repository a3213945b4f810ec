"""Whose clock a job takes for the arrival of a reading: asked of Kafka, for `trivium spark check`. Needs no Spark."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaConnectionError, KafkaError

from spark_sinks.replay.kafka import ReplayTopics
from spark_sinks.spec import kafka_client
from spark_sinks.spec.jobs import JobSpec

ANSWER_S: Final = 3.0
_SETTING: Final = "message.timestamp.type=LogAppendTime"
_SENDERS: Final = (
    "a reading's arrival is Kafka's timestamp, which native producers, and `timestamp` by HTTP, set themselves: a fast "
    "one makes other readings late"
)


def note(job: JobSpec) -> str | None:
    """Return a sentence about the arrival of this job's readings; None if it has no windows that close."""
    if not job.CLOCKS_COUNT:
        return None
    logging.getLogger("aiokafka").addHandler(logging.NullHandler())  # else it prints what the note says
    connection = {"bootstrap.servers": job.run.bootstrap_servers, **job.run.kafka}
    try:
        own = asyncio.run(asyncio.wait_for(_sets_time(connection, job.source.topics), ANSWER_S))
    except (KafkaConnectionError, TimeoutError):
        return _unasked(f"{job.run.bootstrap_servers} does not answer")
    except (KafkaError, OSError, ValueError) as error:
        return _unasked(str(error))
    by_senders = [name for name in job.source.topics if not own.get(name, False)]
    if not by_senders:
        return f"a reading's arrival is the broker's time: {', '.join(job.source.topics)} with {_SETTING}"
    known = [name if name in own else f"{name} (does not exist yet)" for name in by_senders]
    return f"without {_SETTING}: {', '.join(known)}. There {_SENDERS}"


def _unasked(why: str) -> str:
    return f"{_SENDERS}, unless the topics have {_SETTING} (Kafka was not asked: {why})"


async def _sets_time(connection: Mapping[str, str], topics: Sequence[str]) -> dict[str, bool]:
    """Return for each topic that exists whether Kafka sets the timestamp of its records."""
    admin = AIOKafkaAdminClient(**kafka_client.arguments(connection))
    try:
        await admin.start()
        return {name: not topic.own_time for name, topic in (await ReplayTopics(admin).known(topics)).items()}
    finally:
        await admin.close()
