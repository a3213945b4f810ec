"""What runs: the package's version, for the command line, the log, the management port, metrics and spans.

And the versions of the libraries whose private parts we use: another one may lack them, or do something else in them.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from typing import Annotated, Final

import msgspec

from telemetry.statistics import gauge

BOUND: Final = {"aiohttp": "3.14.*", "aiokafka": "0.14.0", "python-qpid-proton": "0.40.*"}
"""The versions of libraries that the gateway works with, as in pyproject.toml."""


class LibraryError(Exception):
    """A library is absent or has a version that the gateway does not work with; the text says what to install."""


class Build(msgspec.Struct, frozen=True):
    """The running program, as Prometheus users expect it: a metric whose labels are the information."""

    info: Annotated[dict[str, dict[str, int]], gauge("always 1; the labels say what runs", "version", "python")]


@functools.cache  # the look-up reads files
def version() -> str:
    """Return the package's version; "0" when run from a checkout that is not installed."""
    try:
        return importlib.metadata.version("trivium")
    except importlib.metadata.PackageNotFoundError:
        return "0"


def check_libraries() -> None:
    """Check the versions of `BOUND`. Raises LibraryError, and is to be called before they are imported."""
    for name, bound in BOUND.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed = "not installed"
        exact, mark, _ = bound.partition("*")
        if installed != bound and not (mark and installed.startswith(exact)):
            raise LibraryError(f"{name} is {installed}, but trivium {version()} needs {name}=={bound}: install that")


def statistics() -> Build:
    """Return the version for the metrics."""
    return Build(info={version(): {platform.python_version(): 1}})
