"""The jobs that this user has started on this machine: who runs, where its metrics are, how the last run ended.

Each job has a small file, named by the job and its checkpoint, in `$XDG_STATE_HOME/trivium/spark`. Its process holds a
lock on it, so it is never taken for running when it is not, whatever process has its number now.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from spark_sinks.job_file import is_job_file

POLL_S: Final = 0.1
ENDING_S: Final = 10.0
"""A run that was killed may need so long until the last of it has ended."""
KEPT_S: Final = 7 * 86_400.0
"""How long a job that has ended is remembered."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The newest run of a job."""

    job: str  # its name
    file: str | None  # its job file
    checkpoint: str  # absolute, or a URL
    pid: int
    metrics: str  # HOST:PORT
    started: float  # Unix time
    restarts: int = 0  # runs on this checkpoint before it
    ended: float | None = None  # Unix time; None: it has not said so
    error: str | None = None  # why it ended; None: somebody asked it to


class Known(msgspec.Struct, frozen=True):
    """A run, and whether its process is there."""

    run: Run
    alive: bool


class RunsError(Exception):
    """A job runs already, or cannot be told from others; the text says it."""


def directory() -> Path:
    """Where the files are."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "trivium" / "spark"


class Registration:
    """A job's own file, from its start to its end.

    Args:
        job: its name.
        file: its job file.
        checkpoint: directory or URL.
    """

    def __init__(self, job: str, file: Path | None, checkpoint: str) -> None:
        self._where = directory()
        self._where.mkdir(parents=True, exist_ok=True, mode=0o700)
        place = checkpoint if "://" in checkpoint else str(Path(checkpoint).resolve())
        mark = hashlib.sha256(place.encode()).hexdigest()[:12]
        self._path = self._where / f"{job}-{mark}.json"
        self._held: int | None = None
        self.run = Run(
            job=job,
            file=None if file is None else str(file.resolve()),
            checkpoint=place,
            pid=os.getpid(),
            metrics="",
            started=time.time(),
        )

    def begin(self, metrics: str) -> None:
        """Say that it runs, and where its metrics are; RunsError when another process runs it."""
        _forget_old(self._where)
        deadline = time.monotonic() + ENDING_S
        while True:
            with _alone(self._where):
                before = _look(self._path)
                if before is None or not before.alive:
                    restarts = 0 if before is None else before.run.restarts + 1
                    self._write(msgspec.structs.replace(self.run, metrics=metrics, restarts=restarts))
                    return
            if time.monotonic() > deadline:
                raise RunsError(
                    f"{self.run.job} runs already, as process {before.run.pid}, on the checkpoint "
                    f"{self.run.checkpoint}: one job, one checkpoint"
                )
            time.sleep(POLL_S)  # it may just be ending

    def end(self, error: str | None) -> None:
        """Say how it ended."""
        if self._held is not None:
            self._write(msgspec.structs.replace(self.run, ended=time.time(), error=error))
            os.close(self._held)
            self._held = None

    def _write(self, run: Run) -> None:
        """Put a new file in the place of the old one, locked already."""
        new = self._path.with_suffix(f".{os.getpid()}.new")
        held = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            os.write(held, msgspec.json.encode(run))
            new.replace(self._path)
        except BaseException:
            os.close(held)
            raise
        if self._held is not None:
            os.close(self._held)
        self._held, self.run = held, run


@contextlib.contextmanager
def _alone(where: Path) -> Iterator[None]:
    """One at a time in the directory."""
    held = os.open(where, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _look(path: Path) -> Known | None:
    """What a file says; None when it is no such file, or has gone."""
    try:
        held = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        run = msgspec.json.decode(os.read(held, 65_536), type=Run)
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return Known(run, alive=True)
    except (OSError, msgspec.DecodeError):
        return None
    finally:
        os.close(held)
    return Known(run, alive=False)


def known() -> list[Known]:
    """The newest run of every job, those that run first."""
    found = [one for path in directory().glob("*.json") if (one := _look(path)) is not None]
    return sorted(found, key=lambda one: (not one.alive, one.run.job, one.run.checkpoint))


def find(name: str) -> list[Known]:
    """The runs of a job file, or of jobs of this name."""
    if is_job_file(name):
        path = str(Path(name).resolve())
        return [one for one in known() if one.run.file == path]
    return [one for one in known() if one.run.job == name]


def _forget_old(where: Path) -> None:
    for path in where.glob("*.json"):
        one = _look(path)
        if one is not None and not one.alive and (one.run.ended or one.run.started) < time.time() - KEPT_S:
            path.unlink(missing_ok=True)


def stop(name: str, limit_s: float) -> Run:
    """Ask a job to end, as SIGTERM does, and wait until it has.

    Returns:
        Its last words.

    Raises:
        RunsError: no such job runs here, or several do.
        TimeoutError: it has not ended in time.
    """
    found = find(name)
    running = [one.run for one in found if one.alive]
    if len(running) > 1:
        listed = ", ".join(run.file or run.checkpoint for run in running)
        raise RunsError(f"{name}: {len(running)} jobs of this name run: name one by its file ({listed})")
    if not running:
        raise RunsError(not_running(name, found))
    [run] = running
    with contextlib.suppress(ProcessLookupError):
        os.kill(run.pid, signal.SIGTERM)
    deadline = time.monotonic() + limit_s
    while (now := _same(name, run)) is not None and now.alive:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{run.job} (process {run.pid}) has not ended within {limit_s:g} s")
        time.sleep(POLL_S)
    return run if now is None else now.run


def _same(name: str, run: Run) -> Known | None:
    """A run as it is now; None when another has taken its place."""
    return next((one for one in find(name) if (one.run.pid, one.run.started) == (run.pid, run.started)), None)


def not_running(name: str, found: list[Known]) -> str:
    """In words."""
    if not found:
        return f"{name} has not been started on this machine by this user"
    run = found[0].run
    if run.ended is None:
        return f"{name} does not run: its process {run.pid} was killed"
    return f"{name} does not run: it {'was stopped' if run.error is None else f'failed: {run.error}'}"
