"""Fetches and builds the foreign clients that are not in Python: npm packages, jars, Go and Rust programs.

The locks in the repository have versions and hashes, but no addresses: the machine's configuration says where the files
come from. Clients that are already there are not fetched or built again.
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
LONGEST_S = 900  # building a Rust program takes minutes on a slow machine


class ToolchainError(Exception):
    """A tool is not installed or failed; the text has its name and its output."""


def node_packages(directory: Path) -> str:
    """Install the packages of `package-lock.json`; return the path of node."""
    node, npm = tool("node", "nodejs npm"), tool("npm", "nodejs npm")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.lstrip("v").partition(".")[0]) < OLDEST_NODE:
        raise ToolchainError(f"node is {version}, the clients need {OLDEST_NODE} or newer")
    lock = directory / "package-lock.json"
    build_once(directory, [lock], directory / "node_modules", lambda: _run([npm, "ci"], directory))
    return node


def find_jdk() -> Path:
    """Return the path of a java with a compiler beside it."""
    try:
        java = find_java().path
    except SetupError as error:
        raise ToolchainError(str(error)) from error
    if not java.resolve().with_name("javac").exists():
        raise ToolchainError(f"{java} is no JDK (Debian, Ubuntu: apt-get install default-jdk-headless)")
    return java


def classpath(jar_set: str) -> str:
    """Fetch the jars of a set and return java's class path."""
    try:
        return os.pathsep.join(map(str, ensure_jars(jar_set, lock=JARS_LOCK)))
    except SetupError as error:
        raise ToolchainError(str(error)) from error


def java_command(directory: Path, jar_set: str, artifact: str) -> list[str]:
    """Compile `Driver.java` with the jars of a set; return its command, whose argument is the artifact's version."""
    java = find_jdk()
    compiler = java.resolve().with_name("javac")
    jars = classpath(jar_set)
    source, classes = directory / "Driver.java", directory / "build"
    command = [str(compiler), "--release", "17", "-cp", jars, "-d", str(classes), str(source)]
    build_once(directory, [source, JARS_LOCK], classes, lambda: _run(command, directory))
    version = next(jar.version for jar in locked_jars(jar_set, JARS_LOCK) if jar.artifact == artifact)
    # A short run starts faster without the C2 compiler.
    flags = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m"]
    return [str(java), *flags, "-cp", os.pathsep.join([jars, str(classes)]), "Driver", version]


def go_program(directory: Path, file: Path | None = None) -> Path:
    """Build the module of a directory, or a single file with the module's dependencies; return the program's path."""
    go = tool("go", "golang-go")
    program = directory / "build" / ("driver" if file is None else file.stem)
    sources = [directory / "go.mod", directory / "go.sum", *(directory.glob("*.go") if file is None else [file])]
    command = [go, "build", "-mod=readonly", "-trimpath", "-o", str(program), "." if file is None else str(file)]
    build_once(directory, sources, program, lambda: _run(command, directory))
    return program


def cargo_program(directory: Path) -> Path:
    """Build the crate of a directory with exactly the crates of `crates.lock`; return the program's path."""
    cargo = tool("cargo", "cargo")
    program = directory / "build" / "target" / "debug" / "driver"
    lock = directory / "crates.lock"
    sources = [directory / "Cargo.toml", lock, *sorted((directory / "src").glob("*.rs"))]

    def build() -> None:
        # Cargo.lock names a registry in each entry, so the repository has a lock without these.
        place = directory / "build"
        shutil.copytree(directory / "src", place / "src", dirs_exist_ok=True)
        shutil.copy(directory / "Cargo.toml", place)
        (place / "Cargo.lock").write_text(with_source(lock.read_text(), registry_of(cargo)))
        _run([cargo, "build", "--locked", "--quiet"], place)

    build_once(directory, sources, program, build)
    return program


def registry_of(cargo: str) -> str:
    """Return the source that this machine's Cargo writes to a lock for its registry's crates."""
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
    """Add the source to each entry of a Cargo.lock that has a checksum."""
    return re.sub(r"^checksum = ", f'source = "{source}"\n\\g<0>', lock, flags=re.MULTILINE)


def without_source(lock: str) -> str:
    """Remove the sources from a Cargo.lock."""
    return re.sub(r"^source = .*\n", "", lock, flags=re.MULTILINE)


def lock_crates(directory: Path) -> None:
    """Rewrite `crates.lock`; versions that fit the manifest stay."""
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
    """Return the path of a program; `packages` are Debian's packages of it, for the error text."""
    found = shutil.which(name)
    if found is None:
        raise ToolchainError(f"{name} is not installed (Debian, Ubuntu: apt-get install {packages})")
    return found


def _run(command: list[str], directory: Path) -> None:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=LONGEST_S)
    if done.returncode != 0:
        raise ToolchainError(f"{Path(command[0]).name} {command[1]} failed: {done.stderr.strip()[-800:]}")


def build_once(directory: Path, sources: Iterable[Path], made: Path, make: Callable[[], None]) -> None:
    """Call `make` unless `made` is up to date with the sources; a lock serializes parallel test runs."""
    with _locked(directory / ".lock"):
        wanted = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()
        stamp = made.parent / f".{made.name}.made"
        if not made.exists() or not stamp.exists() or stamp.read_text() != wanted:
            stamp.unlink(missing_ok=True)
            make()
            stamp.write_text(wanted)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
