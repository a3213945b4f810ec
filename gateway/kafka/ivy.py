"""Apache Ivy as a child process: pinned modules in, files in a staging directory out.

Ivy's own cache lies in the staging directory too, so that what an interrupted run had completed serves the next.
Modules are not transitive: the lock names every one of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

SILENCE_S = 120.0  # Ivy prints a dot per 16 kB; a repository that is silent for so long does not answer

_NETWORK = re.compile(
    r"UnknownHost|Host .* not found|Connection(?: was)? (?:refused|reset)|ConnectException|SocketException"
    r"|NoRouteToHost|Network is unreachable|timed? ?out|HTTP response status: (?:429|5\d\d)|response code:? (?:429|5\d\d)"
    r"|SSLHandshakeException|SSLException|EOFException|Premature EOF",
    re.IGNORECASE,
)
_FULL = "No space left on device"
_FETCHED = re.compile(r"\[SUCCESSFUL ?\] \S+#(\S+?);(\S+?)!")
_FOUND = re.compile(r"^\s*found \S+#(\S+);(\S+) in ")
_TELLING = re.compile(r"FAILED|ERROR|not found|Exception|UNRESOLVED|unresolved|download failed", re.IGNORECASE)
_HEADINGS = {"ERRORS", "WARNINGS", "UNRESOLVED DEPENDENCIES"}

Module = tuple[str, str, str]  # group, artifact, version


class IvyError(Exception):
    """Ivy did not bring everything."""


class NetworkError(IvyError):
    """The repository could not be reached or did not answer: a later attempt may succeed."""


class DiskFullError(IvyError):
    """No space for the files."""


class Step(msgspec.Struct, frozen=True):
    """One module was found in the repository, or its file was fetched."""

    text: str
    is_fetched: bool


def ivy_file(modules: Sequence[Module]) -> str:
    """Return the Ivy file that asks for exactly these modules."""
    lines = [line.strip(": ") for line in tail]
    lines = [line for line in lines if line.upper() not in _HEADINGS]
    return IvyError(lines[0] if lines else f"Ivy ended with code {code}")
