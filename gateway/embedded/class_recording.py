"""Make the archive of Kafka's classes: start a broker that records what it loads, and stop it.

`python -m gateway.embedded.class_recording` is part of `make setup`. It takes some seconds; where there is an archive
it does nothing, and where none can be made brokers start as they would without.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
import tempfile
from pathlib import Path
from typing import Final

from gateway.embedded.broker import EmbeddedBroker
from gateway.embedded.class_archive import archive_path, recording_options
from gateway.embedded.jars import cache_directory, ensure_jars
from gateway.embedded.java import SetupError, find_java
from gateway.embedded.storage import BrokerError

KEPT: Final = 3
"""How many archives stay in the cache, the newest: each build of Java and each version of Kafka has its own."""
STOP_S: Final = 60.0  # the archive is written then: two seconds on a machine with nothing else to do


def ensure_archive(cache: Path) -> Path:
    """Make the archive unless it is there, and return its place; of several processes one does, the others wait.

    It is not there afterwards when this Java makes none.

    Raises:
        SetupError: no Java, or no jars.
        BrokerError: the broker does not start.
        OSError: the cache cannot be written.
    """
    java, jars = find_java(), ensure_jars("kafka", cache)
    archive = archive_path(java, jars, cache)
    archive.parent.mkdir(parents=True, exist_ok=True)
    with (archive.parent / ".lock").open("w") as lock, tempfile.TemporaryDirectory(dir=archive.parent) as directory:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            fresh = Path(directory, archive.name)
            options = recording_options(fresh)
            broker = EmbeddedBroker(Path(directory), java=java.path, jars=jars, heap="512m", java_options=options)
            asyncio.run(_record(broker))
            with contextlib.suppress(FileNotFoundError):
                fresh.rename(archive)
            for old in sorted(archive.parent.glob("*.jsa"), key=lambda path: -path.stat().st_mtime_ns)[KEPT:]:
                old.unlink()
    return archive


async def _record(broker: EmbeddedBroker) -> None:
    await broker.start()
    await broker.stop(STOP_S)


if __name__ == "__main__":
    try:
        ensure_archive(cache_directory())
    except (SetupError, BrokerError, OSError) as error:
        print(f"Kafka's classes were not recorded, it starts without: {error}", file=sys.stderr)  # noqa: T201
