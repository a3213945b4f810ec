"""A Kafka broker of the bench's own: killed, and not started again before the bench wants it.

It is the embedded one of `trivium up`: that formats the data and finds Java and jars; then the broker runs by the same
command line, on the same data, without the gateway. A second listener is for a proxy, whose address Kafka tells to all
who come by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final, Protocol

from loadtest.faults.proxy import Proxy, free_port
from loadtest.gateway import GatewayProcess
from loadtest.start import start_process

HOST: Final = "127.0.0.1"
START_S: Final = 120.0
_POLL_S: Final = 0.05
_API_VERSIONS: Final = b"\0\0\0\x11\0\x12\0\0\0\0\0\1\0\x07trivium"  # ApiVersions, version 0


class Kafka(Protocol):
    """A broker that can be hurt."""

    @property
    def pid(self) -> int:
        """Its process."""

    @property
    def bootstrap_servers(self) -> str:
        """Where it listens, without any proxy."""

    async def start(self) -> None:
        """Start it again, and wait until it serves."""

    async def kill(self) -> None:
        """SIGKILL."""


def second_listener(port: int, controller: int, inner: int, outer: int) -> dict[str, str]:
    """Settings of a broker that also listens at `inner`, and says to those who come that way that it is at `outer`."""
    return {
        "listeners": f"PLAINTEXT://{HOST}:{port},PROXIED://{HOST}:{inner},CONTROLLER://{HOST}:{controller}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{port},PROXIED://{HOST}:{outer}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,PROXIED:PLAINTEXT,CONTROLLER:PLAINTEXT",
    }


class Broker:
    """A broker's process, by a command line whose last argument is its settings."""

    def __init__(self, home: Path, port: int, command: list[str]) -> None:
        """Nothing runs yet; `home`: the working directory, with `logs`."""
        self.command = command
        self._home = home
        self._port = port
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process is not None
        return self._process.pid

    @property
    def bootstrap_servers(self) -> str:
        """Where it listens, without any proxy."""
        return f"{HOST}:{self._port}"

    @property
    def is_running(self) -> bool:
        """Whether its process lives."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start it, and wait until it answers.

        Raises:
            RuntimeError: it ended, or takes too long.
        """
        self._process = await self._spawn(self.command)
        async with asyncio.timeout(START_S):
            while not await self._answers():
                if not self.is_running:
                    raise RuntimeError(f"Kafka ended while it started; see {self._home / 'logs'}")
                await asyncio.sleep(_POLL_S)

    async def _spawn(self, command: list[str]) -> asyncio.subprocess.Process:
        with (self._home / "logs" / "faults.out").open("ab") as out:
            return await start_process(
                "setpriv", "--pdeathsig", "KILL", *command,  # it does not outlive us
                stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, cwd=self._home, start_new_session=True,
            )  # fmt: skip

    async def _answers(self) -> bool:
        """Whether it answers a request; it listens long before."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(1.0):
                reader, writer = await asyncio.open_connection(HOST, self._port)
                try:
                    writer.write(_API_VERSIONS)
                    await reader.readexactly(4)
                    return True
                finally:
                    writer.close()
        return False

    async def kill(self) -> None:
        """SIGKILL."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM."""
        await self._end(signal.SIGTERM)

    async def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)
            await self._process.wait()

    async def ended(self) -> None:
        """Wait until it has ended by itself."""
        assert self._process is not None
        await self._process.wait()


class KafkaProcess(Broker):
    """The bench's own Kafka, in a directory; see `kafka_behind_proxy`.

    The port of its second listener, where the proxy goes, is `inner`.
    """

    def __init__(self, directory: Path, inner: int) -> None:
        """Nothing runs yet."""
        super().__init__(directory / "data" / "kafka", 0, [])
        self._inner = inner
        self._directory = directory
        self._controller = 0

    async def prepare(self, outer: int) -> None:
        """Let a gateway make the data, and take over its broker's command line; `outer` is the proxy's port."""
        host = GatewayProcess(self._directory, None)
        await host.start()
        self._port = int(host.kafka.rpartition(":")[2])
        command = _command_of_child(host.pid)
        await host.stop()
        text = (self._home / command[-1]).read_text()
        self._controller = int(re.findall(r"^listeners=.*:(\d+)$", text, re.MULTILINE)[0])
        ours = second_listener(self._port, self._controller, self._inner, outer)
        self.command = [*command[:-1], self._write("first.properties", text, ours)]

    def _write(self, name: str, text: str, ours: Mapping[str, str]) -> str:
        """Settings; the later ones count."""
        (self._home / name).write_text(text + "".join(f"{key}={value}\n" for key, value in ours.items()))
        return name


def _command_of_child(pid: int) -> list[str]:
    """The command line of a process's only child (Linux)."""
    lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    (child,) = (number for numbers in lists for number in numbers)
    return Path(f"/proc/{child}/cmdline").read_text().rstrip("\0").split("\0")


@contextlib.asynccontextmanager
async def kafka_behind_proxy(directory: Path) -> AsyncIterator[tuple[KafkaProcess, Proxy]]:
    """Kafka, and the proxy before its second listener, both started."""
    await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
    inner = free_port()
    kafka, proxy = KafkaProcess(directory, inner), Proxy((HOST, inner))
    try:
        await proxy.start()  # first: its port is its own from now on
        await kafka.prepare(proxy.address[1])
        await kafka.start()
        yield kafka, proxy
    finally:
        await asyncio.gather(proxy.stop(), kafka.stop())
