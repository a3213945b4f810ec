"""Distributes a run over workers (`-n`) by file, or by folder where files share fixtures; the longest first."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

TOGETHER = ("tests/spark_sinks/", "tests/interop/amqp/", "tests/interop/mqtt/", "tests/gateway/kafka/test_")
"""Folders that one worker runs completely, to start Spark, the foreign clients or a secured broker only once."""
ALONE = tuple(
    f"tests/spark_sinks/test_{name}.py"
    for name in (
        "archive_segments",
        "archive_tables",
        "bridge_audit",
        "decoders",
        "drivers",
        "job_files",
        "job_options",
        "metrics",
        "replays",
        "runs",
        "spark_process",
        "stopped_replays",
        "submit",
        "unreadable_records",
        "whose_clocks_count",
    )
)
"""Files in such a folder that do without what the others share."""
LONGEST = (
    "tests/spark_sinks/",
    "tests/faults/",
    "tests/interop/",
    "tests/gateway/process/test_process.py",
    "tests/loadtest/",
    "tests/gateway/",
)
"""Path prefixes of the slow tests, the slowest first; all other tests follow."""


class ByFile(LoadScopeScheduling):
    """Assigns one file at a time, or one folder whose files share an expensive fixture."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False  # it sorts by the number of tests, not by duration
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((folder for folder in TOGETHER if file.startswith(folder) and file not in ALONE), file)


def longest_first(items: list[pytest.Item]) -> None:
    """Sort the tests so that no worker starts a long file while the others have nothing left."""
    items.sort(key=lambda item: next((n for n, start in enumerate(LONGEST) if item.nodeid.startswith(start)), 99))
