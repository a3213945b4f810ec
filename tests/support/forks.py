"""Gateway processes from `tests.support.fork_server`, one server for each worker of pytest."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tests.support.waiting import wait_until

LARGEST_ANSWER: Final = 1 << 12


class ForkedProcess:
    """A forked gateway, with what tests need of `asyncio.subprocess.Process`.

    Attributes:
        pid: its process id; 0 until the server has answered.
    """

    def __init__(self, read: Callable[[], None]) -> None:
        self.pid = 0
        self._read = read
        self._returncode: int | None = None

    @property
    def returncode(self) -> int | None:
        """The exit code, `-N` if signal N ended it; None while it runs."""
        if self._returncode is None:
            self._read()
        return self._returncode

    async def wait(self) -> int:
        """Wait until the process has ended and return its exit code."""
        await wait_until(lambda: self.returncode is not None, math.inf)
        assert self._returncode is not None
        return self._returncode

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

    def take(self, answer: dict[str, Any]) -> None:
        """Take an answer of the server."""
        self.pid = answer["pid"]
        self._returncode = answer.get("returncode")


class ForkServer:
    """The connection to the server, which starts at the first request."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._processes: list[ForkedProcess] = []

    async def fork(self, arguments: Sequence[str], environment: Mapping[str, str], log: int) -> ForkedProcess:
        """Start `trivium ARGUMENTS`; standard output and error go to the descriptor `log`.

        Raises:
            RuntimeError: the server has ended.
        """
        connection = self._connection or self._start()
        request = {"number": len(self._processes), "arguments": arguments, "environment": dict(environment)}
        socket.send_fds(connection, [json.dumps(request).encode()], [log])
        process = ForkedProcess(self._read)
        self._processes.append(process)
        await wait_until(lambda: self._read() or process.pid)
        return process

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
        return ours

    def _read(self) -> None:
        """Take all answers that have arrived."""
        assert self._connection is not None
        with contextlib.suppress(BlockingIOError):
            while text := self._connection.recv(LARGEST_ANSWER):
                answer = json.loads(text)
                self._processes[answer["number"]].take(answer)
            raise RuntimeError("the fork server has ended")


forks: Final = ForkServer()
