"""`make run` without a terminal: it shows results, checks them, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
MARK = f"TRIVIUM_TEST_MARK={uuid.uuid4().hex}"


def marked_processes() -> list[str]:
    """Return the command lines of all processes that inherited the test's mark, without zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and MARK.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120])
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


class DemoProcess:
    def __init__(self, data: Path, *options: str, **environment: str) -> None:
        self._argv = [sys.executable, "-m", "loadtest.demo", "--data-dir", str(data), *options]
        name, _, value = MARK.partition("=")
        self._environment = {**os.environ, name: value, **environment}
        self.lines: list[str] = []

    async def start(self) -> DemoProcess:
        self.process = await asyncio.create_subprocess_exec(
            *self._argv, cwd=ROOT, env=self._environment, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        return self

    async def read_until(self, start: str, limit_s: float = 200) -> str:
        """Read until a line starts with `start`, and return it."""
        assert self.process.stdout is not None
        async with asyncio.timeout(limit_s):
            while line := (await self.process.stdout.readline()).decode():
                self.lines.append(line.rstrip("\n"))
                if line.startswith(start):
                    return line
        raise AssertionError(f"it ended without {start!r}: {self.text}")

    async def ended(self, limit_s: float) -> int:
        """Read the output to its end; return the exit code."""
        out, _ = await asyncio.wait_for(self.process.communicate(), limit_s)
        self.lines += out.decode().splitlines()
        assert self.process.returncode is not None
        return self.process.returncode

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        await wait_until(lambda: not marked_processes(), 90)  # they stop cleanly, even after their parent was killed

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@pytest.mark.spark
@pytest.mark.timeout(600)
async def test_two_runs_on_the_same_data_one_interrupted_and_one_checked(tmp_path: Path) -> None:
    first = await DemoProcess(tmp_path).start()
    try:
        await first.read_until("First result after ")
        # Kafka and Spark; a child that they fork looks like a third one until it executes its program.
        await wait_until(lambda: sum("java" in command for command in marked_processes()) == 2)

        beside = await DemoProcess(tmp_path).start()
        assert await beside.ended(60) == 1
        assert beside.lines[0].startswith(f"{tmp_path} is in use by another `make run` (process {first.process.pid})")
        assert len(beside.lines) == 1

        began = time.monotonic()
        first.process.send_signal(signal.SIGINT)
        assert await first.ended(60) == 0, first.text
        assert time.monotonic() - began < 20  # ten on an idle machine
        assert marked_processes() == []
        assert "Traceback" not in first.text
        assert first.lines[-1].startswith("Everything stopped in ")
        assert any(line.startswith("Correct windows: ") for line in first.lines), first.text
    finally:
        await first.kill()

    second = await DemoProcess(tmp_path, "--duration", "5").start()
    try:
        assert await second.ended(240) == 0, second.text
        assert marked_processes() == []
        assert "Every reading was acknowledged and is in Spark's results." in second.lines
        assert "\x1b" not in second.text
        for protocol in ("MQTT", "AMQP", "HTTP"):
            row = next(line for line in second.lines if line.startswith(f"│ {protocol} "))
            sent, acknowledged, results, *_ = (int(cell.replace(",", "")) for cell in row.split("│")[2:-1])
            assert 0 < sent == acknowledged
            assert results > 0
    finally:
        await second.kill()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"JAVA_HOME": "/nowhere"}, "JAVA_HOME is /nowhere"),
        ({"TRIVIUM_EMBEDDED__HEAP": "little"}, "embedded.heap"),
    ],
)
async def test_a_child_that_cannot_start_gives_a_one_line_error(
    tmp_path: Path, environment: dict[str, str], named: str
) -> None:
    demo = await DemoProcess(tmp_path, "--duration", "5", **environment).start()
    try:
        assert await demo.ended(60) == 1
        await wait_until(lambda: not marked_processes(), 60)
        told = [line for line in demo.lines if not line.startswith(("Starting ", "Everything stopped"))]
        assert len(told) == 1, demo.text
        assert named in told[0]
        assert f"(log: {tmp_path}" in told[0]
    finally:
        await demo.kill()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_stopped_while_everything_starts(tmp_path: Path, number: signal.Signals) -> None:
    demo = await DemoProcess(tmp_path).start()
    try:
        await demo.read_until("Starting ")
        await wait_until(lambda: any("java" in command for command in marked_processes()), 60)
        demo.process.send_signal(number)
        code = await demo.ended(60)
        if number is signal.SIGKILL:
            assert code == -signal.SIGKILL
            await wait_until(lambda: not marked_processes(), 90)
        else:
            assert code == 0, demo.text
            await wait_until(lambda: not marked_processes(), 30)  # a `java -version` ends by itself
            assert demo.lines[-2] == "Stopped before the first reading was sent."
    finally:
        await demo.kill()
