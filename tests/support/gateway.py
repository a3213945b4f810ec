"""A real gateway process for tests: `trivium up`, by default forked from a process that has imported it already."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.support.forks import ForkedProcess, forks
from tests.support.waiting import wait_until


class GatewayProcess:
    """One `trivium up` process; its ready file contains its addresses.

    Attributes:
        program: the command line before `up`.
        is_forked: whether the default program is forked, which spares the imports, and not started as a user does.
    """

    program: tuple[str, ...] = ("-m", "gateway")
    is_forked = True

    def __init__(self, directory: Path, bootstrap: str | None, *options: str, config: str = "") -> None:
        self.directory = directory
        self.ready_file = directory / "ready.json"
        self.log = directory / "gateway.log"
        self.addresses: dict[str, Any] = {}
        self.process: asyncio.subprocess.Process | ForkedProcess | None = None
        self._argv = [sys.executable, *self.program, "up", "--ready-file", str(self.ready_file)]
        for listener in ("mqtt", "amqp", "http", "management"):
            is_told = "[[listeners]]" in config and listener != "management"
            if not is_told and f"--{listener}" not in options:
                self._argv += [f"--{listener}", "127.0.0.1:0"]
        if bootstrap is not None:
            self._argv += ["--bootstrap-servers", bootstrap]
        # There is no load balancer in front; a test of it configures its own.
        self._environment = {**({} if "lead_s" in config else {"TRIVIUM_DRAIN__LEAD_S": "0"}), **os.environ}
        if config:
            path = directory / "trivium.toml"
            path.write_text(config)
            self._argv += ["--config", str(path)]
        self._argv += options

    async def start(self, timeout: float = 60) -> GatewayProcess:
        """Start it and wait until it is ready."""
        self.ready_file.unlink(missing_ok=True)
        default = [sys.executable, *GatewayProcess.program]
        with self.log.open("ab") as log:
            if self.is_forked and self._argv[: len(default)] == default:
                self.process = await forks.fork(self._argv[len(default) :], self._environment, log.fileno())
            else:
                self.process = await asyncio.create_subprocess_exec(
                    *self._argv, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    env=self._environment,
                )  # fmt: skip
        await wait_until(lambda: self.ready_file.exists() or self.process.returncode is not None, timeout)
        if not self.ready_file.exists():
            raise RuntimeError(f"the gateway did not start: {self.log.read_text()[-2000:]}")
        self.addresses = json.loads(self.ready_file.read_text())
        return self

    def address(self, protocol: str) -> tuple[str, int]:
        """Host and port of a listener."""
        host, _, port = self.addresses[protocol].rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def pid(self) -> int:
        """The gateway's process id."""
        assert self.process is not None
        return self.process.pid

    async def stop(self, timeout: float = 60) -> int:
        """Stop the process with SIGTERM; return its exit code."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.process.wait(), timeout)
        except TimeoutError:
            await self.kill()
            raise

    async def kill(self) -> None:
        """Kill the process with SIGKILL, like a crash."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
