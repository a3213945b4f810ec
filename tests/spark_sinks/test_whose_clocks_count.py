"""`trivium spark check` asks Kafka whose clock tells a reading's arrival."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from typer.testing import CliRunner

from gateway.process.cli import app

JOB = """
job = "window-stats"
by = ["key"]
source = { topics = [TOPICS], columns = { a = "double" }, dead_letters = "dead" }
window = { length = "10s" }
aggregates = { n = "count(*)" }
sink = { kafka = "results" }
run = { checkpoint = "checkpoint", bootstrap_servers = "BOOTSTRAP" }
"""
SENDERS = "a reading's arrival is Kafka's timestamp, which native producers, and `timestamp` by HTTP, set themselves"


async def checked(path: Path, bootstrap: str, *topics: str) -> str:
    text = JOB.replace("TOPICS", ", ".join(f'"{name}"' for name in topics)).replace("BOOTSTRAP", bootstrap)
    await asyncio.to_thread(path.write_text, text)
    told = await asyncio.to_thread(CliRunner().invoke, app, ["spark", "check", str(path)])
    assert told.exit_code == 0
    assert f"{path}: valid" in told.output
    return str(told.output)


async def test_each_topic_of_which_senders_set_the_time_is_named(
    bootstrap: str, admin: AIOKafkaAdminClient, new_topic: Any, tmp_path: Path
) -> None:
    path, theirs = tmp_path / "job.toml", await new_topic()
    ours, none = f"{theirs}-by-kafka", f"{theirs}-none"
    await admin.create_topics([NewTopic(ours, 1, 1, topic_configs={"message.timestamp.type": "LogAppendTime"})])
    told = await checked(path, bootstrap, ours)
    assert f"note: a reading's arrival is the broker's time: {ours} with message.timestamp.type=LogAppendTime" in told
    assert SENDERS not in told
    told = await checked(path, bootstrap, ours, theirs, none)
    names = f"{theirs}, {none} (does not exist yet)"
    assert f"note: without message.timestamp.type=LogAppendTime: {names}. There {SENDERS}" in told


async def test_without_kafka_the_note_says_what_would_help(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told = await checked(tmp_path / "job.toml", f"127.0.0.1:{port}", "sensors")
    assert f"note: {SENDERS}" in told
    assert "unless the topics have message.timestamp.type=LogAppendTime (Kafka was not asked: " in told
    assert f"127.0.0.1:{port}" in told


async def test_a_kafka_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        told = await checked(tmp_path / "job.toml", address, "sensors")
    assert f"Kafka was not asked: {address} does not answer" in told
