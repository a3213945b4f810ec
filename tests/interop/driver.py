"""Foreign clients as child processes: one driver program per library, and one line protocol per protocol.

A driver reads commands from standard input, one JSON object a line: `{"n": 1, "do": "connect", "client": "c7", ...}`,
and answers `{"n": 1, "result": {...}}` or `{"n": 1, "error": "..."}`, in any order. It reports events as
`{"client": "c7", "event": ..., ...}`; its first line is `{"event": "ready", "name": ..., "version": ...}`. Bytes are in
base64. A driver has any number of clients, by name.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.interop.toolchains import ToolchainError

ROOT = Path(__file__).parents[2]
LINE_LIMIT = 2**24  # a 1 MB message makes a line of 1.4 MB


class RefusedError(Exception):
    """The library refused, or the connection ended before the answer."""


Drivers = Callable[[str], Awaitable["Driver"]]


@asynccontextmanager
async def started(commands: Mapping[str, Callable[[], list[str]]]) -> AsyncIterator[Drivers]:
    """`await drivers("paho")` starts each driver at its first use, and skips the test if its tools are missing."""
    running: dict[str, Driver] = {}

    async def get(library: str) -> Driver:
        if library not in running:
            try:
                argv = await asyncio.to_thread(commands[library])
            except ToolchainError as error:
                pytest.skip(f"{library}: {error}")
            running[library] = await Driver(argv).start()
        return running[library]

    yield get
    for driver in running.values():
        await driver.stop()


class Owner(Protocol):
    """A client, as its driver sees it."""

    name: str

    def happened(self, said: dict[str, Any]) -> None:
        """Record an event."""


class Driver:
    """One driver process."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.name = self.version = ""
        self._argv = argv
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._clients: dict[str, Owner] = {}

    async def start(self) -> Driver:
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_LIMIT,
        )
        assert self._process.stdout is not None
        ready = json.loads(await asyncio.wait_for(self._process.stdout.readline(), 60) or "{}")
        assert ready.get("event") == "ready", f"{self._argv} did not start: {ready}"
        self.name, self.version = ready["name"], ready["version"]
        self._reading = asyncio.get_running_loop().create_task(self._read())
        return self

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 5)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            said = json.loads(line)
            if "n" not in said:
                self._clients[said["client"]].happened(said)
                continue
            answer = self._answers.pop(said["n"])
            if answer.done():
                continue
            if "error" in said:
                answer.set_exception(RefusedError(said["error"]))
            else:
                answer.set_result(said["result"])
        for answer in self._answers.values():
            answer.cancel()

    def knows(self, client: Owner) -> bool:
        """Return whether the driver has received a command for this client."""
        return client.name in self._clients

    def send(self, do: str, client: Owner, **fields: Any) -> asyncio.Future[dict[str, Any]]:
        """Write one command, and return the future of its answer."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._clients[client.name] = client
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"n": number, "do": do, "client": client.name, **fields}).encode() + b"\n")
        return answer


def encode(data: bytes) -> str:
    """Encode bytes for the line protocol."""
    return base64.b64encode(data).decode()


class Wire:
    """A TCP proxy to the gateway on a fixed port; it can cut all connections, as a broken network does."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self._writers: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Wire]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address: tuple[str, int] = server.sockets[0].getsockname()[:2]
        try:
            yield self
        finally:
            server.close()
            self.cut()
            await server.wait_closed()

    def cut(self) -> None:
        """Abort all connections, without a close."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self.target)
        ends = {writer, far_writer}
        self._writers |= ends
        async with asyncio.TaskGroup() as group:
            group.create_task(self._copy(reader, far_writer))
            group.create_task(self._copy(far_reader, writer))
        self._writers -= ends

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        except (OSError, RuntimeError):  # cut; uvloop's transports raise RuntimeError
            pass
        finally:
            writer.close()
