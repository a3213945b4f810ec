"""A Kafka broker for the faults: it can be killed, and is only restarted on demand.

It is the embedded one of `trivium up`, which formats the data and finds Java and jars. Then the broker runs with the
same command line on the same data, without the gateway. A second listener is for a proxy, whose address Kafka
advertises to the clients of that listener.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, Protocol

from loadtest.faults.proxy import Proxy
from loadtest.gateway import GatewayProcess, children
from loadtest.ports import free_port
from loadtest.start import Child

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


class KafkaProcess(Child):
    """A Kafka broker in a directory; see `kafka_behind_proxy`. `inner` is the port of its second listener."""

    def __init__(self, directory: Path, inner: int) -> None:
        """Prepare it without starting it."""
        self._directory = directory
        self._home = directory / "data" / "kafka"
        self._inner = inner
        self._port = 0
        self._command: list[str] = []

    @property
    def bootstrap_servers(self) -> str:
        """The address, without any proxy."""
        return f"{HOST}:{self._port}"

    async def prepare(self, outer: int) -> None:
        """Have a gateway format the data, and copy its broker's command line; `outer` is the proxy's port."""
        host = GatewayProcess(self._directory, None)
        await host.start()
        self._port = int(host.kafka.rpartition(":")[2])
        (broker,) = children(host.pid)
        command = _command_of(broker)
        await host.stop()
        text = (self._home / command[-1]).read_text()
        controller = int(re.findall(r"^listeners=.*:(\d+)$", text, re.MULTILINE)[0])
        ours = second_listener(self._port, controller, self._inner, outer)  # later settings override earlier ones
        settings = self._home / "first.properties"
        settings.write_text(text + "".join(f"{key}={value}\n" for key, value in ours.items()))
        self._command = [*command[:-1], settings.name]

    async def start(self) -> None:
        """Start it, and wait until it answers.

        Raises:
            RuntimeError: it ended while starting.
        """
        command = ("setpriv", "--pdeathsig", "KILL", *self._command)  # it ends with us
        await self.spawn(*command, log=self._home / "logs" / "faults.out", cwd=self._home)
        async with asyncio.timeout(START_S):
            while not await self._answers():
                if not self.is_running:
                    raise RuntimeError(f"Kafka ended while it started; see {self._home / 'logs'}")
                await asyncio.sleep(_POLL_S)

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


def _command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")


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
