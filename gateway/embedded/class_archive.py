"""Class data sharing archives of Kafka and Spark: parsed classes in files that Java maps into memory.

Reading and verifying classes is half of the start time of either. An archive is created once for each Java and set of
jars (`tools.class_recording`). Java ignores an archive that does not fit its version or the jars.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from gateway.embedded.jars import pyspark_jars
from gateway.embedded.java import Java


def archive_path(program: str, java: Java, jars: Sequence[Path], cache: Path) -> Path:
    """Return the path of a program's archive, whether it exists or not.

    Args:
        program: `kafka` or `spark`: the name of its set in the jar lock.
        java: the exact build matters, not only the release.
        jars: the files of that set. Java identifies them by path, size and mtime. Spark's own jars are added.
        cache: the cache directory.
    """
    read = [*jars, *pyspark_jars()] if program == "spark" else jars
    looks = [(str(jar), (status := jar.stat()).st_size, status.st_mtime_ns) for jar in read]
    seen = hashlib.sha256(repr((str(java.path.resolve()), java.build, looks)).encode())
    return cache / "classes" / f"{program}-{seen.hexdigest()[:16]}.jsa"


def archive_options(archive: Path) -> tuple[str, ...]:
    """Return the Java options for using the archive; none when it does not exist."""
    return (f"-XX:SharedArchiveFile={archive}",) if archive.exists() else ()
