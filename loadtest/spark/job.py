"""A job in its own process, as a user starts it: it can be started, killed, restarted and stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from loadtest.gateway import children, process_cpu
from loadtest.spark.readings import Topics
from loadtest.start import Child, start_process

READY_S = 400.0
STOP_S = 180.0


class Job(Child):
    """`trivium spark run max-temperature` on its own topics, or `trivium spark run FILE`.

    Attributes:
        bootstrap: Kafka's address.
        topics: topics of max-temperature; a job file names its own.
        checkpoint: its directory.
    """

    def __init__(
        self,
        bootstrap: str,
        topics: Topics,
        directory: Path,
        *options: str,
        file: Path | None = None,
        command: str = "run",
        quick_start: bool = True,
    ) -> None:
        self.bootstrap = bootstrap
        self.topics = topics
        self.checkpoint = directory / "checkpoint"
        self._ready = directory / "spark-ready.json"
        self._log = directory / "spark.err"
        self._output = directory / "spark.out"
        self._reports: list[dict[str, Any]] = []
        self._read = 0  # bytes of the output
        own = ["--source", topics.source, "--target", topics.target, "--dead-letter", topics.dead_letter]
        self._argv = [
            sys.executable, "-m", "gateway", "spark", command, "max-temperature" if file is None else str(file),
            "--bootstrap-servers", bootstrap, "--checkpoint", str(self.checkpoint),
            "--ready-file", str(self._ready), *(["--quick-start"] if quick_start else []),
            *(own if file is None else []), *options,
        ]  # fmt: skip

    async def start(self) -> None:
        """Start it, and wait until it reads."""
        await self.launch()
        await self.wait_ready()

    async def launch(self) -> None:
        """Start it in its own process group with its JVM, without waiting."""
        self._ready.unlink(missing_ok=True)
        with self._log.open("ab") as log, self._output.open("ab") as output:
            self._process = await start_process(*self._argv, stdout=output, stderr=log, start_new_session=True)

    async def wait_ready(self) -> None:
        """Wait until it reads; RuntimeError if it ended."""
        await self.wait_until(self._ready.exists, READY_S)

    @property
    def reports(self) -> list[dict[str, Any]]:
        """The output lines of all its runs so far."""
        if not self._output.exists():  # not started yet
            return []
        with self._output.open("rb") as output:
            output.seek(self._read)
            new = output.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        # spark-submit prints other lines too
        self._reports += [json.loads(line) for line in whole.splitlines() if line.startswith(b'{"kind"')]
        return self._reports

    async def wait_until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Wait for a condition; RuntimeError if the job ended, TimeoutError after `limit_s`."""
        async with asyncio.timeout(limit_s):
            while not condition():
                if not self.is_running:
                    raise RuntimeError(f"the job ended: {self._log.read_text()[-2000:]}")
                await asyncio.sleep(0.1)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Kill the job, however the scenario ended."""
        await self.kill()

    def cpu(self) -> float:
        """Return the CPU seconds of the job and its JVM so far (Linux)."""
        return sum(process_cpu(process) for process in (self.pid, *children(self.pid)))

    def batches(self) -> list[dict[str, Any]]:
        """Return the reports of non-empty batches of all its runs."""
        return [line for line in self.reports if line["kind"] == "progress" and line["rows"]]

    def rows(self) -> int:
        """Return the records in these batches."""
        return sum(line["rows"] for line in self.batches())

    async def kill(self) -> None:
        """Kill the job and its JVM with SIGKILL, if it runs."""
        if self.is_running:
            os.killpg(self.pid, signal.SIGKILL)
            await self.ended()

    async def stopped(self) -> int:
        """Stop the job cleanly, and return its exit code."""
        self.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_S):
            return await self.ended()
