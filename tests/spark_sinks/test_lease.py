"""Two drivers on one checkpoint: Kafka's fence ends the earlier one, and the results are those of one job."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from spark_sinks.checkpoint import HELD
from spark_sinks.lease import PREFIX, LeaseError
from tests.spark_sinks.test_edited_jobs import START_MS, STATS, Job
from tests.spark_sinks.test_edited_jobs import job as job  # noqa: PLC0414 - a fixture
from tests.support.topics import read_all

ROOT = Path(__file__).parents[2]


async def send(producer: AIOKafkaProducer, topic: str, count: int) -> None:
    """Send readings of one window."""
    for number in range(count):
        await producer.send(topic, json.dumps({"a": number, "b": 1, "at": START_MS + 1}).encode(), b"k")
    await producer.flush()


async def counts(bootstrap: str, topic: str) -> list[int]:
    """The counts of the newest window in the order of their results."""
    values = [json.loads(record.value) for record in await read_all(bootstrap, topic)]
    return [value["n"] for value in values if value["start"] == START_MS]


async def test_a_second_driver_takes_over_and_the_first_one_ends(
    run_job: Any, job: Job, producer: AIOKafkaProducer, bootstrap: str
) -> None:
    options = job.options(STATS)
    first = await run_job(options)
    await send(producer, job.topics["SOURCE"], 10)
    await first.wait_for(lambda done: sum(one.rows for one in done) == 10, 120)
    second = await run_job(options)
    with pytest.raises(LeaseError, match=f"another driver has taken over the checkpoint .{PREFIX}"):
        await first.wait_for(lambda _: False, 120)
    await send(producer, job.topics["SOURCE"], 10)
    await second.wait_for(lambda done: sum(one.rows for one in done) == 10, 120)
    await second.stop()
    found = await counts(bootstrap, job.topics["TARGET"])
    assert found == sorted(found)
    assert found[-1] == 20
    assert any("did not give up the checkpoint" in text for text in second.said)
    held = Path(options.checkpoint) / "window-stats" / HELD
    assert not held.exists()
    third = await run_job(options)
    await third.stop()
    assert third.said == []  # the second driver ended in order: nothing to wait for


class Driver:
    """A job's process with a home of its own, as another user or host has."""

    def __init__(self, arguments: list[str], home: Path) -> None:
        self._arguments = arguments
        self._home = home
        self.ready = home / "ready.json"
        self.process: asyncio.subprocess.Process

    async def start(self) -> None:
        self._home.mkdir()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "spark_sinks", "max-temperature", *self._arguments, f"--ready-file={self.ready}",
            "--die-with-parent", "--quick-start", f"--log-file={self._home / 'spark.log'}", cwd=ROOT,
            env={**os.environ, "XDG_STATE_HOME": str(self._home)},
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip

    async def wait_ready(self) -> None:
        async with asyncio.timeout(300):
            while not self.ready.exists():
                assert self.process.returncode is None, await self.process.stderr.read()  # type: ignore[union-attr]
                await asyncio.sleep(0.1)

    async def end(self) -> str:
        async with asyncio.timeout(120):
            return (await self.process.communicate())[1].decode()


@pytest.fixture
async def drivers() -> AsyncIterator[list[Driver]]:
    started: list[Driver] = []
    yield started
    for driver in started:
        if driver.process.returncode is None:
            driver.process.terminate()
            await driver.end()


@pytest.mark.timeout(600)
async def test_a_driver_of_another_home_takes_over_and_an_edited_one_is_refused(
    *, drivers: list[Driver], bootstrap: str, new_topic: Any, spark_jars: list[Path], tmp_path: Path,
    producer: AIOKafkaProducer, read_until: Any,
) -> None:  # fmt: skip
    source, target, dead = [await new_topic(partitions=1) for _ in range(3)]
    common = [
        f"--bootstrap-servers={bootstrap}", f"--checkpoint={tmp_path / 'checkpoint'}", f"--source={source}",
        f"--target={target}", f"--dead-letter={dead}", f"--jars={','.join(map(str, spark_jars))}", "--window=2s",
        "--slide=2s",
    ]  # fmt: skip
    for number, name in enumerate(("first", "second"), 1):
        drivers.append(Driver(common, tmp_path / name))
        await drivers[-1].start()
        await drivers[-1].wait_ready()
        value = json.dumps({"temperature": 20, "time": START_MS}).encode()
        await producer.send_and_wait(source, value, b"k")
        await read_until(
            target,
            lambda records: records and json.loads(records[-1].value)["count"] == number,  # noqa: B023
        )
    said = await drivers[0].end()
    assert drivers[0].process.returncode == 1
    assert "max-temperature failed: another driver has taken over the checkpoint" in said
    drivers[1].process.terminate()
    await drivers[1].end()
    assert drivers[1].process.returncode == 0
    for name, more in (("edited", []), ("fresh", ["--fresh"])):
        drivers.append(Driver([*common, "--slide=1s", *more], tmp_path / name))
        await drivers[-1].start()
        if not more:
            said = await drivers[-1].end()
            assert drivers[-1].process.returncode == 1
            assert "max-temperature was edited: --slide was 2000 ms, and is 1000 ms" in said
    await drivers[-1].wait_ready()
    results = await read_until(target, lambda records: any(json.loads(one.value)["start"] % 2_000 for one in records))
    assert json.loads(results[-1].value)["count"] == 2
    assert (tmp_path / "checkpoint" / "max-temperature.1" / "meaning").exists()
