"""The demo's directory and processes: one run at a time, no leftover process, and an early exit is one error line."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loadtest.child import command_line
from loadtest.demo import directory as places
from loadtest.demo.directory import Directory, InUseError
from loadtest.demo.processes import Process, ProcessError, recording
from loadtest.ports import free_port
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]


READY = "import os, sys; new = sys.argv[1] + '.new'; open(new, 'w').write('{\"a\": 1}'); os.rename(new, sys.argv[1]); "
"""Writes the ready file atomically, like the gateway."""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    taken = Directory(tmp_path)
    yield taken
    taken.close()


@pytest.fixture
async def child(directory: Directory) -> Callable[[str], Process]:
    def make(code: str) -> Process:
        argv = [sys.executable, "-c", code, str(directory.path / "ready")]
        return Process("child", argv, directory, ready="ready", errors="errors", log="log")

    return make


def test_a_second_run_reports_which_process_uses_the_directory(directory: Directory) -> None:
    with pytest.raises(InUseError, match=rf"{directory.data} is in use .*process {os.getpid()}\b.*--data-dir"):
        Directory(directory.data)


def test_a_directory_can_be_taken_again(tmp_path: Path) -> None:
    Directory(tmp_path).close()
    Directory(tmp_path).close()


HOLD = """
import os, subprocess, sys
from pathlib import Path
from loadtest.demo.directory import Directory
taken = Directory(Path(sys.argv[1]))
subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=0, stdout=subprocess.DEVNULL,
                 stderr=subprocess.DEVNULL, pass_fds=[taken.lock])
os._exit(0)  # as if it was killed: the child still runs
"""


def test_after_a_killed_run_the_next_waits_for_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], stdin=reader, cwd=ROOT, check=True, capture_output=True)
    os.close(reader)
    monkeypatch.setattr(places, "ENDING_S", 0.3)
    with pytest.raises(InUseError):
        Directory(tmp_path)
    monkeypatch.setattr(places, "ENDING_S", 20.0)
    os.close(writer)  # now it ends
    Directory(tmp_path).close()


def test_a_taken_port_is_replaced() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert free_port(taken) not in {0, taken}
    assert free_port(taken) == taken


async def test_ready_and_stop(child: Callable[[str], Process], directory: Directory) -> None:
    process = child(f"print('one', flush=True); {READY} sys.stdin.close(); import time; time.sleep(60)")
    await process.start()
    assert await process.ready(60) == {"a": 1}
    assert (directory.path / "errors").read_text() == "one\n"  # no reader is needed while the process runs
    await process.stop(10)
    with pytest.raises(ProcessError, match=f"child ended, signal {signal.SIGTERM:d}"):
        await process.watch()
    await process.stop(10)  # a second stop does no harm


async def test_a_process_that_does_not_stop_is_killed(child: Callable[[str], Process]) -> None:
    process = child(f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY} time.sleep(60)")
    await process.start()
    await process.ready(60)
    await process.stop(0.1)
    with pytest.raises(ProcessError, match=f"signal {signal.SIGKILL:d}"):
        await process.watch()


async def test_an_early_exit_is_reported_with_the_last_output_and_the_log(
    child: Callable[[str], Process], directory: Directory
) -> None:
    process = child("import sys; sys.exit('\\x1b[31mno Java\\x1b[0m\\n{}\\n')")
    await process.start()
    with pytest.raises(ProcessError) as raised:
        await process.watch()
    assert str(raised.value) == f"child ended, exit code 1: no Java (log: {directory.path / 'log'})"


async def test_a_process_that_does_not_get_ready_is_named(child: Callable[[str], Process]) -> None:
    process = child("import time; time.sleep(60)")
    await process.start()
    with pytest.raises(ProcessError, match=r"child was not ready within 0\.1 s"):
        await process.ready(0.1)
    await process.stop(10)


async def test_a_child_ends_with_its_parent() -> None:
    """Run the launcher under a parent that is killed."""
    code = (
        "import subprocess, sys, time; from loadtest.child import command_line; "
        "print(subprocess.Popen(command_line(sys.executable, '-c', 'import time; time.sleep(60)')).pid, flush=True); "
        "time.sleep(60)"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    child_id = int(await parent.stdout.readline())
    await wait_until(lambda: b"sleep(60)" in Path(f"/proc/{child_id}/cmdline").read_bytes())
    parent.kill()
    await parent.wait()
    await wait_until(lambda: not runs(child_id))


def runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_launcher_starts_nothing_for_a_dead_parent() -> None:
    line = command_line(sys.executable, "-c", "print('started')")
    line[line.index(str(os.getpid()))] = "1"
    result = subprocess.run(line, capture_output=True, check=False)
    assert (result.returncode, result.stdout) == (125, b"")


async def test_classes_are_recorded_unless_they_are_and_the_process_ends(directory: Directory) -> None:
    process = recording(directory)
    await process.start()
    with pytest.raises(ProcessError, match="exit code 0: no output"):
        await process.watch()
