"""A replay, a backfill and an audit that are asked to stop end at once, whatever they wait for."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from gateway.embedded.java import find_java
from tests.support.altering_proxy import FETCH, AlteringProxy
from tests.support.job_processes import start_job
from tests.support.topics import read_committed
from tests.support.waiting import wait_until

AT_ONCE_S = 5.0
LIST_OFFSETS, METADATA, INIT_PRODUCER_ID = 2, 3, 22
REPLAY = """
job = "replay"
name = "TARGET"
source = { topics = ["SOURCE"] }
sink = { kafka = "TARGET" }
run = { bootstrap_servers = "BOOTSTRAP" }
"""
LETTERS = REPLAY.replace('"replay"', '"dlq-replay"')
AUDIT = """
job = "bridge-audit"
name = "TARGET"
source = { topics = ["SOURCE"], gateways = ["http://127.0.0.1:9"] }
sink = { kafka = "TARGET" }
run = { bootstrap_servers = "BOOTSTRAP" }
"""
BACKFILL = """
job = "backfill"
name = "TARGET"
source = { archive = "NOWHERE" }
sink = { kafka = "TARGET" }
run = { bootstrap_servers = "BOOTSTRAP" }
"""


@pytest.fixture
async def proxy(bootstrap: str) -> AsyncIterator[AlteringProxy]:
    host, _, port = bootstrap.rpartition(":")
    async with AlteringProxy((host, int(port))).running() as running:
        yield running


async def started(job: Path, text: str, **names: str) -> asyncio.subprocess.Process:
    for name, value in names.items():
        text = text.replace(name, value)
    await asyncio.to_thread(job.write_text, text)
    return await start_job(job)


async def stops_at_once(process: asyncio.subprocess.Process) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(AT_ONCE_S):
            _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, said.decode()


@pytest.mark.parametrize(
    ("text", "api"),
    [
        *((text, api) for text in (REPLAY, LETTERS) for api in (METADATA, INIT_PRODUCER_ID, LIST_OFFSETS, FETCH)),
        *((AUDIT, api) for api in (METADATA, INIT_PRODUCER_ID, LIST_OFFSETS)),
    ],
)
async def test_a_stop_is_heard_while_kafka_does_not_answer(
    *, proxy: AlteringProxy, producer: AIOKafkaProducer, new_topic: Any, tmp_path: Path, text: str, api: int
) -> None:
    source, target = await new_topic(), await new_topic()
    await producer.send_and_wait(source, b"1")
    held = proxy.hold(api)
    process = await started(tmp_path / "job.toml", text, SOURCE=source, TARGET=target, BOOTSTRAP=proxy.bootstrap)
    await asyncio.wait_for(held.wait(), 60)
    await stops_at_once(process)


async def test_a_stop_is_heard_while_a_slice_is_read_and_the_next_run_goes_on(
    *, bootstrap: str, proxy: AlteringProxy, producer: AIOKafkaProducer, new_topic: Any, tmp_path: Path
) -> None:
    source, target = await new_topic(partitions=1), await new_topic(partitions=1)
    for number in range(3_000):
        await producer.send(source, b"%d" % number)
    await producer.flush()
    text = REPLAY.replace("run = { ", "run = { rate = 500, ")
    process = await started(tmp_path / "job.toml", text, SOURCE=source, TARGET=target, BOOTSTRAP=proxy.bootstrap)
    assert process.stdout is not None
    await process.stdout.readline()  # the first transaction
    await asyncio.wait_for(proxy.hold(FETCH).wait(), 60)
    await stops_at_once(process)

    again = await started(tmp_path / "job.toml", REPLAY, SOURCE=source, TARGET=target, BOOTSTRAP=bootstrap)
    assert await again.wait() == 0
    assert [int(record.value) for record in await read_committed(bootstrap, target, 3_000)] == list(range(3_000))


async def test_a_stop_is_heard_while_spark_starts(
    bootstrap: str, new_topic: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = tmp_path / "starts"
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    launches = f'case "$*" in *launcher.Main*) exec {find_java().path} "$@";; esac'
    java.write_text(f"#!/bin/sh\n{launches}\ntouch {starts}\nexec sleep 600\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    process = await started(tmp_path / "job.toml", BACKFILL, TARGET=await new_topic(), BOOTSTRAP=bootstrap)
    await wait_until(starts.exists)
    await stops_at_once(process)
