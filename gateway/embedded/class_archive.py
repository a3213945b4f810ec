"""Kafka's classes as Java has them in memory, in a file that it maps (class data sharing).

Reading and verifying six thousand classes is half of what a broker's start costs. The archive is made once for each
Java and set of jars (`class_recording`). Java compares it with itself and with the jars, and does without it where
anything differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from gateway.embedded.java import Java


def archive_path(java: Java, jars: Sequence[Path], cache: Path) -> Path:
    """Return where the archive of this Java and these jars is, or would be.

    Args:
        java: its build counts, not only its release.
        jars: all of them must be there; Java knows them by place, size and time of change.
        cache: the cache directory.
    """
    looks = [(str(jar), (status := jar.stat()).st_size, status.st_mtime_ns) for jar in jars]
    seen = hashlib.sha256(repr((str(java.path.resolve()), java.build, looks)).encode())
    return cache / "classes" / f"kafka-{seen.hexdigest()[:16]}.jsa"


def archive_options(archive: Path) -> tuple[str, ...]:
    """Return what Java is told that shall use the archive, if there is one."""
    return (f"-XX:SharedArchiveFile={archive}",) if archive.exists() else ()


def recording_options(archive: Path) -> tuple[str, ...]:
    """Return what Java is told that shall write the archive when it ends."""
    return (f"-XX:ArchiveClassesAtExit={archive}",)
