"""One run of the demo: starts everything, shows the traffic, checks the results, and stops everything in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from typing import Any, Final, NamedTuple

import aiohttp
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from rich.console import Console, Group
from rich.live import Live

from loadtest.demo import view
from loadtest.demo.accounts import Accounts
from loadtest.demo.directory import USUAL_PORTS, Directory
from loadtest.demo.fleet import SENSORS, Fleet, FleetError
from loadtest.demo.processes import ProcessError, gateway, recording, spark
from loadtest.ports import free_port

TOPICS: Final = ("sensors", "maximum", "sensors-dlq")
REAL_TIME: Final = "real-time"
CHECKPOINTS: Final = "10s"  # checkpoint interval in real-time mode, and so how often Spark reports
READY_S: Final = 180.0  # the first start downloads jars
SETTLE_S: Final = 30.0  # from the last reading to Spark's last windows
CLOSE_S: Final = 1.5  # this and the two below must stay under 10 s in total
SPARK_STOP_S: Final = 4.0
GATEWAY_STOP_S: Final = 4.0
REFRESH_S: Final = 0.25
LOOK_S: Final = 1.0  # between two reads of Spark's metrics
ANSWER_S: Final = 5.0
LINE_S: Final = 5.0  # between two plain lines


class Options(NamedTuple):
    """Options of a run, as on the command line."""

    duration: float | None = None
    trigger: str = REAL_TIME


class _StoppedError(Exception):
    """Ctrl-C or SIGTERM arrived during start-up."""


class Demo:
    """One run of the demo.

    Args:
        options: options from the command line.
        directory: the demo's directory, already locked.
        console: console for the output.
        started: `time.perf_counter()` at the command's start.
    """

    def __init__(self, options: Options, directory: Directory, console: Console, started: float) -> None:
        self._options = options
        self._console = console
        self._started = started
        self._accounts = Accounts([sensor for sensors in SENSORS.values() for sensor in sensors])
        self._status = view.Status()
        self._stop = asyncio.Event()
        self._signals = 0
        ports = {name: free_port(port) for name, port in USUAL_PORTS.items()}
        real_time = options.trigger == REAL_TIME
        self._gateway = gateway(directory, ports)
        self._spark = spark(
            directory, f"127.0.0.1:{ports['kafka']}", options.trigger, CHECKPOINTS if real_time else None
        )

        self._recording = recording(directory)

    async def run(self) -> int:
        """Start, run and stop everything; return the exit code."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        code = 1
        try:
            code = await self._work()
        except* (ProcessError, FleetError) as errors:
            view.line(self._console, str(_first(errors)), "red")
        except* _StoppedError:
            view.line(self._console, "Stopped before the first reading was sent.")
            code = 0 if self._options.duration is None else 1
        finally:
            began = time.perf_counter()
            await self._recording.stop(CLOSE_S)
            await self._spark.stop(SPARK_STOP_S)
            await self._gateway.stop(GATEWAY_STOP_S)
            view.line(self._console, f"Everything stopped in {time.perf_counter() - began:.1f} s.")
        return code

    def _on_signal(self) -> None:
        self._stop.set()
        self._signals += 1
        if self._signals > 1:  # a second Ctrl-C; the broker and Spark's JVM end with their parents
            for process in (self._spark, self._gateway):
                process.send_signal(signal.SIGKILL)

    async def _work(self) -> int:
        view.line(self._console, "Starting Kafka, the gateway and Spark ...")
        await self._gateway.start()
        await self._spark.start()
        async with asyncio.TaskGroup() as group:
            background = [group.create_task(process.watch()) for process in (self._gateway, self._spark)]
            stopping = group.create_task(self._raise_when_stopped())
            addresses = await self._gateway.ready(READY_S)
            await create_topics(addresses["kafka"])
            self._say_ready("Kafka and the gateway are ready")
            for text in (
                view.addresses_line(addresses), view.other_addresses_line(addresses),
                "Commands to try:", *view.paste_lines(addresses),
            ):  # fmt: skip
                view.line(self._console, text)
            fleet = Fleet(addresses, self._accounts, group)
            self._status.errors = fleet.errors
            try:
                await fleet.listen()
                job = await self._spark.ready(READY_S)
                self._say_ready("Spark is ready")
                background.append(group.create_task(self._follow_spark(job["metrics"])))
                stopping.cancel()
                background.append(group.create_task(self._announce_first_result()))
                showing = group.create_task(self._show(addresses))
                fleet.send()
                try:
                    interrupted = await self._stopped_within(self._options.duration)
                    await asyncio.wait_for(fleet.stop_sending(), CLOSE_S if interrupted else None)
                    interrupted = interrupted or await self._settled()
                finally:
                    await _ended(showing)
            finally:
                await fleet.close(CLOSE_S)
                for task in background:
                    task.cancel()
        return self._conclude(interrupted)

    async def _raise_when_stopped(self) -> None:
        await self._stop.wait()
        raise _StoppedError

    async def _stopped_within(self, seconds: float | None) -> bool:
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self._stop.wait(), seconds)
        return False

    async def _settled(self) -> bool:
        """Wait for Spark's last windows; return True if interrupted."""
        deadline = time.perf_counter() + SETTLE_S
        while not self._accounts.complete and time.perf_counter() < deadline:
            if await self._stopped_within(REFRESH_S):
                return True
        return False

    async def _follow_spark(self, address: str) -> None:
        """Read the job's metrics periodically."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as http:
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):  # `watch` reports the end of the job
                    async with http.get(f"http://{address}/metrics") as answer:
                        self._status.take(await answer.text())
                await asyncio.sleep(LOOK_S)

    async def _announce_first_result(self) -> None:
        await self._accounts.came_back.wait()
        self._say_ready("First result")
        await self._recording.start()

    async def _show(self, addresses: dict[str, Any]) -> None:
        def now() -> Group:
            return view.live(self._accounts, addresses, self._status, self._elapsed)

        if self._console.is_terminal and not self._console.is_dumb_terminal:
            with Live(now(), console=self._console, transient=True, auto_refresh=False) as screen:
                while True:
                    await asyncio.sleep(REFRESH_S)
                    screen.update(now(), refresh=True)
        while True:
            await asyncio.sleep(LINE_S)
            view.plain(self._console, self._accounts, self._status, self._elapsed)

    def _conclude(self, interrupted: bool) -> int:
        view.summary(self._console, self._accounts, self._status)
        for error in self._status.errors:
            view.line(self._console, error, "red")
        if self._options.duration is None:
            return 1 if self._status.errors else 0
        if interrupted:
            view.line(self._console, "Interrupted; the results were not checked.", "red")
            return 1
        faults = self._accounts.faults()
        for fault in faults:
            view.line(self._console, fault, "red")
        if faults or self._status.errors:
            view.line(self._console, "Some readings are missing or unacknowledged, see above.", "red")
            return 1
        view.line(self._console, "Every reading was acknowledged and is in Spark's results.", "green")
        return 0

    def _say_ready(self, what: str) -> None:
        view.line(self._console, f"{what} after {self._elapsed:.1f} s.")

    @property
    def _elapsed(self) -> float:
        return time.perf_counter() - self._started


async def create_topics(bootstrap: str) -> None:
    """Create the demo's topics; existing ones are kept."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        known = set(await admin.list_topics())
        missing = [NewTopic(name, 3, 1) for name in TOPICS if name not in known]
        if missing:
            await admin.create_topics(missing)
    finally:
        await admin.close()


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group, preferably of a process: clients fail as a consequence when a process has ended."""
    own, _ = errors.split(ProcessError)
    found: BaseException = own or errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
