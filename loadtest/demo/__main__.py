"""The main job: readings from three kinds of client into Kafka, through Spark, and back to three kinds of client.

Starts the gateway with its embedded broker, the Spark job and a small fleet; shows what happens until Ctrl-C, or for
`--duration` seconds and then judges: exit code 0 only if every reading was acknowledged and every window of Spark's
results holds exactly the readings that were sent into it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, Final

import uvloop
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from rich.console import Console
from rich.live import Live

from loadtest.demo import view
from loadtest.demo.accounts import Accounts
from loadtest.demo.fleet import Fleet
from loadtest.demo.processes import Process, ProcessError, gateway, spark

TOPICS: Final = ("sensors", "maximum", "sensors-dlq")
PORTS: Final = {"mqtt": 1883, "amqp": 5672, "http": 8080, "management": 8081}
GATEWAY_READY_S: Final = 120.0
SPARK_READY_S: Final = 120.0
SETTLE_S: Final = 30.0  # Spark's last windows after the last reading
GATEWAY_STOP_S: Final = 10.0
SPARK_STOP_S: Final = 5.0
REFRESH_S: Final = 0.25
LINE_S: Final = 5.0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="make run", description=__doc__)
    parser.add_argument("--duration", type=float, help="seconds of sending; then judge and stop (default: Ctrl-C)")
    parser.add_argument("--data-dir", type=Path, default=Path(".trivium"))
    parser.add_argument("--trigger", choices=("micro-batch", "real-time"), default="micro-batch")
    return parser.parse_args()


def free_address(port: int) -> str:
    """The usual port on loopback, or port 0 (a free one) when somebody else has it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return "127.0.0.1:0"
    return f"127.0.0.1:{port}"


class Demo:
    """One run."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self._options = options
        self._console = console
        self._accounts = Accounts()
        self._status: dict[str, Any] = {}
        self._stop = asyncio.Event()
        self._finished = asyncio.Event()
        self._started = time.perf_counter()
        self._processes: list[Process] = []

    async def run(self) -> int:
        """Everything, in order; the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)
        work = asyncio.ensure_future(self._work())
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not work.done() and not self._finished.is_set():
            # Ctrl-C: the fleet is told by the event; a start that is under way is given up.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(work), 3.0)
        stopped.cancel()
        work.cancel()
        code = 1
        try:
            code = await work
        except asyncio.CancelledError:
            code = 0 if self._options.duration is None else 1
        except ProcessError as error:
            self._console.print(f"[red]{error}[/red]", highlight=False)
        finally:
            await self._shut_down()
        return code

    async def _work(self) -> int:
        directory: Path = self._options.data_dir.resolve()
        front = gateway(directory, {name: free_address(port) for name, port in PORTS.items()} | {"kafka-port": "0"})
        self._processes.append(front)
        self._console.print("Starting Kafka and the gateway ...")
        await front.start()
        addresses = await front.ready(GATEWAY_READY_S)
        await create_topics(addresses["kafka"])
        job = spark(directory, addresses["kafka"], self._options.trigger)
        self._processes.append(job)
        self._console.print(f"Gateway ready after {self._elapsed:.1f} s. Starting Spark ...")
        for line in view.paste_lines(addresses):
            self._console.print(line, soft_wrap=True, highlight=False, markup=False)
        await job.start()
        fleet = Fleet(addresses, self._accounts)
        receiving = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch_spark(job))
            showing = group.create_task(self._show(addresses))
            group.create_task(fleet.run(receiving))
            try:
                await job.ready(SPARK_READY_S)
                await receiving.wait()
                await self._until_told()
                fleet.stop_sending()
                if self._options.duration is not None:
                    await self._settle()
            finally:
                fleet.close()
                self._finished.set()
                showing.cancel()
                watching.cancel()
        return self._judge(fleet)

    async def _until_told(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), self._options.duration)

    async def _settle(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while not self._accounts.complete:
                    self._accounts.changed.clear()
                    await self._accounts.changed.wait()

    async def _watch_spark(self, job: Process) -> None:
        async for line in job.lines():
            report = json.loads(line)
            if report.get("kind") == "progress" and report["query"] == "max-temperature":
                self._status["lag"] = report["lag"]
                self._status["spark"] = (
                    f"batch {report['batch']} rows {report['rows']} ({report['rows_per_second']:,.0f}/s) "
                    f"in {report['duration_ms']} ms, {report['state_rows']} windows kept, "
                    f"{report['late_readings']} late"
                )
        if not self._finished.is_set():
            raise ProcessError(f"Spark ended; see {job.log}")

    async def _show(self, addresses: dict[str, Any]) -> None:
        first = True
        if self._console.is_terminal:
            with Live(view.live(self._accounts, addresses, self._status), console=self._console) as screen:
                while True:
                    await asyncio.sleep(REFRESH_S)
                    screen.update(view.live(self._accounts, addresses, self._status))
        last = 0.0
        while True:
            await asyncio.sleep(REFRESH_S)
            came = any(traffic.received for traffic in self._accounts.traffic.values())
            if (came and first) or self._elapsed - last >= LINE_S:
                first = first and not came
                last = self._elapsed
                view.plain(self._console, self._accounts, self._status, self._elapsed)

    def _judge(self, fleet: Fleet) -> int:
        accounts = self._accounts
        self._console.print(view.traffic_table(accounts, "Summary"))
        self._console.print(
            f"windows right: {accounts.windows - accounts.open_windows} of {accounts.windows}; "
            f"unacknowledged: {accounts.unacknowledged}"
        )
        for error in fleet.errors:
            self._console.print(f"[red]{error}[/red]", highlight=False)
        if self._options.duration is None:
            return 0
        good = accounts.complete and not fleet.errors
        self._console.print("Every reading is accounted for." if good else "[red]Readings are missing.[/red]")
        return 0 if good else 1

    async def _shut_down(self) -> None:
        started = time.perf_counter()
        for process, limit in zip(reversed(self._processes), (SPARK_STOP_S, GATEWAY_STOP_S), strict=False):
            await process.stop(limit if len(self._processes) > 1 else GATEWAY_STOP_S)
        if self._processes:
            self._console.print(f"Stopped in {time.perf_counter() - started:.1f} s.")

    @property
    def _elapsed(self) -> float:
        return time.perf_counter() - self._started


async def create_topics(bootstrap: str) -> None:
    """The demo's topics; existing ones are kept."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        known = set(await admin.list_topics())
        missing = [NewTopic(name, 3, 1) for name in TOPICS if name not in known]
        if missing:
            await admin.create_topics(missing)
    finally:
        await admin.close()


def main() -> None:
    """The command."""
    sys.exit(uvloop.run(Demo(arguments(), Console()).run()))


if __name__ == "__main__":
    main()
