"""The Spark session of a job: everything that must be set before the JVM starts, in one place."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pyspark.sql import SparkSession

QUICK_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m"
"""With its first compiler alone Java has 48 MB for compiled code. Spark fills them, and Java compiles it all again."""
JARS = "spark.jars"
CLASS_PATH = "spark.driver.extraClassPath"
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
WORKER_START_S = 120
"""What a worker of Python may take to connect; Spark's 15 s are too short on a busy machine."""
_LIMIT = 16 << 20
AVRO_LIMITS = " ".join(
    f"-Dorg.apache.avro.limits.{of}.maxLength={limit}"
    for of, limit in (("bytes", _LIMIT), ("string", _LIMIT), ("collectionItems", _LIMIT >> 4))
)
"""A few bytes may say that two gigabytes follow: Java would end for lack of memory."""
_STORE = "spark.sql.streaming.stateStore"
IN_ROCKSDB = {
    f"{_STORE}.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    f"{_STORE}.checkpointFormatVersion": "2",  # else a checkpoint cannot change to real time
}
IN_LOCAL_FILES = {
    # Without native code Hadoop starts a process for each link that it looks for, and each mode that it sets. Spark's
    # usual manager looks at both ends of each rename, twice, and again for Hadoop's checksum beside each file: sixty
    # processes a batch, four fifths of them for links. Files of this machine have Hadoop's checksums, that are
    # verified: Spark's own beside them would double the files.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
}
IN_HEAP = {f"{_STORE}.providerClass": "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"}


def session(
    name: str,
    *,
    master: str | None,
    jars: Sequence[Path] = (),
    driver_memory: str = "1g",
    shuffle_partitions: int = 2,
    log_level: str = "WARN",
    ui: bool = False,
    quick_start: bool = False,
    state_in_heap: bool = False,
    java_options: str = "",
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Start (or reuse) the session, 5-6 s when the JVM has to start.

    Jars are given as files; Spark resolves nothing at run time, so a job starts without a network. With a local
    master they are on the class path, where Java finds their classes in an archive; others send them to their
    workers. Times without a zone are UTC, wherever the job runs.

    Args:
        name: the application's name in logs and on a cluster.
        master: any Spark master. Real-time mode needs as many slots as all stages have tasks. None: `spark-submit` was
            told, and of jars, memory and Java too.
        jars: the Kafka connector and what it needs, as paths that exist on this machine.
        driver_memory: heap of the driver; with a local master it is the heap of everything.
        shuffle_partitions: tasks of a stateful stage. A checkpoint keeps the number of its first start.
        log_level: log4j level of Spark's own log.
        ui: whether Spark's web pages are served.
        quick_start: trade the driver's peak speed for its start: only the JVM's first compiler (10 s instead of
            17 s until a job reads, on two busy cores). For demos and tests.
        state_in_heap: keep the state of queries in the heap: faster, as long as it fits, and not for real time.
            A checkpoint keeps what it was begun with.
        java_options: more options of the driver's JVM, quoted as for a shell.
        conf: anything else of Spark's configuration; wins over the settings made here, but for jars, class path and
            options of the driver's JVM, which come behind ours.
    """
    os.environ["PYSPARK_PYTHON"] = workers_python(master or "", os.environ)
    # The workers that Spark starts for its driver are not told of the setting for the others.
    os.environ.setdefault("SPARK_AUTH_SOCKET_TIMEOUT", str(WORKER_START_S))
    missing = [str(jar) for jar in jars if not jar.is_file()]
    if missing:
        raise FileNotFoundError(f"no such jar: {', '.join(missing)}")
    settings = {
        "spark.ui.enabled": str(ui).lower(),
        "spark.ui.showConsoleProgress": "false",
        # Else what Spark says of tasks that start within 0.1 s of their stage is as of its next heartbeat: ten seconds.
        "spark.ui.liveUpdate.period": "0",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(shuffle_partitions),
        "spark.python.authenticate.socketTimeout": f"{WORKER_START_S}s",
        "spark.executor.extraJavaOptions": AVRO_LIMITS,
        **(IN_HEAP if state_in_heap else IN_ROCKSDB),
        # One stateful operator per query: late rows are judged by the watermark that the batch reports.
        "spark.sql.streaming.statefulOperator.allowMultiple": "false",
        **(conf or {}),
    }
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
        java = (AVRO_LIMITS, QUICK_START if quick_start else "", java_options)
        if master.startswith("local"):
            settings = {**IN_LOCAL_FILES, **settings}
        settings |= {"spark.driver.memory": driver_memory, **driver_settings(master, jars, java, conf or {})}
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel(log_level)
    return spark


def workers_python(master: str, environment: Mapping[str, str]) -> str:
    """The Python of Spark's workers: ours with a local master, else what `PYSPARK_PYTHON` says is on the cluster.

    Without it Spark takes whatever `python3` is on the path, and a worker whose version is not the driver's fails.
    """
    own = sys.executable
    return own if master.startswith("local") else environment.get("PYSPARK_PYTHON") or own


def driver_settings(
    master: str, jars: Sequence[Path], java_options: Sequence[str], conf: Mapping[str, str]
) -> dict[str, str]:
    """Return `conf` with what the driver must be told of its jars, of Java and of where it is.

    A jar or an option in `conf` comes behind ours.
    """
    told = driver_java(conf, *java_options)
    if not master.startswith("local"):
        told[JARS] = ",".join(filter(None, (*(str(jar.resolve()) for jar in jars), conf.get(JARS))))
        return {**conf, **told}
    told[CLASS_PATH] = ":".join(filter(None, (*map(str, jars), conf.get(CLASS_PATH))))
    return {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", **conf, **told}


def driver_java(conf: Mapping[str, str], *options: str) -> dict[str, str]:
    """The options of the driver's JVM: `options`, and behind them those of `conf`."""
    return {JAVA_OPTIONS: " ".join(filter(None, (*options, conf.get(JAVA_OPTIONS))))}
