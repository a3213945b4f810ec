"""A gateway in its own process, as a user starts it; it can be pinned to processors, killed, restarted and measured."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import aiohttp

from loadtest.child import command_line
from loadtest.start import Child

LISTENERS: Final = ("mqtt", "amqp", "http", "management")
START_S: Final = 180.0  # the embedded Kafka may take 120
METRICS_S: Final = 30.0
_POLL_S: Final = 0.01
_BUGS: Final = ("Traceback", "was contained", "exception was never retrieved", "Task was destroyed", "Unclosed")


class GatewayProcess(Child):
    """One `trivium up`. The first start takes free ports, which later starts use again. It ends when this process does.

    Attributes:
        addresses: the content of the ready file.
        starts: how often it was started.
    """

    def __init__(
        self,
        directory: Path,
        bootstrap: str | None,
        *,
        environment: Mapping[str, str] | None = None,
        processors: set[int] | None = None,
        checkout: Path | None = None,
    ) -> None:
        """Prepare a gateway without starting it.

        Args:
            directory: for its log, ready file and data; made if it does not exist.
            bootstrap: Kafka's address. None uses the embedded broker.
            environment: settings, `TRIVIUM_...`.
            processors: processors it may run on (Linux).
            checkout: directory of the code to run. None means the working directory.
        """
        self.addresses: dict[str, Any] = {}
        self.starts = 0
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / "gateway.log"
        self._directory = directory
        self._bootstrap = bootstrap
        self._environment = dict(environment or {})
        self._processors = processors
        self._checkout = checkout
        self._ready = directory / "ready.json"

    async def launch(self) -> None:
        """Start it without waiting."""
        self._ready.unlink(missing_ok=True)
        argv = [sys.executable, "-m", "gateway", "up", "--ready-file", str(self._ready)]
        argv += ["--data-dir", str(self._directory / "data")]
        for listener in LISTENERS:
            argv += [f"--{listener}", self.addresses.get(listener, "127.0.0.1:0")]
        argv += ["--kafka-port", "0"] if self._bootstrap is None else ["--bootstrap-servers", self._bootstrap]
        await self.spawn(
            *command_line(*argv),
            log=self.log,
            env={"TRIVIUM_DRAIN__LEAD_S": "0", **os.environ, **self._environment},  # there is no load balancer
            cwd=self._checkout,  # the first place where `-m` looks for modules
        )
        if self._processors:
            os.sched_setaffinity(self.pid, self._processors)
        self.starts += 1

    async def start(self) -> None:
        """Start it and wait until it is ready."""
        await self.launch()
        await self.wait_ready()

    async def wait_ready(self, limit_s: float | None = START_S) -> None:
        """Wait until every listener accepts connections, for at most `limit_s`.

        Raises:
            RuntimeError: it ended, or is not ready in time.
        """
        try:
            async with asyncio.timeout(limit_s):
                while not self._ready.exists():
                    if not self.is_running:
                        raise RuntimeError(f"the gateway ended: {self._last_lines()}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise RuntimeError(f"the gateway is not ready after {limit_s:g} s: {self._last_lines()}") from error
        self.addresses = json.loads(self._ready.read_text())

    def bugs(self) -> list[str]:
        """Return signs of bugs of ours in its log, with their context."""
        log = self.log.read_text(errors="replace")
        return [
            f"the log says {word!r}: {log[max(0, log.index(word) - 500) :][:3000]}" for word in _BUGS if word in log
        ]

    def _last_lines(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])

    def address(self, listener: str) -> tuple[str, int]:
        """Return the host and port of a listener."""
        host, _, port = str(self.addresses[listener]).rpartition(":")
        return host, int(port)

    @property
    def kafka(self) -> str:
        """Kafka's address."""
        return str(self.addresses["kafka"])

    async def metrics(self) -> dict[str, float]:
        """Return its metrics: values by name with labels. Raises ClientError or TimeoutError if it does not answer."""
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=METRICS_S)) as http,
            http.get(f"http://{self.addresses['management']}/metrics") as answer,
        ):
            return read_metrics(await answer.text())


def read_metrics(text: str) -> dict[str, float]:
    """Read the metrics of an answer of `/metrics`: values by name with labels."""
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop a process with SIGSTOP during the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def process_cpu(pid: int, *, ended_children: bool = False) -> float:
    """Return a process's user and system CPU in seconds, or with that of its children that have ended (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if ended_children else 13])) / os.sysconf("SC_CLK_TCK")


def loop_cpu(pid: int) -> float:
    """Return the CPU of a process's first thread, which runs the event loop, in seconds (Linux)."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def process_resident(pid: int) -> int:
    """Return a process's resident memory in bytes (Linux)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def process_descriptors(pid: int) -> int:
    """Return the number of a process's open file descriptors (Linux)."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def children(pid: int) -> list[int]:
    """Return the processes that a process has started and that run (Linux)."""
    return [int(one) for path in Path(f"/proc/{pid}/task").glob("*/children") for one in path.read_text().split()]
