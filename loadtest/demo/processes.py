"""The demo's processes: the gateway with its embedded broker, and the Spark job."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from typing import Any, Final

from loadtest.child import command_line
from loadtest.demo.directory import Directory
from loadtest.start import Child

READY_POLL_S: Final = 0.05
QUICK_JAVA: Final = "-XX:TieredStopAtLevel=1"  # halves Kafka's start-up time; peak throughput is not needed
UNCOMPILED: Final = ("spark.sql.codegen.wholeStage=false", "spark.sql.codegen.factoryMode=NO_CODEGEN")
"""Disables Spark's code generation, which takes a fifth of the CPU time until the first result and does not pay off for
a few readings per second."""
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")


class ProcessError(Exception):
    """A process ended or was not ready in time. The message says which and why, and where its log is."""


class Process(Child):
    """A child process in its own session, so that Ctrl-C reaches only the demo, which stops its children in order.

    Args:
        name: name for messages.
        argv: the command.
        directory: the demo's directory; the child's output goes to its file `errors`.
        log: name of the child's log file, for messages.
    """

    def __init__(self, name: str, argv: list[str], directory: Directory, *, ready: str, errors: str, log: str) -> None:
        self.name = name
        self.ready_file = directory.path / ready
        self.log = directory.path / log
        self._errors = directory.path / errors
        self._argv = argv
        self._lock = directory.lock

    async def start(self) -> None:
        """Start the process."""
        self.ready_file.unlink(missing_ok=True)
        java = f"{QUICK_JAVA} {os.environ.get('JAVA_TOOL_OPTIONS', '')}".strip()
        self._errors.unlink(missing_ok=True)
        environment = {**os.environ, "JAVA_TOOL_OPTIONS": java}
        await self.spawn(*command_line(*self._argv), log=self._errors, env=environment, pass_fds=(self._lock,))

    async def watch(self) -> None:
        """Wait until the process ends on its own, which it should not, then raise ProcessError."""
        code = await self.ended()
        why = f"signal {-code}" if code < 0 else f"exit code {code}: {self._last_output()}"
        raise ProcessError(f"{self.name} ended, {why} (log: {self.log})")

    async def ready(self, timeout: float) -> dict[str, Any]:
        """Wait for the ready file and return its content; raise ProcessError if it does not appear in time."""
        deadline = asyncio.get_running_loop().time() + timeout
        while not self.ready_file.exists():
            if asyncio.get_running_loop().time() > deadline:
                raise ProcessError(f"{self.name} was not ready within {timeout:g} s (log: {self.log})")
            await asyncio.sleep(READY_POLL_S)
        found: dict[str, Any] = json.loads(self.ready_file.read_text())
        return found

    def _last_output(self) -> str:
        lines = _COLOURS.sub("", self._errors.read_text(errors="replace")).splitlines()
        spoken = (
            line.strip() for line in reversed(lines) if line.strip() and not line.startswith("{")
        )  # not a log line
        return next(spoken, "no output")


def gateway(directory: Directory, ports: dict[str, int]) -> Process:
    """Create the process of `trivium up` with the embedded broker, on the given ports."""
    argv = [sys.executable, "-m", "gateway", "up", "--data-dir", str(directory.data)]
    argv += ["--ready-file", str(directory.path / "gateway.json"), "--kafka-port", str(ports["kafka"])]
    for listener in ("mqtt", "amqp", "http", "management"):
        argv += [f"--{listener}", f"127.0.0.1:{ports[listener]}"]
    return Process("gateway", argv, directory, ready="gateway.json", errors="gateway.log", log="gateway.log")


def spark(directory: Directory, bootstrap: str, trigger: str, interval: str | None) -> Process:
    """Create the process of `trivium spark run max-temperature`, which itself waits for Kafka and its topics."""
    argv = [sys.executable, "-m", "gateway", "spark", "run", "max-temperature", "--bootstrap-servers", bootstrap]
    argv += ["--trigger", trigger, "--checkpoint", str(directory.path / "checkpoint" / trigger)]
    argv += ["--ready-file", str(directory.path / "spark.json"), "--log-file", str(directory.path / "spark.log")]
    argv += ["--quick-start", "--die-with-parent", *(f"--conf={setting}" for setting in UNCOMPILED)]
    if interval is not None:
        argv += ["--interval", interval]
    return Process("Spark", argv, directory, ready="spark.json", errors="spark.err", log="spark.log")


def recording(directory: Directory) -> Process:
    """Create the process that records the classes of Kafka and Spark, if need be, for faster starts the next time.

    It runs at the lowest priority.
    """
    argv = ["nice", "-n", "19", sys.executable, "-m", "tools.class_recording"]
    return Process("recording", argv, directory, ready="none", errors="recording.log", log="recording.log")
