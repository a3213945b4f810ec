"""Distributes a run over workers (`-n`) by file; files that share what is slow to start go to one worker, first."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, Final

import pytest
from xdist.scheduler import LoadScopeScheduling

ROOT: Final = Path(__file__).parents[2]
SHARED: Final = {
    "the Spark session": re.compile(r"\b(spark: SparkSession|run_job|run_once)\b"),
    "the broker that is stopped": re.compile(r"\bstoppable\b"),
    "the secured broker": re.compile(r"\bsecured_broker\b"),
}
"""What one worker starts for all files that use it, and how a test asks for it. A second Kafka takes a tenth of a core
even when it has nothing to do."""
TOGETHER: Final = ("tests/interop/amqp/", "tests/interop/mqtt/")
"""Folders that one worker runs completely, to start the foreign clients only once."""
LONGEST: Final = (
    *SHARED,
    "tests/spark_sinks/",
    "tests/interop/",
    "tests/faults/",
    "tests/gateway/process/test_process.py",
    "tests/loadtest/",
    "tests/gateway/",
)
"""The slow scopes, the slowest first, by the start of their names; all others follow."""


class ByFile(LoadScopeScheduling):
    """Assigns one file at a time, or all files that share an expensive fixture."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False  # it sorts by the number of tests, not by duration
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid.partition("::")[0])


@functools.cache
def scope(file: str) -> str:
    """Return what is assigned as one: a test file, a folder, or all files that share something."""
    text = (ROOT / file).read_text()
    shared = next((name for name, asked in SHARED.items() if asked.search(text)), None)
    return shared or next((folder for folder in TOGETHER if file.startswith(folder)), file)


def longest_first(items: list[pytest.Item]) -> None:
    """Sort the tests so that no worker starts a long file while the others have nothing left."""
    scopes = [scope(item.nodeid.partition("::")[0]) for item in items]
    order = {name: next((n for n, start in enumerate(LONGEST) if name.startswith(start)), 99) for name in set(scopes)}
    places = sorted(range(len(items)), key=lambda place: order[scopes[place]])
    items[:] = [items[place] for place in places]
