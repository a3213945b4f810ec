"""The embedded broker's open files and their limit, and whether more partitions fit.

Every partition keeps a log file open for as long as it exists, and has two memory maps of its indexes. A broker that
reaches its limit ends, and cannot start again with its data, so topics are refused long before.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import msgspec

from gateway.embedded.storage import BrokerError
from telemetry.statistics import gauge

SHARE: Final = 0.7
"""Share of the limit that all partitions may use, the new ones included. The rest is for clients, new segments and
compaction."""
FILES_WITHOUT_DATA: Final = 300
"""Open files of a broker without data: jars, sockets, internal topics."""
_MAPS_OF_A_LOG: Final = 2
_MAP_LIMIT: Final = Path("/proc/sys/vm/max_map_count")
_USUAL_MAP_LIMIT: Final = 65530


class OpenFilesStatistics(msgspec.Struct, frozen=True):
    """Open files of the embedded broker; 0 while it does not run."""

    open_files: Annotated[int, gauge("open files of the embedded Kafka; 0 while it is not running")]
    open_files_limit: Annotated[int, gauge("limit of open files of the embedded Kafka")]


class BrokerCapacity:
    """Observes one broker; a `gateway.kafka.cluster.topic_creation.PartitionCapacity`."""

    def __init__(self, pid: Callable[[], int | None]) -> None:
        """`pid` returns the broker's process id, or None while it does not run."""
        self._pid = pid

    def __call__(self, partitions: int, more: int) -> str | None:
        """Return why `more` partitions do not fit in addition to the existing ones; None when they do."""
        counts = self.statistics()
        most = int(SHARE * counts.open_files_limit)
        # The broker opens a new partition's log shortly after the partition appears in metadata.
        files = max(counts.open_files, FILES_WITHOUT_DATA + partitions)
        if not counts.open_files_limit or files + more <= most:
            return None
        return (
            f"the embedded Kafka needs {files} open files for its {partitions} partitions and may have"
            f" {counts.open_files_limit}: {more} more do not fit"
        )

    def statistics(self) -> OpenFilesStatistics:
        """Return the current statistics."""
        pid = self._pid()
        if pid is None:
            return OpenFilesStatistics(0, 0)
        try:
            limit, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            return OpenFilesStatistics(sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()), min(limit, max_logs()))
        except OSError:  # the broker has just ended
            return OpenFilesStatistics(0, 0)


def max_logs() -> int:
    """Return how many partition logs the kernel lets one process map."""
    try:
        maps = int(_MAP_LIMIT.read_text())
    except (OSError, ValueError):
        maps = _USUAL_MAP_LIMIT
    return maps // _MAPS_OF_A_LOG


def check_descriptors(directory: Path) -> None:
    """Raise BrokerError when the data in `directory` have more logs than the broker may open."""
    logs = sum(1 for _ in directory.glob("data/*/*.log"))
    needed = logs + FILES_WITHOUT_DATA
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise BrokerError(
            f"the embedded Kafka has {logs} log files in {directory} and may open {limit} files: allow at least"
            f" {needed * 2} (ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of docker) and start again"
        )
    if needed > max_logs():
        raise BrokerError(
            f"the embedded Kafka has {logs} log files in {directory}, and the kernel lets it map {max_logs()}: set"
            f" vm.max_map_count to {needed * 2 * _MAPS_OF_A_LOG} at least and start again"
        )
