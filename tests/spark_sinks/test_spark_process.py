"""The job as a process: a kill loses nothing, and no process is left running."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiokafka import AIOKafkaProducer

from spark_sinks.run import runs, status
from tests.support.processes import maps
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]


def processes_with(text: str) -> list[int]:
    """Return the ids of the processes with `text` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:  # it has ended
                continue
            if text.encode() in command:
                found.append(int(entry.name))
    return found


def told_of(directory: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file with one line per start of `program` from now on; it does not exist before the first start."""
    told, own = directory / f"{program}.started", directory / "programs" / program
    own.parent.mkdir()
    own.write_text(f'#!/bin/sh\necho "$@" >> {told}\nexec {shutil.which(program)} "$@"\n')
    own.chmod(0o755)
    monkeypatch.setenv("PATH", f"{own.parent}:{os.environ['PATH']}")
    return told


class JobProcess:
    def __init__(self, arguments: list[str], checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.ready_file = checkpoint / "ready.json"
        self.mark = f"-Dtest.mark={checkpoint.name}-{time.monotonic_ns()}"
        self._arguments = [
            *arguments, f"--checkpoint={checkpoint}", f"--ready-file={self.ready_file}", "--die-with-parent",
            "--quick-start", f"--conf=spark.driver.extraJavaOptions={self.mark}",
        ]  # fmt: skip
        self.process: asyncio.subprocess.Process

    async def start(self, *through: str) -> None:
        self.ready_file.unlink(missing_ok=True)
        self.process = await asyncio.create_subprocess_exec(
            *through, sys.executable, "-m", "spark_sinks", "max-temperature", *self._arguments,
            cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip

    async def wait_ready(self) -> None:
        async with asyncio.timeout(300):
            while not self.ready_file.exists():
                assert self.process.returncode is None, await self.process.stderr.read()  # type: ignore[union-attr]
                await asyncio.sleep(0.1)

    async def reports_until(self, condition: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """Return the lines of standard output up to the first that meets the condition."""
        lines: list[dict[str, Any]] = []
        async with asyncio.timeout(60):
            while not lines or not condition(lines[-1]):
                lines.append(json.loads(await self.process.stdout.readline()))  # type: ignore[union-attr]
        return lines

    async def both(self) -> list[int]:
        """Return the job and its JVM. A child of the JVM looks like the JVM until it has its own command line."""
        found: list[int] = []

        def alone() -> bool:
            found[:] = processes_with(self.mark)
            return len(found) == 2

        await wait_until(alone)
        return found

    async def wait_gone(self, limit_s: float = 60) -> None:
        """Wait until neither the process nor its JVM is running."""
        async with asyncio.timeout(limit_s):
            while processes_with(self.mark):  # noqa: ASYNC110 - nobody tells when it is gone
                await asyncio.sleep(0.05)


def processed(line: dict[str, Any], topic: str) -> int:
    """Return the records of the topic before the windows' end offsets."""
    if line.get("kind") != "progress":
        return 0
    return sum(line["end"][topic].values())


Start = Callable[..., JobProcess]


@pytest.fixture
async def job_process(
    spark_jars: list[Path], java_options: str, bootstrap: str, tmp_path: Path
) -> AsyncIterator[Start]:
    made: list[JobProcess] = []
    jars = ",".join(str(jar) for jar in spark_jars)
    common = [f"--bootstrap-servers={bootstrap}", f"--jars={jars}", f"--driver-java-options={java_options}"]

    def make(*arguments: str) -> JobProcess:
        job = JobProcess([*arguments, *common], tmp_path)
        made.append(job)
        return job

    yield make
    for job in made:
        if job.process.returncode is None:
            job.process.kill()
        await job.process.communicate()


@pytest.mark.spark
@pytest.mark.timeout(400)
async def test_killed_under_load_and_restarted(
    *, job_process: Start, archive: Path, producer: AIOKafkaProducer, read_until: Any, newest: Any, model: Any,
    new_topic: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    looked_for_links = told_of(tmp_path, "readlink", monkeypatch)
    source, target, dead = await new_topic(), await new_topic(), await new_topic()
    arguments = [f"--source={source}", f"--target={target}", f"--dead-letter={dead}", "--watermark=1h"]
    readings = []

    async def send(count: int) -> None:
        for _ in range(count):
            n = len(readings)
            readings.append((f"room-{n % 3}", float(n), 1_700_000_000_000 + 150 * n))
            sensor, temperature, at = readings[-1]
            value = msgspec.json.encode({"temperature": temperature, "time": at})
            await producer.send_and_wait(source, value, sensor.encode())

    job = job_process(*arguments)
    await job.start()
    await job.wait_ready()
    await send(50)
    await read_until(target, lambda records: len(records) > 0)
    await send(50)
    processes = await job.both()
    assert [maps(process, archive) for process in processes].count(True) == 1, "the JVM has its classes from there"
    job.process.send_signal(signal.SIGKILL)
    await job.wait_gone()
    await send(50)

    [dead_job] = status.status_of(runs.known())
    assert (dead_job.job, dead_job.state) == ("max-temperature", "killed")

    again = job_process(*arguments)
    await again.start()
    await again.wait_ready()
    await send(50)
    expected = model(readings)

    def complete(records: list[Any]) -> bool:
        return {k: (v["end"], v["maximum"], v["count"]) for k, v in newest(records).items()} == expected

    assert complete(await read_until(target, complete))
    lines = await again.reports_until(lambda line: processed(line, source) == 200)

    def told() -> status.Status:
        [found] = status.status_of(runs.find("max-temperature"))
        return found

    await wait_until(lambda: told().queries[0].lag == 0)
    [query] = told().queries
    assert (query.trigger, query.restarts, query.late, query.malformed) == ("micro-batch", 1, 0, 0)
    assert query.rows >= 100  # including those that the first run had read but not committed
    assert query.state_rows == len(expected)

    began = time.monotonic()
    stopped, (out, err) = await asyncio.gather(
        asyncio.to_thread(runs.stop, "max-temperature", 60), again.process.communicate()
    )
    assert stopped.ended is not None
    assert stopped.error is None
    assert again.process.returncode == 0, err
    assert time.monotonic() - began < 30
    await again.wait_gone(5)
    waited = "max-temperature: its last driver did not give up the checkpoint, waiting until it has ended\n"
    assert err.decode() == waited  # the killed one
    lines += [json.loads(line) for line in out.splitlines()]
    assert lines[-1]["kind"] == "summary"
    assert {line["kind"] for line in lines} == {"ready", "progress", "examined", "summary"}
    assert not looked_for_links.exists(), "a checkpoint starts processes: a batch waits for each"


STARTS = """
import subprocess, sys
subprocess.Popen(sys.argv[1:]).wait()
"""


@pytest.mark.spark
@pytest.mark.parametrize("end_of", ["job", "parent"])
async def test_stopped_while_the_jvm_starts(job_process: Start, end_of: str) -> None:
    job = job_process()
    await job.start(*([sys.executable, "-c", STARTS] if end_of == "parent" else []))
    expected = 3 if end_of == "parent" else 2  # the job, its JVM, and the parent, which has the job's arguments
    async with asyncio.timeout(60):
        while len(processes_with(job.mark)) < expected:  # noqa: ASYNC110 - it is no child of ours
            await asyncio.sleep(0.02)
    if end_of == "parent":
        job.process.kill()
    else:
        job.process.send_signal(signal.SIGINT)
    await job.process.communicate()
    assert job.process.returncode == (-signal.SIGKILL if end_of == "parent" else 0)
    await job.wait_gone()


@pytest.mark.spark
@pytest.mark.parametrize("of", ["group", "service"])
async def test_a_stop_of_its_process_group_or_of_every_process_is_a_clean_end(
    job_process: Start, producer: AIOKafkaProducer, new_topic: Any, of: str
) -> None:
    source, target, dead = await new_topic(partitions=1), await new_topic(partitions=1), await new_topic(partitions=1)
    job = job_process(f"--source={source}", f"--target={target}", f"--dead-letter={dead}")
    await job.start("setsid", "--wait")
    await job.wait_ready()
    await producer.send_and_wait(source, b"21", b"room")
    told = json.loads(job.ready_file.read_bytes())
    if of == "group":
        os.killpg(told["pid"], signal.SIGTERM)
    else:  # as systemd does, the JVM first
        jvm = [process for process in processes_with(job.mark) if os.getpgid(process) == process != told["pid"]]
        for process in (*jvm, told["pid"]):
            os.kill(process, signal.SIGTERM)
    _, err = await job.process.communicate()
    assert (job.process.returncode, err) == (0, b"")
    await job.wait_gone()


@pytest.mark.spark
async def test_a_job_without_its_jvm_says_so(job_process: Start, new_topic: Any) -> None:
    source, target, dead = await new_topic(partitions=1), await new_topic(partitions=1), await new_topic(partitions=1)
    job = job_process(f"--source={source}", f"--target={target}", f"--dead-letter={dead}")
    await job.start()
    await job.wait_ready()
    pid = json.loads(job.ready_file.read_bytes())["pid"]
    for process in await job.both():
        if process != pid:
            os.kill(process, signal.SIGKILL)
    _, err = await job.process.communicate()
    assert job.process.returncode == 1
    assert b"failed: its JVM has ended" in err.splitlines()[-1]
