"""How a run with several workers (`-n`) is divided: by files, or folders whose files share fixtures; longest first."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

TOGETHER = ("tests/spark_sinks/", "tests/interop/amqp/", "tests/interop/mqtt/", "tests/gateway/kafka/test_")
"""Where one worker has all files: Spark's session, the foreign clients' programs, a secured broker are started once."""
LONGEST = (
    "tests/spark_sinks/",
    "tests/faults/",
    "tests/interop/",
    "tests/gateway/test_process.py",
    "tests/loadtest/",
    "tests/gateway/",
)
"""Where the tests are that take long, by the beginning of their paths; what is not here comes behind."""


class ByFile(LoadScopeScheduling):
    """Hands out a file at a time, or a folder whose files share what is dear to start."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False  # by the number of tests: it says nothing about their length
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid.partition("::")[0])


def longest_first(items: list[pytest.Item]) -> None:
    """Sort, so that no worker begins something long while the others have nothing left."""
    items.sort(key=lambda item: next((n for n, start in enumerate(LONGEST) if item.nodeid.startswith(start)), 99))
