"""A registry of the jobs that this user has started on this machine: which run, and how the last runs ended.

Each job has a small file, named by the job and its checkpoint, in `$XDG_STATE_HOME/trivium/spark`. The job's process
holds a lock on it, so a dead job never seems to run, even if its process id is in use again.
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

from spark_sinks.run.job_file import is_job_file

POLL_S: Final = 0.1
ENDING_S: Final = 10.0
"""How long a killed run may need until its last process has ended."""
KEPT_S: Final = 7 * 86_400.0
"""How long an ended job stays in the registry."""


class ListedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The newest run of a job."""

    job: str  # the job's name
    file: str | None  # the job file
    checkpoint: str  # absolute, or a URL
    pid: int
    metrics: str  # HOST:PORT
    started: float  # Unix time
    restarts: int = 0  # earlier runs on this checkpoint
    ended: float | None = None  # Unix time; None if it runs or was killed
    error: str | None = None  # why it failed; None if it was asked to stop


class Known(msgspec.Struct, frozen=True):
    """A run, and whether its process still exists."""

    run: ListedRun
    alive: bool


class RunsError(Exception):
    """A job runs already, or its name is ambiguous; the message says which."""


def directory() -> Path:
    """Return the directory of the registry files."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "trivium" / "spark"


class Registration:
    """A job's registry file, from its start to its end.

    Args:
        job: the job's name.
        file: the job file.
        checkpoint: directory or URL.
    """

    def __init__(self, job: str, file: Path | None, checkpoint: str) -> None:
        self._where = directory()
        self._where.mkdir(parents=True, exist_ok=True, mode=0o700)
        location = checkpoint if "://" in checkpoint else str(Path(checkpoint).resolve())
        mark = hashlib.sha256(location.encode()).hexdigest()[:12]
        self._path = self._where / f"{job}-{mark}.json"
        self._held: int | None = None
        self.run = ListedRun(
            job=job,
            file=None if file is None else str(file.resolve()),
            checkpoint=location,
            pid=os.getpid(),
            metrics="",
            started=time.time(),
        )

    def begin(self, metrics: str) -> None:
        """Register the run with the address of its metrics; RunsError if another process runs the job."""
        _forget_old(self._where)
        deadline = time.monotonic() + ENDING_S
        while True:
            with _alone(self._where):
                before = _read(self._path)
                if before is None or not before.alive:
                    restarts = 0 if before is None else before.run.restarts + 1
                    self._write(msgspec.structs.replace(self.run, metrics=metrics, restarts=restarts))
                    return
            if time.monotonic() > deadline:
                raise RunsError(
                    f"{self.run.job} runs already, as process {before.run.pid}, on the checkpoint "
                    f"{self.run.checkpoint}: one job, one checkpoint"
                )
            time.sleep(POLL_S)  # it may be about to end

    def end(self, error: str | None) -> None:
        """Record why the run ended; None after a requested stop."""
        if self._held is not None:
            self._write(msgspec.structs.replace(self.run, ended=time.time(), error=error))
            os.close(self._held)
            self._held = None

    def _write(self, run: ListedRun) -> None:
        """Replace the file with a new one that is already locked."""
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
    """Hold the directory's lock."""
    held = os.open(where, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _read(path: Path) -> Known | None:
    """Read a registry file; None if it is missing or not valid."""
    try:
        held = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        run = msgspec.json.decode(os.read(held, 65_536), type=ListedRun)
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return Known(run, alive=True)
    except (OSError, msgspec.DecodeError):
        return None
    finally:
        os.close(held)
    return Known(run, alive=False)


def known() -> list[Known]:
    """Return the newest run of every job, running ones first."""
    records = [record for path in directory().glob("*.json") if (record := _read(path)) is not None]
    return sorted(records, key=lambda record: (not record.alive, record.run.job, record.run.checkpoint))


def find(name: str) -> list[Known]:
    """Return the newest runs of a job file, or of all jobs with this name."""
    if is_job_file(name):
        path = str(Path(name).resolve())
        return [record for record in known() if record.run.file == path]
    return [record for record in known() if record.run.job == name]


def _forget_old(where: Path) -> None:
    for path in where.glob("*.json"):
        record = _read(path)
        if record is not None and not record.alive and (record.run.ended or record.run.started) < time.time() - KEPT_S:
            path.unlink(missing_ok=True)


def stop(name: str, limit_s: float) -> ListedRun:
    """Send SIGTERM to a job and wait until it has ended.

    Returns:
        the final record of the run.

    Raises:
        RunsError: no such job runs here, or several do.
        TimeoutError: it did not end in time.
    """
    runs_found = find(name)
    running = [record.run for record in runs_found if record.alive]
    if len(running) > 1:
        listed = ", ".join(run.file or run.checkpoint for run in running)
        raise RunsError(f"{name}: {len(running)} jobs of this name run: select one by its file ({listed})")
    if not running:
        raise RunsError(not_running(name, runs_found))
    [run] = running
    with contextlib.suppress(ProcessLookupError):
        os.kill(run.pid, signal.SIGTERM)
    deadline = time.monotonic() + limit_s
    while (now := _same(name, run)) is not None and now.alive:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{run.job} (process {run.pid}) has not ended within {limit_s:g} s")
        time.sleep(POLL_S)
    return run if now is None else now.run


def _same(name: str, run: ListedRun) -> Known | None:
    """Return the present state of a run; None if a newer run has replaced it."""
    return next(
        (record for record in find(name) if (record.run.pid, record.run.started) == (run.pid, run.started)), None
    )


def not_running(name: str, runs: list[Known]) -> str:
    """Describe why a job does not run."""
    if not runs:
        return f"{name} has not been started on this machine by this user"
    run = runs[0].run
    if run.ended is None:
        return f"{name} does not run: its process {run.pid} was killed"
    return f"{name} does not run: it {'was stopped' if run.error is None else f'failed: {run.error}'}"
