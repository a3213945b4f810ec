"""Run Apache Ivy as a child process: it fetches pinned modules into a staging directory.

Ivy's own cache is in the staging directory too, so that files of an interrupted run are used by the next. Transitive
dependencies are off: the lock names every module.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import quoteattr

import msgspec

from gateway.embedded.child import command_line

SILENCE_S = 120.0  # Ivy prints a dot per 16 kB; without any output for this long the repository does not answer

_NETWORK = re.compile(
    r"UnknownHost|Host .* not found|Connection(?: was)? (?:refused|reset)|ConnectException|SocketException"
    r"|NoRouteToHost|Network is unreachable|timed? ?out|HTTP response status: (?:429|5\d\d)"
    r"|response code:? (?:429|5\d\d)|SSLHandshakeException|SSLException|EOFException|Premature EOF",
    re.IGNORECASE,
)
_FULL = "No space left on device"
_FETCHED = re.compile(r"\[SUCCESSFUL ?\] \S+#(\S+?);(\S+?)!")
_FOUND = re.compile(r"^\s*found \S+#(\S+);(\S+) in ")
_INFORMATIVE = re.compile(r"FAILED|ERROR|not found|Exception|UNRESOLVED|unresolved|download failed", re.IGNORECASE)
_HEADINGS = {"ERRORS", "WARNINGS", "UNRESOLVED DEPENDENCIES"}

# Ivy's default repository, but without reading the modules' POMs and parent POMs: that would be four requests a jar
# instead of two, and the lock is authoritative anyway.
_SETTINGS = (
    '<ivysettings><settings defaultResolver="default"/><resolvers>'
    '<ibiblio name="default" m2compatible="true" usepoms="false"/></resolvers></ivysettings>\n'
)

Module = tuple[str, str, str]  # group, artifact, version


class IvyError(Exception):
    """Ivy did not fetch everything."""


class NetworkError(IvyError):
    """The repository cannot be reached or does not answer: a later attempt may succeed."""


class DiskFullError(IvyError):
    """No space for the files."""


class Step(msgspec.Struct, frozen=True):
    """A module was found in the repository, or its file was fetched."""

    text: str
    is_fetched: bool


def ivy_file(modules: Sequence[Module]) -> str:
    """Return the Ivy file that requests exactly these modules.

    `master` is the configuration of a Maven module's own jar, `default` that of a module without a POM.
    """
    lines = [
        f"<dependency org={quoteattr(group)} name={quoteattr(artifact)} rev={quoteattr(version)}"
        ' transitive="false" conf="default->master(default)"/>'
        for group, artifact, version in modules
    ]
    return (
        '<ivy-module version="2.0"><info organisation="trivium" module="jars"/>'
        '<configurations><conf name="default"/></configurations>'
        "<dependencies>\n" + "\n".join(lines) + "\n</dependencies></ivy-module>\n"
    )


def retrieved(staging: Path, file_name: str) -> Path:
    """Return the path to which `retrieve` writes a file."""
    return staging / "retrieved" / file_name


def forget(staging: Path, group: str, artifact: str, file_name: str) -> None:
    """Remove a module from the staging directory, so that the next run fetches it again."""
    shutil.rmtree(staging / "ivy" / group / artifact, ignore_errors=True)
    retrieved(staging, file_name).unlink(missing_ok=True)


def retrieve(
    *,
    java: Path,
    ivy: Path,
    settings: Path | None,
    modules: Sequence[Module],
    staging: Path,
    environment: Mapping[str, str] = os.environ,
) -> Iterator[Step]:
    """Run Ivy and yield each step as it happens; afterwards the files are at `retrieved(staging, ...)`.

    `settings` is an Ivy settings file with the repositories; None means Ivy's default (Maven Central).

    Raises:
        NetworkError: the repository does not answer.
        DiskFullError: no space.
        IvyError: anything else, such as a module that the repository does not have.
    """
    staging.mkdir(parents=True, exist_ok=True)
    wanted = staging / "ivy.xml"
    wanted.write_text(ivy_file(modules))
    command = command_line(str(java), "-jar", str(ivy), "-ivy", str(wanted), "-cache", str(staging / "ivy"))
    if settings is None:
        settings = staging / "settings.xml"
        settings.write_text(_SETTINGS)
    command += ["-settings", str(settings)]
    command += ["-retrieve", f"{staging}/retrieved/[artifact]-[revision].jar", "-types", "jar", "bundle"]
    last_lines: list[str] = []
    child = subprocess.Popen(  # noqa: S603 - our own command
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=dict(environment)
    )
    try:
        for line in _lines(child):
            if fetched := _FETCHED.search(line):
                yield Step(f"{fetched[1]}-{fetched[2]}", True)
            elif match := _FOUND.match(line):
                yield Step(f"{match[1]}-{match[2]}", False)
            elif _INFORMATIVE.search(line) or _FULL in line:
                last_lines.append(line.strip())
        code = child.wait()
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    if code != 0:
        raise _failure(last_lines, code)


def _lines(child: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield the child's output lines. Raises NetworkError when there is none for too long."""
    assert child.stdout is not None
    rest = b""
    while True:
        readable, _, _ = select.select([child.stdout], [], [], SILENCE_S)
        if not readable:
            raise NetworkError(f"no progress for {SILENCE_S:.0f} s")
        data = os.read(child.stdout.fileno(), 65536)
        if not data:
            break
        *whole, rest = (rest + data).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
    yield rest.decode(errors="replace")


def _failure(last_lines: Sequence[str], code: int) -> IvyError:
    """Build the error from the most informative line."""
    for line in last_lines:
        if _FULL in line:
            return DiskFullError(line)
    for line in last_lines:
        if _NETWORK.search(line):
            return NetworkError(line.strip(": "))
    lines = [line for line in (line.strip(": ") for line in last_lines) if line.upper() not in _HEADINGS]
    return IvyError(lines[0] if lines else f"Ivy ended with code {code}")
