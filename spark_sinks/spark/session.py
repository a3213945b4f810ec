"""Creates a job's Spark session, with every setting that must be made before the JVM starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

QUICK_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m"
"""With only its first compiler, Java reserves 48 MB for code. Spark fills them, and Java would recompile forever."""
JARS = "spark.jars"
CLASS_PATH = "spark.driver.extraClassPath"
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
WORKER_START_S = 120
"""How long a Python worker may take to connect; Spark's 15 s are too short on a busy machine."""
_LIMIT = 16 << 20
AVRO_LIMITS = " ".join(
    f"-Dorg.apache.avro.limits.{of}.maxLength={limit}"
    for of, limit in (("bytes", _LIMIT), ("string", _LIMIT), ("collectionItems", _LIMIT >> 4))
)
"""Limits against a few bytes that claim two gigabytes follow, which would exhaust Java's memory."""
_STORE = "spark.sql.streaming.stateStore"
IN_ROCKSDB = {
    f"{_STORE}.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    f"{_STORE}.checkpointFormatVersion": "2",  # else a checkpoint cannot be used in real time later
}
IN_LOCAL_FILES = {
    # Without native code Hadoop starts a process for each link it checks and each mode it sets. Spark's default manager
    # checks both ends of each rename twice, and again for Hadoop's checksum file: sixty processes per batch, four
    # fifths of them for links. Hadoop already verifies its checksums of local files; Spark's own would double the
    # files.
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

    Jars are given as files; Spark resolves nothing at run time, so a job starts without network access. With a local
    master they are on the class path, where Java finds their classes in an archive; other masters send them to their
    workers. Times without a zone are UTC on every machine.

    Args:
        name: the application's name in logs and on a cluster.
        master: any Spark master. Real-time mode needs as many slots as all stages have tasks. None means that
            `spark-submit` sets the master, jars, memory and Java options.
        jars: the Kafka connector and its dependencies.
        driver_memory: heap of the driver; with a local master it is the heap of the whole job.
        shuffle_partitions: tasks of a stateful stage. A checkpoint keeps the number of its first start.
        log_level: of Spark's own log.
        ui: whether Spark's web pages are served.
        quick_start: trade the driver's peak speed for a faster start, with only the JVM's first compiler (10 s instead
            of 17 s until a job reads, on two busy cores). For demos and tests.
        state_in_heap: keep state in the heap, which is faster if it fits, and not supported in real time. A
            checkpoint keeps the kind of store that it was created with.
        java_options: more options for the driver's JVM, quoted as for a shell.
        conf: more Spark settings. They override the settings made here, except jars, class path and the driver's JVM
            options, which are appended to ours.
    """
    os.environ["PYSPARK_PYTHON"] = workers_python(master or "", os.environ)
    # Workers that Spark starts for its driver do not get `spark.python.authenticate.socketTimeout`.
    os.environ.setdefault("SPARK_AUTH_SOCKET_TIMEOUT", str(WORKER_START_S))
    missing = [str(jar) for jar in jars if not jar.is_file()]
    if missing:
        raise FileNotFoundError(f"no such jar: {', '.join(missing)}")
    settings = {
        "spark.ui.enabled": str(ui).lower(),
        "spark.ui.showConsoleProgress": "false",
        # Else the status of tasks that start within 0.1 s of their stage is updated only at the next heartbeat, after
        # 10 s.
        "spark.ui.liveUpdate.period": "0",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(shuffle_partitions),
        "spark.python.authenticate.socketTimeout": f"{WORKER_START_S}s",
        "spark.executor.extraJavaOptions": AVRO_LIMITS,
        **(IN_HEAP if state_in_heap else IN_ROCKSDB),
        # Else Python asks Java several times more for each column, so that errors can name the line that made it.
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        "spark.sql.dataFrameQueryContext.enabled": "false",
        # One stateful operator per query, so late rows are dropped by the watermark that the batch reports.
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
    if SparkContext._gateway is None:
        # In a session of its own: a signal to our process group is for us, and we end the JVM.
        conf_of_jvm = SparkConf(loadDefaults=False).setAll([*settings.items()])
        launch: Any = launch_gateway  # it has no types
        gateway = launch(conf_of_jvm, {"start_new_session": True})
        SparkContext._ensure_initialized(gateway=gateway, conf=conf_of_jvm)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel(log_level)
    return spark


def workers_python(master: str, environment: Mapping[str, str]) -> str:
    """Return the Python of Spark's workers: this one with a local master, else the cluster's (`PYSPARK_PYTHON`).

    Without this setting Spark takes any `python3` on the path, and fails if its version differs from the driver's.
    """
    own = sys.executable
    return own if master.startswith("local") else environment.get("PYSPARK_PYTHON") or own


def driver_settings(
    master: str, jars: Sequence[Path], java_options: Sequence[str], conf: Mapping[str, str]
) -> dict[str, str]:
    """Return `conf` with the driver's jars, JVM options and addresses.

    A jar or an option in `conf` comes after ours.
    """
    settings = driver_java(conf, *java_options)
    if not master.startswith("local"):
        settings[JARS] = ",".join(filter(None, (*(str(jar.resolve()) for jar in jars), conf.get(JARS))))
        return {**conf, **settings}
    settings[CLASS_PATH] = ":".join(filter(None, (*map(str, jars), conf.get(CLASS_PATH))))
    return {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", **conf, **settings}


def driver_java(conf: Mapping[str, str], *options: str) -> dict[str, str]:
    """Return the driver's JVM options: `options`, then those in `conf`."""
    return {JAVA_OPTIONS: " ".join(filter(None, (*options, conf.get(JAVA_OPTIONS))))}
