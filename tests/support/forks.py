"""Gateway processes from `tests.support.fork_server`, one server for each worker of pytest."""

from __future__ import annotations

import asyncio
import collections
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

LARGEST_ANSWER: Final = 1 << 12


class ForkedProcess:
    """A forked gateway, with what tests need of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        """Wait until the process has ended and return its exit code; `-N` if signal N ended it."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal.

        Raises:
            ProcessLookupError: the process has ended.
        """
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def end(self, returncode: int) -> None:
        """Take the exit code."""
        self.returncode = returncode
        self._ended.set()


class ForkServer:
    """The connection to the server, which starts at the first request."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._asked: collections.deque[asyncio.Future[ForkedProcess]] = collections.deque()
        self._running: dict[int, ForkedProcess] = {}

    async def fork(self, arguments: Sequence[str], environment: Mapping[str, str], log: int) -> ForkedProcess:
        """Start `trivium ARGUMENTS`; standard output and error go to the descriptor `log`.

        Raises:
            RuntimeError: the server has ended.
        """
        connection = self._connection or self._start()
        asked = asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        request = json.dumps({"arguments": arguments, "environment": dict(environment)})
        socket.send_fds(connection, [request.encode()], [log])
        return await asked

    def close(self) -> None:
        """End the server; gateways that run go on."""
        if self._connection is not None and self._server is not None:
            self._connection.close()
            self._server.wait()

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = (sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno()))
            self._server = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        ours.setblocking(False)
        self._connection = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._read, ours)
        return ours

    def _read(self, connection: socket.socket) -> None:
        text = connection.recv(LARGEST_ANSWER)
        if not text:
            asyncio.get_running_loop().remove_reader(connection.fileno())
            for asked in self._asked:
                asked.set_exception(RuntimeError("the fork server has ended"))
            return
        answer: dict[str, Any] = json.loads(text)
        pid = answer["pid"]
        if "returncode" in answer:
            self._running.pop(pid).end(answer["returncode"])
        else:
            process = self._running[pid] = ForkedProcess(pid)
            asked = self._asked.popleft()
            if not asked.done():
                asked.set_result(process)


forks: Final = ForkServer()
