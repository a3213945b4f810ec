"""The classes of Kafka and of Spark as Java has them in memory, in files that it maps (class data sharing).

Reading and verifying classes is half of what a start of either costs. An archive is made once for each Java and set of
jars (`class_recording`). Java compares it with itself and with the jars, and does without it where anything differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from gateway.embedded.jars import pyspark_jars
from gateway.embedded.java import Java


def archive_path(program: str, java: Java, jars: Sequence[Path], cache: Path) -> Path:
    """Return where the archive of a program is, or would be.

    Args:
        program: `kafka` or `spark`: the name of its set in the lock of the jars.
        java: its build counts, not only its release.
        jars: that set, all of it there; Java knows them by place, size and time of change. Spark has more of its own.
        cache: the cache directory.
    """
    read = [*jars, *pyspark_jars()] if program == "spark" else jars
    looks = [(str(jar), (status := jar.stat()).st_size, status.st_mtime_ns) for jar in read]
    seen = hashlib.sha256(repr((str(java.path.resolve()), java.build, looks)).encode())
    return cache / "classes" / f"{program}-{seen.hexdigest()[:16]}.jsa"


def archive_options(archive: Path) -> tuple[str, ...]:
    """Return what Java is told that shall use the archive, if there is one."""
    return (f"-XX:SharedArchiveFile={archive}",) if archive.exists() else ()
