"""A standalone cluster, a job by `trivium spark submit`, and a worker killed in mid-stream.

A master and two workers run from pyspark's distribution. While readings arrive, one worker is killed with its executor,
and another worker replaces it later. In the end no window may be missing or wrong.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import signal
import socket
import time
from pathlib import Path
from typing import Literal, NamedTuple

from aiokafka import AIOKafkaProducer

from loadtest.beside import beside
from loadtest.clients.pace import at_rate
from loadtest.engine.command import Scenario
from loadtest.engine.stand import Stand
from loadtest.ports import free_port
from loadtest.spark.job import Job
from loadtest.spark.readings import Sender, make_topics, settled
from loadtest.start import start_process

SENSORS = 50
FIRST_S = 20.0
"""Load before the kill, before the new worker, and before the end."""
SETTLE_S = 300.0
UP_S = 300.0  # the machine may be busy


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


class Plan(NamedTuple):
    """Readings per second, and the job's trigger."""

    rate: int = 200
    trigger: Literal["micro-batch", "real-time"] = "micro-batch"


async def run(stand: Stand, plan: Plan) -> None:
    """Submit, kill a worker under load, add another, compare."""
    bootstrap, directory, (rate, trigger) = await stand.kafka(), stand.directory, plan
    topics = await make_topics(bootstrap)
    cluster = Cluster(directory)
    real_time = ["--interval", "5s"] if trigger == "real-time" else []
    job = Job(
        bootstrap, topics, directory, "--master", cluster.master,
        "--watermark", "60s", "--trigger", trigger, *real_time,
        "--conf", "spark.executor.memory=600m", "--conf", "spark.driver.host=127.0.0.1", command="submit",
    )  # fmt: skip
    try:
        await cluster.start_master()
        first = await cluster.start_worker()
        await cluster.start_worker()
        began = time.monotonic()
        await job.start()
        stand.say(f"submitted and ready after {time.monotonic() - began:.0f} s")
        async with AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=5) as producer:
            sender = Sender(producer, topics.source)
            async with beside(_send(sender, rate)):
                async with asyncio.timeout(UP_S):
                    while not job.rows():  # noqa: ASYNC110 - filled by the job's output
                        await asyncio.sleep(0.2)
                await asyncio.sleep(FIRST_S)
                before = job.rows()
                await cluster.kill(first)
                stand.say(f"a worker and its executor killed after {before:,} readings")
                await asyncio.sleep(FIRST_S)
                await cluster.start_worker()
                await asyncio.sleep(FIRST_S)
            await sender.flush()
            verdict = await settled(bootstrap, topics, sender, SETTLE_S)
        code = await job.stop()
    finally:
        await cluster.stop()
    stand.row(trigger=trigger, readings=job.rows(), verdict=str(verdict))
    stand.check(verdict.kept and code == 0, f"exit code {code}: {verdict}")


async def _send(sender: Sender, rate: int) -> None:
    async for number in at_rate(rate):
        at = int(time.time() * 1000) - random.randrange(3_000)
        await sender.send(f"s{number % SENSORS}", random.uniform(-20, 40), at)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


SCENARIOS = (Scenario("cluster", "kill a worker of a standalone cluster under load", Plan(), run),)
