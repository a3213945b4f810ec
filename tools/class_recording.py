"""Create the class data sharing archives of Kafka and Spark, by running each once while Java records its classes.

`python -m tools.class_recording` is part of `make setup`, and `make run` does it beside, after the first result. Kafka
takes some seconds and Spark half a minute.
Existing archives are kept; without an archive the programs just start slower. With the argument `kafka` it leaves out
Spark.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gateway.embedded.class_archive import archive_options, archive_path
from gateway.embedded.jars import cache_directory, ensure_jars, pyspark_jars
from gateway.embedded.java import Java, SetupError, find_java
from gateway.embedded.storage import BrokerError

if TYPE_CHECKING:
    from gateway.embedded.broker import EmbeddedBroker

KEPT: Final = 3
"""How many archives of the same jars stay in the cache, the newest; each build of Java has its own."""
UNFINISHED: Final = "recording-"
STOP_S: Final = 120.0  # Java writes the archive at exit: two seconds (Kafka) or ten (Spark) on an idle machine
SPARK_S: Final = 240.0  # from Spark's start to its first results; fifteen seconds on an idle machine

Record = Callable[[Path, tuple[str, ...]], Coroutine[Any, Any, None]]
"""Runs a program in an empty directory with these Java options, and stops it gracefully."""


class RecordingError(SetupError):
    """The program failed, or gave no result in time, so that its classes were not recorded."""


def ensure_archives(cache: Path, *, spark: bool = True) -> None:
    """Create missing archives; of several processes one does, and the others wait.

    No archive is created if this Java does not support it. Spark's is created if pyspark is installed.

    Raises:
        SetupError: no Java, no jars, or Spark does not run.
        BrokerError: the broker does not start.
        OSError: the cache cannot be written.
    """
    java, kafka_jars = find_java(), ensure_jars("kafka", cache)
    kafka = archive_path("kafka", java, kafka_jars, cache)

    def broker(directory: Path, options: tuple[str, ...]) -> EmbeddedBroker:
        from gateway.embedded.broker import EmbeddedBroker  # noqa: PLC0415 - usually there is nothing to record

        return EmbeddedBroker(directory, java=java.path, jars=kafka_jars, heap="512m", java_options=options)

    async def record_kafka(directory: Path, options: tuple[str, ...]) -> None:
        recorded = broker(directory, options)
        await recorded.start()
        await recorded.stop(STOP_S)

    _ensure(kafka, kafka_jars[0], record_kafka)
    if not spark or not pyspark_jars():
        return
    spark_jars = ensure_jars("spark", cache)

    async def record_spark(directory: Path, options: tuple[str, ...]) -> None:
        async with broker(directory, archive_options(kafka)) as serving:
            await _run_spark(directory, java, spark_jars, options, serving.bootstrap_servers)

    _ensure(archive_path("spark", java, spark_jars, cache), pyspark_jars()[0], record_spark)


def _ensure(archive: Path, jar: Path, record: Record) -> None:
    """Create an archive unless it exists. `jar` is one of its jars: without them the archive is useless."""
    if archive.exists():
        return
    program, _, _ = archive.name.partition("-")
    archive.parent.mkdir(parents=True, exist_ok=True)
    with (archive.parent / ".lock").open("w") as lock, contextlib.ExitStack() as stack:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if archive.exists():
            return
        for left in archive.parent.glob(f"{UNFINISHED}*"):  # by one that was killed
            shutil.rmtree(left)
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=archive.parent))
        sys.stderr.write(f"recording the classes of {program.capitalize()}, once\n")
        fresh = Path(directory, archive.name)
        asyncio.run(record(Path(directory), (f"-XX:ArchiveClassesAtExit={fresh}",)))  # written at exit
        link = _link(archive)
        link.unlink(missing_ok=True)
        link.symlink_to(jar)
        with contextlib.suppress(FileNotFoundError):
            fresh.rename(archive)
        remove_useless(archive.parent, program)


def remove_useless(directory: Path, program: str) -> None:
    """Remove archives whose jars no longer exist (of a removed checkout), and all but the newest of the same jars.

    Existing checkouts keep theirs, however many there are: otherwise they would remove each other's archives.
    """
    kept: Counter[str] = Counter()
    for archive in sorted(directory.glob(f"{program}-*.jsa"), key=lambda path: -path.stat().st_mtime_ns):
        link = _link(archive)
        jar = str(link.readlink()) if link.is_symlink() else ""
        kept[jar] += 1
        if kept[jar] > KEPT or (jar and not link.exists()):
            archive.unlink()
            link.unlink(missing_ok=True)


def _link(archive: Path) -> Path:
    """Return the path of the symbolic link to one of an archive's jars."""
    return archive.with_suffix(".of")


async def _run_spark(directory: Path, java: Java, jars: list[Path], options: tuple[str, ...], bootstrap: str) -> None:
    """Run a real-time job like that of `make run` past its first checkpoint, with a good and a bad reading."""
    from aiokafka import AIOKafkaProducer  # noqa: PLC0415 - usually there is nothing to record
    from aiokafka.admin import AIOKafkaAdminClient, NewTopic  # noqa: PLC0415

    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic(name, 1, 1) for name in ("sensors", "maximum", "sensors-dlq")])
    await admin.close()
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        now = time.time_ns() // 1_000_000
        for value in (json.dumps({"temperature": 20, "time": now}).encode(), b"hot"):
            await producer.send_and_wait("sensors", value, b"oven")
    job = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "spark_sinks", "max-temperature", "--bootstrap-servers", bootstrap),
        *("--checkpoint", str(directory / "checkpoint"), "--jars", ",".join(map(str, jars))),
        *("--trigger", "real-time", "--interval", "5s", "--quick-start", "--stop-limit", str(STOP_S)),
        *("--die-with-parent", f"--driver-java-options={shlex.join(options)}"),
        env={
            **os.environ, "JAVA_HOME": str(java.path.resolve().parent.parent),
            "XDG_STATE_HOME": str(directory),  # keep it apart from the user's jobs
        },
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert job.stdout is not None
    try:
        async with asyncio.timeout(SPARK_S):
            async for line in job.stdout:
                report = json.loads(line)
                if report.get("query") == "max-temperature" and report["rows"]:
                    break
    except TimeoutError:
        raise RecordingError(f"no result of Spark within {SPARK_S:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            job.terminate()
        _, errors = await job.communicate()
    if job.returncode != 0:
        raise RecordingError(errors.decode(errors="replace").strip() or f"Spark ended with {job.returncode}")


if __name__ == "__main__":
    try:
        ensure_archives(cache_directory(), spark=sys.argv[1:] != ["kafka"])
    except (SetupError, BrokerError, OSError) as error:
        print(f"classes were not recorded, starts will take longer: {error}", file=sys.stderr)  # noqa: T201
