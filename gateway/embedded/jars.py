"""The jars of Kafka and of Spark's Kafka source: pinned in `jars.lock`, fetched by Ivy, verified and cached.

A jar is moved into the cache atomically, and only after its SHA-256 was compared with the lock's. Its size and mtime
are stored then (`verified.json`); later starts compare only these, and hash a file again if they differ
(docs/adr/0001-jars-by-ivy.md).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.resources
import importlib.util
import os
import shutil
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from gateway.embedded import ivy
from gateway.embedded.java import SetupError, find_java

ATTEMPTS = 3  # a repository that answers 503 or resets a connection usually serves the next attempt
PAUSES_S = (1.0, 4.0)


class JarError(SetupError):
    """The jars cannot be fetched or verified."""


class Jar(msgspec.Struct, frozen=True):
    """One pinned jar."""

    group: str  # Maven group id
    artifact: str  # Maven artifact id
    version: str
    sha256: str  # of the file, in hexadecimal digits

    @property
    def file_name(self) -> str:
        """The file's name in the cache."""
        return f"{self.artifact}-{self.version}.jar"


class DownloadProgress(msgspec.Struct, frozen=True):
    """The progress of a fetch."""

    text: str  # the current step, one line
    done: int  # jars in the cache
    total: int  # jars of the set


Report = Callable[[DownloadProgress], None]


class _Stamp(msgspec.Struct, frozen=True, array_like=True):
    """A file's hash, size and mtime when it was verified."""

    sha256: str
    size: int
    mtime_ns: int


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the cache directory: `TRIVIUM_CACHE`, or `trivium` in the user's cache directory (XDG)."""
    own = environment.get("TRIVIUM_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    xdg = environment.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if xdg.startswith("/") else Path.home() / ".cache"  # XDG: a relative path is to be ignored
    return base / "trivium"


def locked_jars(set_name: str, lock: Path | None = None) -> list[Jar]:
    """Return the pinned jars of a set, such as `kafka`, in the order of `lock`, by default the product's own."""
    file = lock or importlib.resources.files("gateway.embedded").joinpath("jars.lock")
    jars = []
    for coordinate, sha256 in tomllib.loads(file.read_text())[set_name].items():
        group, artifact, version = coordinate.split(":")
        jars.append(Jar(group, artifact, version, sha256))
    return jars


def locked_version(set_name: str, artifact: str) -> str:
    """Return the pinned version of an artifact. Raises KeyError when the set does not contain it."""
    versions = {jar.artifact: jar.version for jar in locked_jars(set_name)}
    return versions[artifact]


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pyspark_jars() -> list[Path]:
    """Return the jars in the pyspark package; none when it is not installed."""
    spec = importlib.util.find_spec("pyspark")
    places = (spec and spec.submodule_search_locations) or ()
    return sorted(jar for directory in places for jar in Path(directory, "jars").glob("*.jar"))


def ivy_jar() -> Path:
    """Return Apache Ivy, which the pyspark package ships. Raises JarError when that is not installed."""
    for jar in pyspark_jars():
        if jar.name.startswith("ivy-"):
            return jar
    raise JarError("pyspark is missing, whose Apache Ivy fetches the jars: install trivium[spark] or run `make setup`")


def ensure_jars(
    set_name: str,
    cache: Path | None = None,
    report: Report = lambda progress: None,
    environment: Mapping[str, str] = os.environ,
    lock: Path | None = None,
) -> list[Path]:
    """Return the paths of a set's jars, fetching those that are missing in the cache.

    If none is missing, it is fast and needs no Java. If two processes call it at the same time, one fetches and the
    other waits. Files that an interrupted fetch has completed are not fetched again. `cache` and `lock` default to the
    usual cache and the product's own lock. `environment` is read for `TRIVIUM_IVY_SETTINGS` (an Ivy settings file, for
    a mirror), `JAVA_HOME`, `PATH` and the cache directory.

    Raises:
        JarError: no network, a wrong hash, no space, or no Ivy.
        JavaError: no Java to run Ivy.
    """
    directory = (cache or cache_directory(environment)) / "jars"
    jars = locked_jars(set_name, lock)
    paths = [directory / jar.file_name for jar in jars]
    try:
        stamps = _read_stamps(directory)
        if all(_is_verified(directory, jar, stamps) for jar in jars):
            return paths
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(
            directory / ".lock", lambda: report(DownloadProgress("another process is fetching: waiting", 0, len(jars)))
        ):
            _complete(set_name, directory, jars, report, environment)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise _disk_full(directory) from error
        raise JarError(
            f"cannot write the jars to {directory} (TRIVIUM_CACHE chooses another place): {error}"
        ) from error
    return paths


def _complete(
    set_name: str, directory: Path, jars: Sequence[Jar], report: Report, environment: Mapping[str, str]
) -> None:
    """Verify the present jars and fetch the others, in several attempts. The lock is held."""
    for attempt in range(ATTEMPTS):
        missing = _verify_present(directory, jars)
        if not missing:
            break
        try:
            _fetch(set_name, directory, missing, total=len(jars), report=report, environment=environment)
        except ivy.NetworkError as error:
            if attempt + 1 == ATTEMPTS:
                raise JarError(
                    f"cannot fetch the {set_name} jars, the network or the repository does not answer: {error}"
                    " (TRIVIUM_IVY_SETTINGS names an Ivy settings file for a mirror)"
                ) from error
            report(DownloadProgress(f"trying again: {error}", len(jars) - len(missing), len(jars)))
            time.sleep(PAUSES_S[attempt])
        except ivy.DiskFullError as error:
            raise _disk_full(directory) from error
        except ivy.IvyError as error:
            raise JarError(f"cannot fetch the {set_name} jars: {error}") from error
        else:
            shutil.rmtree(_staging(directory, set_name), ignore_errors=True)
            break


def _fetch(
    set_name: str,
    directory: Path,
    missing: Sequence[Jar],
    *,
    total: int,
    report: Report,
    environment: Mapping[str, str],
) -> None:
    """Let Ivy fetch the missing jars into the staging directory, verify each and move it into the cache."""
    settings = environment.get("TRIVIUM_IVY_SETTINGS")
    if settings and not Path(settings).is_file():
        raise JarError(f"TRIVIUM_IVY_SETTINGS names {settings}, which is not a file")
    there = total - len(missing)
    staging = _staging(directory, set_name)
    fetched = 0
    for name in ivy.retrieve(
        java=find_java(environment).path,
        ivy=ivy_jar(),
        settings=Path(settings) if settings else None,
        modules=[(jar.group, jar.artifact, jar.version) for jar in missing],
        staging=staging,
        environment=environment,
    ):
        if name.is_fetched:
            fetched += 1
        verb = "fetched" if name.is_fetched else "found"
        report(DownloadProgress(f"{set_name} jars: {verb} {name.text}", there + fetched, total))
    wrong = []
    for jar in missing:
        staged = ivy.retrieved(staging, jar.file_name)
        digest = sha256_of(staged) if staged.exists() else "nothing"
        if digest == jar.sha256:
            staged.replace(directory / jar.file_name)  # atomic
            _store_stamp(directory, jar)
        else:
            ivy.forget(staging, jar.group, jar.artifact, jar.file_name)
            wrong.append(f"{jar.file_name} is not the one in the lock (SHA-256 {digest}, expected {jar.sha256})")
    if wrong:
        raise JarError(f"{wrong[0]}: the repository or a proxy served something else, nothing was kept")
    report(DownloadProgress(f"{set_name} jars: all verified", total, total))


def _verify_present(directory: Path, jars: Sequence[Jar]) -> list[Jar]:
    """Hash present jars without a valid stamp, delete wrong ones, and return the missing ones."""
    missing = []
    stamps = _read_stamps(directory)
    for jar in jars:
        path = directory / jar.file_name
        if _is_verified(directory, jar, stamps):
            continue
        if path.exists() and sha256_of(path) == jar.sha256:
            _store_stamp(directory, jar)
        else:
            path.unlink(missing_ok=True)
            missing.append(jar)
    return missing


def _is_verified(directory: Path, jar: Jar, stamps: Mapping[str, _Stamp]) -> bool:
    """Whether the file has the size and mtime that it had when it was verified."""
    stamp = stamps.get(jar.file_name)
    if stamp is None or stamp.sha256 != jar.sha256:
        return False
    try:
        status = (directory / jar.file_name).stat()
    except FileNotFoundError:
        return False
    return (status.st_size, status.st_mtime_ns) == (stamp.size, stamp.mtime_ns)


def _store_stamp(directory: Path, jar: Jar) -> None:
    """Store the stamp of a verified file in the cache. The lock is held."""
    status = (directory / jar.file_name).stat()
    stamps = {**_read_stamps(directory), jar.file_name: _Stamp(jar.sha256, status.st_size, status.st_mtime_ns)}
    fresh = directory / "verified.json.new"
    fresh.write_bytes(msgspec.json.encode(stamps))
    fresh.replace(directory / "verified.json")


def _read_stamps(directory: Path) -> dict[str, _Stamp]:
    """Return the stored stamps; none when they are missing or cannot be read, so that all jars are hashed again."""
    try:
        return msgspec.json.decode((directory / "verified.json").read_bytes(), type=dict[str, _Stamp])
    except (FileNotFoundError, msgspec.DecodeError):
        return {}


def _staging(directory: Path, set_name: str) -> Path:
    """Return the staging directory of a set: on the cache's file system, so that a move is atomic."""
    return directory / f".fetch-{set_name}"


def _disk_full(directory: Path) -> JarError:
    return JarError(f"the disk is full: {directory} needs 120 MB while fetching (TRIVIUM_CACHE chooses another place)")


@contextlib.contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold a file lock, which the kernel releases when the process ends in any way."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def console_report() -> Iterator[Report]:
    """Show progress on standard error: a bar on a terminal, otherwise a line per ten percent.

    The console is created for the first report: usually there is none, and creating it takes half of a warm start.
    """
    with contextlib.ExitStack() as stack:
        opened: list[Report] = []

        def report(progress: DownloadProgress) -> None:
            if not opened:
                opened.append(_open_console(stack))
            opened[0](progress)

        yield report


def _open_console(stack: contextlib.ExitStack) -> Report:
    from rich.console import Console  # noqa: PLC0415 - see `console_report`
    from rich.progress import Progress as Bar  # noqa: PLC0415

    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        bar = stack.enter_context(Bar(console=console, transient=True))
        task = bar.add_task("jars", total=None)
        return lambda at: bar.update(task, description=at.text, completed=at.done, total=at.total)
    shown: set[tuple[int, int]] = set()

    def show(at: DownloadProgress) -> None:
        step = (at.total, at.done * 10 // at.total)
        if step not in shown or at.text.startswith(("another", "trying")):
            shown.add(step)
            console.print(f"{at.text} ({at.done} of {at.total})", soft_wrap=True)

    return show
