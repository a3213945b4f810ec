"""Run a real Apache Kafka broker (KRaft) as a child process, with a data directory that survives restarts.

It is a single broker, or a node of a cluster on this machine (`tools.cluster`).

The broker cannot outlive the gateway, whatever kills that (`gateway.embedded.child`). It leads its own process session,
so that Ctrl-C in the terminal reaches only the gateway, which drains first and stops the broker last.

In the directory: `data/` (Kafka's), `logs/broker.log` (the broker's log), `logs/broker.out` (output of the JVM),
`server.properties`, `broker.json` (version, cluster id, ports), `lock`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import structlog

from gateway.embedded import storage
from gateway.embedded.child import command_line
from gateway.embedded.class_archive import archive_options, archive_path
from gateway.embedded.jars import Report, cache_directory, ensure_jars, locked_version
from gateway.embedded.java import find_java
from gateway.embedded.open_files import check_descriptors
from gateway.embedded.start_progress import StartProgress, read_log
from gateway.embedded.storage import HOST, BrokerError, Marker, PortTakenError
from gateway.kafka.driver.probe import broker_answers
from gateway.settings.config import EmbeddedConfig

log = structlog.get_logger(__name__)

PATIENCE_S = 120.0  # without progress; log recovery after a crash may take any time
LOG_INTERVAL_S = 15.0  # interval between log lines about a slow start
STOP_LIMIT_S = 4.0  # SIGTERM to exit takes about one second; the whole gateway has ten
SHORTEST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.2
PORT_ATTEMPTS = 3  # another program may take a free port between the check and the broker's bind

JVM_OPTIONS = (
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExitOnOutOfMemoryError",
    "-Djava.awt.headless=true",
    "-Dlog4j2.configurationFile=log4j2.properties",
)

_INFORMATIVE = re.compile(r"\b(?:FATAL|ERROR)\b|Exception\b|^Error:|^Invalid |No space left")
_EXCEPTION = re.compile(r"(?:Caused by: )?[\w.$]+(?:Exception|Error): ")  # the first line of a stack trace
_STAMP = re.compile(r"^\S+ (?:FATAL|ERROR|WARN|INFO) ")


class EmbeddedBroker:
    """A broker. `start` and `stop` may be called repeatedly; the data and the ports stay.

    Call it from the main thread only: the kernel kills the broker when the thread that started it ends.
    """

    def __init__(
        self,
        directory: Path,
        *,
        java: Path,
        jars: Sequence[Path],
        port: int = 0,
        controller_port: int = 0,
        heap: str = "1g",
        settings: Mapping[str, str] | None = None,
        java_options: Sequence[str] = (),
        patience_s: float = PATIENCE_S,
        format_options: Sequence[str] = (),
    ) -> None:
        """Describe the broker; nothing happens before `start`.

        `jars` is the set `kafka` of the jar lock, `heap` the JVM's largest heap (`1g`). Port 0 means the port of the
        last start, or a free one. `settings` and `java_options` override the defaults. A start without progress for
        `patience_s` fails. New data are formatted with `format_options` of Kafka's storage tool.
        """
        self.directory = directory.absolute()
        self._java = java
        self._jars = tuple(jars)
        self._wanted = (port, controller_port)
        self._java_options = (f"-Xmx{heap}", *JVM_OPTIONS, *java_options)
        self._settings = dict(settings or {})
        self._patience_s = patience_s
        self._node = int(self._settings.get("node.id", storage.NODE))
        self._format_options = tuple(format_options)
        self._kafka = locked_version("kafka", "kafka_2.13")
        self._process: asyncio.subprocess.Process | None = None
        self._port = port
        self._log_position = 0
        self._is_ending = False

    @property
    def port(self) -> int:
        """The client port in use; before the first start, the configured one."""
        return self._port

    @property
    def bootstrap_servers(self) -> str:
        """The address for Kafka clients."""
        return f"{HOST}:{self._port}"

    @property
    def is_running(self) -> bool:
        """Whether the broker process runs."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """The process id of the Java process. Raises RuntimeError when none runs."""
        if self._process is None or self._process.returncode is not None:
            raise RuntimeError("the embedded broker is not running")
        return self._process.pid

    @property
    def log_file(self) -> Path:
        """The broker's own log."""
        return self.directory / "logs" / "broker.log"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the broker and return when it serves clients. Waits as long as the start makes progress.

        Raises:
            PortTakenError: a configured port is in use; the text names the key.
            BrokerError: the directory is in use, was written by another version or has more logs than we may open
                files, the disk is full, or the broker has ended (with the line of its log that says why).
        """
        if self.is_running:
            raise RuntimeError("the embedded broker is running already")
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("start the broker from the main thread: it ends with the thread that started it")
        try:
            (self.directory / "logs").mkdir(parents=True, exist_ok=True)
            self.directory.chmod(0o700)  # it holds clients' messages
            storage.check_space(self.directory)
            check_descriptors(self.directory)
            descriptor = storage.lock(self.directory)
        except OSError as error:
            raise BrokerError(f"cannot write to {self.directory} (data_dir): {error}") from error
        try:
            await self._start_locked(descriptor)
        finally:
            os.close(descriptor)  # from now on only the broker holds the lock

    async def _start_locked(self, descriptor: int) -> None:
        """Choose ports, format once, run; try other free ports if another program has taken one meanwhile."""
        marker = storage.read_marker(self.directory, self._kafka)
        last = (marker.port, marker.controller_port) if marker else (0, 0)
        cluster_id = marker.cluster_id if marker else storage.new_cluster_id()
        for attempt in range(PORT_ATTEMPTS):
            port = storage.choose_port(self._wanted[0], last[0], "embedded.port", self._wanted[1])
            controller = storage.choose_port(self._wanted[1], last[1], "embedded.controller_port", port)
            self._port = port
            try:
                storage.write_marker(self.directory, Marker(storage.LAYOUT, self._kafka, cluster_id, port, controller))
                (self.directory / "log4j2.properties").write_text(storage.LOG4J2)
                self._write_settings("server.properties", port, controller, "data")
                await self._format_once(cluster_id, port, controller)
            except OSError as error:
                raise BrokerError(f"cannot write to {self.directory} (data_dir): {error}") from error
            try:
                await self._run(descriptor)
            except PortTakenError:
                if all(self._wanted) or attempt + 1 == PORT_ATTEMPTS:
                    raise
                last = (0, 0)
            else:
                return

    def _write_settings(self, name: str, port: int, controller_port: int, data: str) -> None:
        text = storage.server_properties(port, controller_port, data, self._settings)
        (self.directory / name).write_text(text)

    async def _format_once(self, cluster_id: str, port: int, controller_port: int) -> None:
        """Format the storage under another name first: an interrupted format leaves nothing that looks like data."""
        data, aside = self.directory / "data", self.directory / "data.new"
        if data.exists():
            return
        if aside.exists():
            shutil.rmtree(aside)
        self._write_settings("format.properties", port, controller_port, aside.name)
        process = await self._spawn(
            "format.out", (), "kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", "format.properties",
            *self._format_options,
        )  # fmt: skip
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if code != 0:
            raise self._failure(f"the storage in {self.directory} could not be formatted", "format.out")
        aside.rename(data)

    async def _run(self, descriptor: int) -> None:
        """Start the process and wait until it serves clients."""
        self._is_ending = False
        self._log_position = self.log_file.stat().st_size if self.log_file.exists() else 0
        process = await self._spawn("broker.out", (descriptor,), "kafka.Kafka", "server.properties")
        self._process = process
        storage.note_holder(descriptor, process.pid)
        try:
            await self._wait_until_serving(process)
        except BaseException:
            await self.kill()
            raise

    async def _wait_until_serving(self, process: asyncio.subprocess.Process) -> None:
        """Wait until the broker serves clients, as long as the start makes progress."""
        pause = SHORTEST_PAUSE_S
        progress = StartProgress(process.pid, self.log_file, self._log_position)
        loop = asyncio.get_running_loop()
        began = logged = moved = loop.time()
        while not await broker_answers(HOST, self._port, node=self._node):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), pause)
            if process.returncode is not None:
                raise self._failure("the embedded broker ended while it started", "broker.out")
            pause = min(pause * 1.5, LONGEST_PAUSE_S)
            now = loop.time()
            if progress.has_advanced():
                moved = now
            elif now - moved > self._patience_s:
                raise BrokerError(
                    f"the embedded broker hangs while starting: no progress for {self._patience_s:g} s, last log line:"
                    f" {progress.last_line or 'none'} (see {self.log_file})"
                )
            if now - logged > LOG_INTERVAL_S:
                logged = now
                log.warning(
                    "the embedded broker is still starting",
                    for_s=round(now - began),
                    last_progress_s_ago=round(now - moved),
                    last_line=progress.last_line,
                )

    async def _spawn(self, output: str, descriptors: Sequence[int], *arguments: str) -> asyncio.subprocess.Process:
        """Start a Java child in the broker's directory, with its output in a file in `logs/`."""
        classpath = ":".join(map(str, self._jars))
        command = command_line(str(self._java), *self._java_options, "-cp", classpath, *arguments)
        with (self.directory / "logs" / output).open("wb") as file:
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=asyncio.subprocess.STDOUT,
                cwd=self.directory,
                pass_fds=descriptors,
                start_new_session=True,
            )

    async def watch(self) -> None:
        """Wait until the broker ends. Returns after `stop` or `kill`, raises BrokerError when it ended by itself."""
        process = self._process
        if process is None:
            raise RuntimeError("the embedded broker was not started")
        code = await process.wait()
        if not self._is_ending:
            raise self._failure(f"the embedded broker ended unexpectedly (code {code})", "broker.out")

    async def stop(self, limit_s: float = STOP_LIMIT_S) -> bool:
        """Stop the broker: SIGTERM, and SIGKILL after `limit_s`. Does nothing when none runs.

        Returns:
            Whether SIGTERM was enough; acknowledged records are safe in both cases.
        """
        if self._end_by(signal.SIGTERM):
            assert self._process is not None
            try:
                await asyncio.wait_for(self._process.wait(), limit_s)
            except TimeoutError:
                return False
            finally:
                await self.kill()
        return True

    async def kill(self) -> None:
        """Kill the broker (SIGKILL), like a crash. Does nothing when none runs."""
        if self._end_by(signal.SIGKILL):
            assert self._process is not None
            await self._process.wait()

    def _end_by(self, number: signal.Signals) -> bool:
        """Send a signal that ends the broker. Returns whether a process was running."""
        if self._process is None or self._process.returncode is not None:
            return False
        self._is_ending = True
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        return True

    def _failure(self, what: str, output: str) -> BrokerError:
        """Build the error with the reason from the broker's output and log."""
        printed, _ = read_log(self.directory / "logs" / output, 0)
        logged, _ = read_log(self.log_file, self._log_position)
        lines = [line for line in printed + logged if line.strip()]
        text = "\n".join(lines)
        if "No space left on device" in text:
            return BrokerError(f"the disk is full, the embedded broker cannot write to {self.directory}")
        if "Address already in use" in text:
            return PortTakenError(
                f"{what}: its port {self._port} or its controller port is taken"
                " (embedded.port, embedded.controller_port)"
            )
        informative = [line for line in lines if _EXCEPTION.match(line)]
        informative += [line for line in lines if _INFORMATIVE.search(line)] + lines[-1:]
        why = _STAMP.sub("", informative[0]) if informative else "it printed nothing"
        return BrokerError(f"{what}: {why} (see {self.log_file})")


def embedded_broker(config: EmbeddedConfig, data_dir: Path, report: Report = lambda progress: None) -> EmbeddedBroker:
    """Find Java, fetch the jars, and describe the configured broker in `data_dir`/kafka.

    This may take long: call it before the event loop runs.

    Raises:
        SetupError: JavaError or JarError.
    """
    java = find_java()
    jars = ensure_jars("kafka", report=report)
    return EmbeddedBroker(
        data_dir / "kafka",
        java=java.path,
        jars=jars,
        port=config.port,
        controller_port=config.controller_port,
        heap=config.heap,
        java_options=archive_options(archive_path("kafka", java, jars, cache_directory())),
    )
