"""How a run with several workers (`-n`) is divided: whole files, for their tests share fixtures; the longest first."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

SPARK = "tests/spark_sinks/"
LONGEST = (
    SPARK,
    "tests/faults/",
    "tests/gateway/test_process.py",
    "tests/loadtest/",
    "tests/interop/",
    "tests/gateway/",
)
"""Where the tests are that take long, by the beginning of their paths; what is not here comes behind."""


class ByFile(LoadScopeScheduling):
    """Hands out a file at a time, and all that needs Spark to one worker, so that there is one Spark session."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False  # by the number of tests: it says nothing about their length
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return SPARK if nodeid.startswith(SPARK) else nodeid.partition("::")[0]


def longest_first(items: list[pytest.Item]) -> None:
    """Sort, so that no worker begins something long while the others have nothing left."""
    items.sort(key=lambda item: next((n for n, start in enumerate(LONGEST) if item.nodeid.startswith(start)), 99))
