"""Describes the machine and software of a load test, which its figures depend on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any, Final

PACKAGES: Final = ("trivium", "aiokafka", "python-qpid-proton", "aiohttp", "uvloop")


def environment() -> dict[str, Any]:
    """Return the machine, versions, commit, and the machine's load before the test."""
    return {
        "machine": f"{platform.machine()}, {_processor()}, {os.cpu_count()} processors, {_memory_gib():.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "versions": {"Python": platform.python_version()}
        | {name: version for name in PACKAGES if (version := _version(name))},
        "commit": _commit(),
        "load before": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _memory_gib() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    here = Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=here, capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()
