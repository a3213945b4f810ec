"""Two drivers of one checkpoint in processes of their own, as on two hosts: Kafka's fence ends the earlier one."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from aiokafka import AIOKafkaProducer
from deltalake import DeltaTable

from tests.spark_sinks.test_edited_jobs import START_MS
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]


class Driver:
    """A job's process with a home of its own, as another user or host has."""

    def __init__(self, arguments: list[str], home: Path, job: str = "max-temperature") -> None:
        self._arguments = [job, *arguments]
        self._home = home
        self.ready = home / "ready.json"
        self.process: asyncio.subprocess.Process

    async def start(self) -> None:
        self._home.mkdir()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "spark_sinks", *self._arguments, f"--ready-file={self.ready}",
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


@pytest.fixture
def common(bootstrap: str, spark_jars: list[Path], java_options: str) -> list[str]:
    jars = ",".join(map(str, spark_jars))
    return [f"--bootstrap-servers={bootstrap}", f"--jars={jars}", f"--driver-java-options={java_options}"]


@pytest.mark.timeout(600)
async def test_a_driver_of_another_home_takes_over_and_an_edited_one_is_refused_and_ends_nobody(
    *, drivers: list[Driver], common: list[str], new_topic: Any, tmp_path: Path, producer: AIOKafkaProducer,
    read_until: Any,
) -> None:  # fmt: skip
    source, target, dead = [await new_topic(partitions=1) for _ in range(3)]
    windows = [
        *common, f"--checkpoint={tmp_path / 'checkpoint'}", f"--source={source}", f"--target={target}",
        f"--dead-letter={dead}", "--window=2s", "--slide=2s",
    ]  # fmt: skip

    async def counted(number: int) -> None:
        """Send one more reading, and wait until this many are counted."""
        value = json.dumps({"temperature": 20, "time": START_MS}).encode()
        await producer.send_and_wait(source, value, b"k")
        await read_until(target, lambda records: records and json.loads(records[-1].value)["count"] == number)

    for number, name in enumerate(("first", "second"), 1):
        drivers.append(Driver(windows, tmp_path / name))
        await drivers[-1].start()
        await drivers[-1].wait_ready()
        await counted(number)
    said = await drivers[0].end()
    assert drivers[0].process.returncode == 1
    assert "max-temperature failed: another driver has taken over the checkpoint" in said

    drivers.append(Driver([*windows, "--slide=1s"], tmp_path / "edited"))
    await drivers[-1].start()
    said = await drivers[-1].end()
    assert drivers[-1].process.returncode == 1
    assert "max-temperature was edited: --slide was 2000 ms, and is 1000 ms" in said
    await counted(3)  # by the second

    drivers.append(Driver([*windows, "--slide=1s", "--fresh"], tmp_path / "fresh"))
    await drivers[-1].start()
    await drivers[-1].wait_ready()
    said = await drivers[1].end()
    assert drivers[1].process.returncode == 1
    assert "max-temperature failed: another driver has taken over the checkpoint" in said
    results = await read_until(target, lambda records: any(json.loads(one.value)["start"] % 2_000 for one in records))
    assert json.loads(results[-1].value)["count"] == 3
    assert (tmp_path / "checkpoint" / "max-temperature.1" / "meaning").exists()


ARCHIVE = """
job = "archive"
name = "lake"
source = { topics = ["SOURCE"], decode = "none" }
sink = { archive = "ARCHIVE", format = "FORMAT" }
run = { checkpoint = "CHECKPOINT", interval = "500ms" }
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["parquet", "delta"])
async def test_of_two_drivers_of_an_archive_the_later_one_goes_on_and_the_archive_has_each_record_once(
    *, drivers: list[Driver], common: list[str], new_topic: Any, tmp_path: Path, producer: AIOKafkaProducer, kind: str
) -> None:  # fmt: skip
    source = await new_topic(partitions=1)
    lake, file = tmp_path / "lake", tmp_path / "job.toml"
    text = ARCHIVE.replace("SOURCE", source).replace("ARCHIVE", str(lake)).replace("FORMAT", kind)
    file.write_text(text.replace("CHECKPOINT", str(tmp_path / "checkpoint")))
    sent = 0

    async def archived() -> None:
        """Send some records, and wait until the archive has all."""
        nonlocal sent
        for number in range(sent, sent + 20):
            await producer.send(source, b"%d" % number)
        await producer.flush()
        sent += 20
        await wait_until(lambda: len(values_in(lake, kind)) >= sent, 120)

    for name in ("first", "second"):
        drivers.append(Driver(common, tmp_path / name, str(file)))
        await drivers[-1].start()
        await drivers[-1].wait_ready()
        await archived()
    said = await drivers[0].end()
    assert (drivers[0].process.returncode, drivers[1].process.returncode) == (1, None)
    assert "failed: another driver has taken over the checkpoint" in said
    await archived()
    assert sorted(values_in(lake, kind)) == list(range(sent))


def values_in(lake: Path, kind: str) -> list[int]:
    """Return the values in an archive, as another engine reads them."""
    if kind == "delta":
        if not (lake / "_delta_log").exists():
            return []
        return [int(value) for value in DeltaTable(str(lake)).to_pyarrow_table(columns=["value"])["value"].to_pylist()]
    if not list(lake.glob("**/*.parquet")):
        return []
    with duckdb.connect() as engine:
        rows = engine.execute(f"SELECT value FROM read_parquet('{lake}/**/*.parquet')").fetchall()
    return [int(value) for (value,) in rows]
