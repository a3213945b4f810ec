"""Make the archives of the classes of Kafka and of Spark: let each record what it loads while it works, and stop it.

`python -m gateway.embedded.class_recording` is part of `make setup`. Kafka takes some seconds and Spark half a minute;
where there is an archive it does nothing, and where none can be made they start as they would without. With `kafka` as
its argument it leaves Spark alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shlex
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
"""How many archives of the same jars stay in the cache, the newest: each build of Java and each version has its own."""
STOP_S: Final = 120.0  # the archive is written then: two seconds (Kafka), ten (Spark) on a machine that is not busy
SPARK_S: Final = 240.0  # from Spark's start to its first results; fifteen seconds there

Record = Callable[[Path, tuple[str, ...]], Coroutine[Any, Any, None]]
"""Runs a program in an empty directory with these options for Java, and ends it in order."""


class RecordingError(SetupError):
    """The program did not get so far that its classes are worth keeping."""


def ensure_archives(cache: Path, *, spark: bool = True) -> None:
    """Make the archives that are not there; of several processes one does, the others wait.

    They are not there afterwards when this Java makes none. Spark's is made where pyspark is installed.

    Raises:
        SetupError: no Java, no jars, or Spark does not run.
        BrokerError: the broker does not start.
        OSError: the cache cannot be written.
    """
    java, kafka_jars = find_java(), ensure_jars("kafka", cache)
    kafka = archive_path("kafka", java, kafka_jars, cache)

    def broker(directory: Path, options: tuple[str, ...]) -> EmbeddedBroker:
        from gateway.embedded.broker import EmbeddedBroker  # noqa: PLC0415 - mostly there is nothing to record

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
    """Make one, unless it is there; `jar`: one of those whose classes it has, and without which it is of no use."""
    if archive.exists():
        return
    program, _, _ = archive.name.partition("-")
    archive.parent.mkdir(parents=True, exist_ok=True)
    with (archive.parent / ".lock").open("w") as lock, tempfile.TemporaryDirectory(dir=archive.parent) as directory:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if archive.exists():
            return
        sys.stderr.write(f"recording the classes of {program.capitalize()}, once\n")
        fresh = Path(directory, archive.name)
        asyncio.run(record(Path(directory), (f"-XX:ArchiveClassesAtExit={fresh}",)))  # written when it ends
        link = _link(archive)
        link.unlink(missing_ok=True)
        link.symlink_to(jar)
        with contextlib.suppress(FileNotFoundError):
            fresh.rename(archive)
        remove_useless(archive.parent, program)


def remove_useless(directory: Path, program: str) -> None:
    """Remove the archives whose jars are gone (a checkout that was removed), and of the same jars all but the newest.

    Checkouts that are there keep theirs, however many they are: else each would record again what the next one removed.
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
    """The link beside an archive that leads to one of its jars."""
    return archive.with_suffix(".of")


async def _run_spark(directory: Path, java: Java, jars: list[Path], options: tuple[str, ...], bootstrap: str) -> None:
    """A job in real time, as `make run` has it, over its first checkpoint: with good readings and a bad one."""
    from aiokafka import AIOKafkaProducer  # noqa: PLC0415 - as above
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
            "XDG_STATE_HOME": str(directory),  # it is none of the user's jobs
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
        print(f"classes were not recorded, starts take longer: {error}", file=sys.stderr)  # noqa: T201
