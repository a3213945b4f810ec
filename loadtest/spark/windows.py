"""The proofs about max-temperature: killed, started on a backlog, and on a cluster that loses a worker."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from aiokafka import AIOKafkaProducer

from loadtest.clients.pace import at_rate
from loadtest.ports import free_port
from loadtest.spark.job import Job
from loadtest.spark.proof import Proof
from loadtest.spark.readings import LATE, Sender, settled
from loadtest.start import start_process

SENSORS: Final = 50
EVERY: Final = 50
"""One in this many readings is far too late."""
LATE_MS: Final = 120_000
STEP_MS: Final = 50  # between the readings of the backlog
UP_S: Final = 300.0  # the machine may be busy
BETWEEN_S: Final = 20.0
"""Load before a worker is killed, before the new one, and before the end."""


class Windows(Proof):
    """max-temperature: every window must be right, and every reading that is far too late in one or in a dead letter.

    Attributes:
        settle_s: how long the windows may take.
    """

    settle_s = 60.0

    async def send(self, producer: AIOKafkaProducer) -> None:
        """Send readings, some far too late."""
        self.sender = Sender(producer, self.topics.source)
        async for number in at_rate(self.rate):
            now = int(time.time() * 1000)
            if number % EVERY:
                at = now - self.rng.randrange(3_000)
                await self.sender.send(f"s{number % SENSORS}", self.rng.uniform(-20, 40), at)
            else:
                await self.sender.send(f"{LATE}{number}", 99.5, now - LATE_MS)

    async def verdict(self) -> tuple[object, bool]:
        """Compare the windows."""
        found = await settled(self.bootstrap, self.topics, self.sender, self.settle_s)
        return found, found.kept


class Backlog(Windows):
    """Started on stored readings of an hour and more, in order."""

    settle_s = 240.0

    def __init__(self, name: str, trigger: str) -> None:
        super().__init__(name, trigger)
        self._stored = asyncio.Event()

    async def send(self, producer: AIOKafkaProducer) -> None:
        """Store the readings."""
        self.sender, count = Sender(producer, self.topics.source), self.plan.readings
        begin = int(time.time() * 1000) - count * STEP_MS
        for number in range(count):
            await self.sender.send(f"s{number % SENSORS}", number % 61 - 20, begin + number * STEP_MS)
        await self.sender.flush()
        self._stored.set()

    async def suffer(self, job: Job) -> None:
        """Start the job."""
        await self._stored.wait()
        await job.start()


class Cluster:
    """A master and workers, each in its own process group, which includes a worker's executors."""

    def __init__(self, directory: Path) -> None:
        found = importlib.util.find_spec("pyspark")
        assert found is not None
        assert found.origin is not None
        self._home = Path(found.origin).parent
        self._directory = directory
        self._processes: list[asyncio.subprocess.Process] = []
        self.port = free_port()

    @property
    def master(self) -> str:
        """The master's URL."""
        return f"spark://127.0.0.1:{self.port}"

    async def start_master(self) -> None:
        """Start the master, and wait until it listens."""
        pages = ("--webui-port", str(free_port()))
        await self._start("master.Master", "--host", "127.0.0.1", "--port", str(self.port), *pages)
        async with asyncio.timeout(UP_S):
            while not _listens(self.port):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.2)

    async def start_worker(self) -> asyncio.subprocess.Process:
        """Start a worker with room for one executor."""
        room = ("--cores", "4", "--memory", "1g", "--webui-port", str(free_port()))
        return await self._start("worker.Worker", "--host", "127.0.0.1", *room, self.master)

    async def _start(self, name: str, *arguments: str) -> asyncio.subprocess.Process:
        environment = {
            **os.environ, "SPARK_HOME": str(self._home), "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_WORKER_DIR": str(self._directory / "work"),
        }  # fmt: skip
        with (self._directory / f"{name}.log").open("ab") as log:
            process = await start_process(
                str(self._home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments,
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        return process

    async def kill(self, process: asyncio.subprocess.Process) -> None:
        """Kill a process and its children with SIGKILL."""
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        self._processes.remove(process)

    async def stop(self) -> None:
        """Kill the remaining processes."""
        for process in tuple(self._processes):
            await self.kill(process)


class OnCluster(Windows):
    """Submitted to a standalone cluster; a worker is killed with its executor, and another one replaces it later."""

    settle_s = 300.0

    def job(self) -> Job:
        """Return the job, not started."""
        self.cluster = Cluster(self.directory)
        return Job(
            self.bootstrap, self.topics, self.directory, "--master", self.cluster.master, "--watermark", "60s",
            "--conf", "spark.executor.memory=600m", "--conf", "spark.driver.host=127.0.0.1", command="submit",
        )  # fmt: skip

    @contextlib.asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        """Run a master and two workers."""
        try:
            await self.cluster.start_master()
            self.first = await self.cluster.start_worker()
            await self.cluster.start_worker()
            yield
        finally:
            await self.cluster.stop()

    async def suffer(self, job: Job) -> None:
        """Kill a worker, and add another one."""
        await job.start()
        await job.wait_until(lambda: job.rows() > 0, UP_S)
        await asyncio.sleep(BETWEEN_S)
        await self.cluster.kill(self.first)
        self.hurt(1, f"a worker, after {job.rows():,} readings")
        await asyncio.sleep(BETWEEN_S)
        await self.cluster.start_worker()
        await asyncio.sleep(BETWEEN_S)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
