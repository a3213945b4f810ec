"""What the foreign clients that are not Python's need: packages by npm, jars by Ivy, programs by Go and Cargo.

Each is fetched as a lock in the repository says, which holds versions and hashes and no address: where they come from
is the business of the machine's own configuration. What is there already is not fetched or built again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from gateway.embedded.jars import ensure_jars, locked_jars
from gateway.embedded.java import SetupError, find_java

JARS_LOCK = Path(__file__).with_name("jars.lock")
OLDEST_NODE = 18
LONGEST_S = 900  # a slow machine builds a Rust program for minutes


class ToolchainError(Exception):
    """A tool is not installed or does not fetch; the text says which and what it said."""


def node_packages(directory: Path) -> str:
    """Install the packages of `package-lock.json`; the path of node."""
    node, npm = tool("node", "nodejs npm"), tool("npm", "nodejs npm")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.lstrip("v").partition(".")[0]) < OLDEST_NODE:
        raise ToolchainError(f"node is {version}, the clients need {OLDEST_NODE} or newer")
    lock = directory / "package-lock.json"
    once(directory, [lock], directory / "node_modules", lambda: _run([npm, "ci"], directory))
    return node


def find_jdk() -> Path:
    """The path of java, with a compiler beside it."""
    try:
        java = find_java().path
    except SetupError as error:
        raise ToolchainError(str(error)) from error
    if not java.resolve().with_name("javac").exists():
        raise ToolchainError(f"{java} is no JDK (Debian, Ubuntu: apt-get install default-jdk-headless)")
    return java


def classpath(jar_set: str) -> str:
    """The jars of a set, fetched, as java's class path."""
    try:
        return os.pathsep.join(map(str, ensure_jars(jar_set, lock=JARS_LOCK)))
    except SetupError as error:
        raise ToolchainError(str(error)) from error


def java_command(directory: Path, jar_set: str, artifact: str) -> list[str]:
    """Compile `Driver.java` with the jars of a set; how it is started. Its argument is the artifact's version."""
    java = find_jdk()
    compiler = java.resolve().with_name("javac")
    jars = classpath(jar_set)
    source, classes = directory / "Driver.java", directory / "build"
    command = [str(compiler), "--release", "17", "-cp", jars, "-d", str(classes), str(source)]
    once(directory, [source, JARS_LOCK], classes, lambda: _run(command, directory))
    version = next(jar.version for jar in locked_jars(jar_set, JARS_LOCK) if jar.artifact == artifact)
    # What runs for seconds is started sooner without the second compiler.
    flags = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m"]
    return [str(java), *flags, "-cp", os.pathsep.join([jars, str(classes)]), "Driver", version]


def go_program(directory: Path, file: Path | None = None) -> Path:
    """Build the module of a directory, or a file that uses what the module requires; the program."""
    go = tool("go", "golang-go")
    program = directory / "build" / ("driver" if file is None else file.stem)
    sources = [directory / "go.mod", directory / "go.sum", *(directory.glob("*.go") if file is None else [file])]
    command = [go, "build", "-mod=readonly", "-trimpath", "-o", str(program), "." if file is None else str(file)]
    once(directory, sources, program, lambda: _run(command, directory))
    return program


def cargo_program(directory: Path) -> Path:
    """Build the crate of a directory with exactly the crates of `crates.lock`; its program."""
    cargo = tool("cargo", "cargo")
    program = directory / "build" / "target" / "debug" / "driver"
    lock = directory / "crates.lock"
    sources = [directory / "Cargo.toml", lock, *sorted((directory / "src").glob("*.rs"))]

    def build() -> None:
        # The lock of Cargo names a registry in each entry, so ours is kept beside it without them.
        place = directory / "build"
        shutil.copytree(directory / "src", place / "src", dirs_exist_ok=True)
        shutil.copy(directory / "Cargo.toml", place)
        (place / "Cargo.lock").write_text(with_source(lock.read_text(), registry_of(cargo)))
        _run([cargo, "build", "--locked", "--quiet"], place)

    once(directory, sources, program, build)
    return program


def registry_of(cargo: str) -> str:
    """Return what this machine's Cargo writes into a lock as the source of its registry's crates."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "src").mkdir()
        (place / "src" / "lib.rs").touch()
        manifest = '[package]\nname = "source"\nversion = "0.0.0"\nedition = "2021"\n[dependencies]\nitoa = "1"\n'
        (place / "Cargo.toml").write_text(manifest)
        _run([cargo, "generate-lockfile", "--quiet"], place)
        packages = tomllib.loads((place / "Cargo.lock").read_text())["package"]
    return next(str(package["source"]) for package in packages if "source" in package)


def with_source(lock: str, source: str) -> str:
    """Give each entry of a Cargo.lock that has a checksum the source it comes from."""
    return re.sub(r"^checksum = ", f'source = "{source}"\n\\g<0>', lock, flags=re.MULTILINE)


def without_source(lock: str) -> str:
    """Take the addresses out of a Cargo.lock."""
    return re.sub(r"^source = .*\n", "", lock, flags=re.MULTILINE)


def lock_crates(directory: Path) -> None:
    """Write `crates.lock` anew; versions stay where they fit the manifest."""
    cargo = tool("cargo", "cargo")
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        shutil.copytree(directory / "src", place / "src")
        shutil.copy(directory / "Cargo.toml", place)
        lock = directory / "crates.lock"
        if lock.exists():
            (place / "Cargo.lock").write_text(with_source(lock.read_text(), registry_of(cargo)))
        _run([cargo, "generate-lockfile" if not lock.exists() else "metadata", "--quiet"], place)
        lock.write_text(without_source((place / "Cargo.lock").read_text()))


def tool(name: str, packages: str) -> str:
    """The path of a program; `packages` are what Debian has it in."""
    found = shutil.which(name)
    if found is None:
        raise ToolchainError(f"{name} is not installed (Debian, Ubuntu: apt-get install {packages})")
    return found


def _run(command: list[str], directory: Path) -> None:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=LONGEST_S)
    if done.returncode != 0:
        raise ToolchainError(f"{Path(command[0]).name} {command[1]} failed: {done.stderr.strip()[-800:]}")


def once(directory: Path, sources: Iterable[Path], made: Path, make: Callable[[], None]) -> None:
    """Make what is not made yet of exactly these sources; of two test runs one makes it."""
    with _held(directory / ".lock"):
        wanted = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()
        stamp = made.parent / f".{made.name}.made"
        if not made.exists() or not stamp.exists() or stamp.read_text() != wanted:
            stamp.unlink(missing_ok=True)
            make()
            stamp.write_text(wanted)


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
