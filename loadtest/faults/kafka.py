"""A Kafka broker for the faults: it can be killed, and is only restarted on demand.

It is the embedded one of `trivium up`, which formats the data and finds Java and jars. Then the broker runs with the
same command line on the same data, without the gateway. A second listener is for a proxy, whose address Kafka
advertises to the clients of that listener.
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

from loadtest.faults.proxy import Proxy
from loadtest.gateway import GatewayProcess
from loadtest.ports import free_port
from loadtest.start import start_process

HOST: Final = "127.0.0.1"
START_S: Final = 120.0
_POLL_S: Final = 0.05
_API_VERSIONS: Final = b"\0\0\0\x11\0\x12\0\0\0\0\0\1\0\x07trivium"  # ApiVersions, version 0


class Kafka(Protocol):
    """A broker that faults can act on."""

    @property
    def pid(self) -> int:
        """The process id."""

    @property
    def bootstrap_servers(self) -> str:
        """The address, without any proxy."""

    async def start(self) -> None:
        """Start it again, and wait until it serves."""

    async def kill(self) -> None:
        """Kill it with SIGKILL."""


def second_listener(port: int, controller: int, inner: int, outer: int) -> dict[str, str]:
    """Return the settings of a broker with a second listener at `inner`, which is advertised as `outer`."""
    return {
        "listeners": f"PLAINTEXT://{HOST}:{port},PROXIED://{HOST}:{inner},CONTROLLER://{HOST}:{controller}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{port},PROXIED://{HOST}:{outer}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,PROXIED:PLAINTEXT,CONTROLLER:PLAINTEXT",
    }


class Broker:
    """A broker process; the last argument of its command line is the settings file."""

    def __init__(self, home: Path, port: int, command: list[str]) -> None:
        """Prepare a broker without starting it; `home` is the working directory, with `logs`."""
        self.command = command
        self._home = home
        self._port = port
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def bootstrap_servers(self) -> str:
        """The address, without any proxy."""
        return f"{HOST}:{self._port}"

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start it, and wait until it answers.

        Raises:
            RuntimeError: it ended while starting.
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
                "setpriv", "--pdeathsig", "KILL", *command,  # it ends with us
                stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, cwd=self._home, start_new_session=True,
            )  # fmt: skip

    async def _answers(self) -> bool:
        """Return whether it answers a request; it accepts connections long before."""
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
        """Kill it with SIGKILL."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """Stop it with SIGTERM."""
        await self._end(signal.SIGTERM)

    async def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)
            await self._process.wait()

    async def ended(self) -> None:
        """Wait until it has ended on its own."""
        assert self._process is not None
        await self._process.wait()


class KafkaProcess(Broker):
    """A Kafka broker in a directory; see `kafka_behind_proxy`. `inner` is the port of its second listener."""

    def __init__(self, directory: Path, inner: int) -> None:
        """Prepare it without starting it."""
        super().__init__(directory / "data" / "kafka", 0, [])
        self._inner = inner
        self._directory = directory
        self._controller = 0

    async def prepare(self, outer: int) -> None:
        """Have a gateway format the data, and copy its broker's command line; `outer` is the proxy's port."""
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
        """Write a settings file; later settings override earlier ones."""
        (self._home / name).write_text(text + "".join(f"{key}={value}\n" for key, value in ours.items()))
        return name


def _command_of_child(pid: int) -> list[str]:
    """Return the command line of a process's only child (Linux)."""
    lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    (child,) = (number for numbers in lists for number in numbers)
    return Path(f"/proc/{child}/cmdline").read_text().rstrip("\0").split("\0")


@contextlib.asynccontextmanager
async def kafka_behind_proxy(directory: Path) -> AsyncIterator[tuple[KafkaProcess, Proxy]]:
    """Run Kafka, and a proxy in front of its second listener."""
    await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
    inner = free_port()
    kafka, proxy = KafkaProcess(directory, inner), Proxy((HOST, inner))
    try:
        await proxy.start()  # first, to reserve its port
        await kafka.prepare(proxy.address[1])
        await kafka.start()
        yield kafka, proxy
    finally:
        await asyncio.gather(proxy.stop(), kafka.stop())
