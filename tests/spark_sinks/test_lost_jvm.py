"""The last line of a job whose JVM has ended."""

from __future__ import annotations

from pathlib import Path

from py4j.protocol import Py4JNetworkError

from spark_sinks.spark.lost_jvm import LAST, reason

LOST = Py4JNetworkError("Answer from Java side is empty")


def test_the_last_error_of_this_run_is_named_with_the_setting_that_helps(tmp_path: Path) -> None:
    log = tmp_path / "spark.log"
    log.write_bytes(b"java.lang.StackOverflowError\n")
    since = log.stat().st_size
    assert "has ended; the system may have killed it" in (reason(LOST, log, since) or "")
    with log.open("ab") as more:
        more.write(b"26/11/28 ERROR Utils: Uncaught exception\njava.lang.NoSuchMethodError: a\n" + b"x" * LAST)
        more.write(b'\nException in thread "x" java.lang.OutOfMemoryError: Java heap space\n\tat a.b(C.java)\n')
    found = reason(LOST, log, since) or ""
    assert found.startswith("its JVM has ended: java.lang.OutOfMemoryError: Java heap space; run.driver_memory")
    assert reason(ConnectionRefusedError(), None, 0) == reason(LOST, None, 0)
    assert reason(ValueError("wrong"), log, since) is None
