"""The list of local jobs, also after a kill, and stopping them. No Spark is started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.process.cli import app
from spark_sinks.run import runs
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
JOB = """
import contextlib, signal, sys
from pathlib import Path
from spark_sinks.run.runs import Registration

name, file, checkpoint, query = sys.argv[1:]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
with contextlib.ExitStack() as stack:
    address = "127.0.0.1:1"
    if query:
        from spark_sinks.run.metrics import JobMetrics
        from spark_sinks.spec.values import Listen
        metrics = JobMetrics(name)
        metrics.reads("micro-batch", {"a": {"0": 5}}, {"a": {"0": 1205}}, counts_rejects=True)
        address = stack.enter_context(metrics.serve(Listen("127.0.0.1:0")))
    registration = Registration(name, Path(file) if file else None, checkpoint)
    registration.begin(str(address))
    print("runs", flush=True)
    signal.sigwait([signal.SIGTERM])
    registration.end(None)
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A process that stands in for a job: it registers and serves metrics, but starts no JVM."""
    started: list[subprocess.Popen[str]] = []

    def begin(name: str, *, file: Path | None = None, query: str = "", checkpoint: str = "") -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", JOB, name, str(file or ""), checkpoint or str(tmp_path / name), query]
        process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "runs\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def trivium(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["spark", *arguments])
    return result.exit_code, " ".join(result.output.split())


async def test_all_local_jobs_are_listed_with_their_state(start: Start, tmp_path: Path) -> None:
    assert trivium("status") == (0, "No Spark job has been started on this machine by this user.")
    file = tmp_path / "hall.toml"
    hall, killed = start("hall", file=file, query="hall"), start("porch")
    start("cellar")
    killed.kill()
    killed.wait()
    code, text = trivium("status")
    assert code == 0
    assert "hall micro-batch 0 1,200 - 0 0 - none yet" in text
    assert f"porch: killed, process {killed.pid} does not exist" in text
    assert "cellar: does not answer, 127.0.0.1:1: Connection refused" in text

    code, text = trivium("status", str(file), "--json")
    [told] = json.loads(text)
    assert (code, told["job"], told["state"], told["pid"]) == (0, "hall", "runs", hall.pid)
    assert (told["file"], told["queries"][0]["lag"]) == (str(file), 1_200)
    assert trivium("status", "porch")[0] == 1
    assert trivium("status", "roof") == (1, "trivium: roof has not been started on this machine by this user")
    assert trivium("status", "--at", told["address"])[0] == 0
    assert trivium("status", "--at", "nowhere")[0] == 2


async def test_a_job_is_stopped_by_its_file_or_its_name(start: Start, tmp_path: Path) -> None:
    one, other = start("hall", file=tmp_path / "a.toml"), start("hall", checkpoint=str(tmp_path / "b"))
    code, text = trivium("stop", "hall")
    assert code == 1
    assert "2 jobs of this name run" in text
    assert trivium("stop", str(tmp_path / "a.toml")) == (0, "hall has stopped.")
    assert one.wait(10) == 0
    assert trivium("stop", "hall") == (0, "hall has stopped.")
    assert other.wait(10) == 0
    assert trivium("stop", "hall") == (1, "trivium: hall does not run: it was stopped")
    assert trivium("status")[1].count("hall: stopped, ") == 2


async def test_a_job_that_does_not_stop_is_reported(start: Start) -> None:
    job = start("hall")
    os.kill(job.pid, signal.SIGSTOP)
    code, text = trivium("stop", "hall", "--timeout", "0.1")
    assert (code, text) == (1, f"trivium: hall (process {job.pid}) has not ended within 0.1 s")
    os.kill(job.pid, signal.SIGCONT)
    await wait_until(lambda: job.poll() == 0)


def test_one_job_one_checkpoint(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start("hall")
    second = runs.Registration("hall", None, str(tmp_path / "hall"))
    monkeypatch.setattr(runs, "ENDING_S", 0.0)
    with pytest.raises(runs.RunsError, match=f"hall runs already, as process {first.pid}, on the checkpoint"):
        second.begin("127.0.0.1:1")
    first.kill()
    first.wait()
    second.begin("127.0.0.1:1")
    [now] = runs.find("hall")
    assert (now.alive, now.run.pid, now.run.restarts) == (True, os.getpid(), 1)
    second.end("no such topic")
    [now] = runs.find("hall")
    assert (now.alive, now.run.error) == (False, "no such topic")
    third = runs.Registration("hall", None, str(tmp_path / "hall"))
    third.begin("127.0.0.1:1")
    assert third.run.restarts == 2
    third.end(None)


def test_foreign_files_are_ignored(tmp_path: Path) -> None:
    runs.directory().mkdir(parents=True)
    for name, text in (("a.json", "{"), ("b.json", '{"job": 1}'), ("c.json", "")):
        (runs.directory() / name).write_text(text)
    assert runs.known() == []


def test_old_runs_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = runs.Registration("old", None, str(tmp_path / "old"))
    old.begin("127.0.0.1:1")
    old.end(None)
    monkeypatch.setattr(runs, "KEPT_S", -1.0)
    new = runs.Registration("new", None, str(tmp_path / "new"))
    new.begin("127.0.0.1:1")
    assert [one.run.job for one in runs.known()] == ["new"]
    new.end(None)
