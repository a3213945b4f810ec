"""What runs: the package's version, for the command line, the log, the management port, metrics and spans."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from typing import Annotated

import msgspec

from telemetry.statistics import gauge


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


def statistics() -> Build:
    """Return the version for the metrics."""
    return Build(info={version(): {platform.python_version(): 1}})
