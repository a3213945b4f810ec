"""A job's Prometheus metrics, `trivium_spark_*`, served at the job's own address.

The labels survive a restart: job, query, topic and partition, never the id of a run. The fields of `QueryStatistics`
declare the metrics. Nothing here is called per record.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import start_http_server

from spark_sinks.run.statistics import SOURCE, QueryStatistics
from spark_sinks.spark.progress import Examined, Offsets, Progress, Totals
from spark_sinks.spec.triggers import MODES, REAL_TIME
from spark_sinks.spec.values import Listen
from telemetry.metrics import Metrics

RATE_S: Final = 60.0
"""Rates cover the records that were read within this time, and always the newest micro-batch."""


class JobMetrics:
    """The metrics of one job and its query, and the HTTP server that serves them at any path of `address`.

    They are written by the thread that runs the job, and read by the thread of a scrape.

    Args:
        job: the name of the job and of its query, a label.
        restarts: starts of the job before this one; may be set until its query reads.
        clock: Unix time in seconds.
    """

    def __init__(self, job: str, restarts: int = 0, clock: Callable[[], float] = time.time) -> None:
        self.address: Listen | None = None  # None until they are served
        self.restarts = restarts
        self.totals = Totals()
        self._job = job
        self._metrics = Metrics()
        self._clock = clock
        self._began: float | None = None  # None until the query reads
        self._lock = threading.Lock()
        self._mode = ""
        self._position: Offsets = {}
        self._ends: Offsets = {}
        self._rows = 0  # all records read, also those of a real-time batch that runs
        self._recent: deque[tuple[float, int]] = deque()  # when that number grew, and to what
        self._ended: float | None = None  # when the newest batch did
        self._counts_rejects = False
        self._dead_letters = 0  # of those that the query itself writes
        self._newest: Progress | None = None

    def _begin(self) -> None:
        if self._began is None:
            self._began = self._clock()
            self._metrics.add_source(SOURCE, self.statistics, labels={"job": self._job, "query": self._job})

    def reads(self, mode: str, position: Offsets, ends: Offsets, *, counts_rejects: bool, unfinished: int = 0) -> None:
        """Set the mode, position and ends of the topics, if `examined` is called, and the rows of no finished batch."""
        self._begin()
        with self._lock:
            self._mode, self._position, self._ends = mode, position, ends
            self._counts_rejects |= counts_rejects
            self._read(self.totals.rows + unfinished)

    def _read(self, rows: int) -> None:
        """Take the number of records read; one that is smaller than the last is of a batch that is not known yet."""
        now = self._clock()
        if rows > self._rows:
            self._rows = rows
            self._recent.append((now, rows))
        while len(self._recent) > 1 and self._recent[1][0] < now - self._span(now):
            self._recent.popleft()

    def finished(self, progress: Progress) -> None:
        """Count a finished batch."""
        self._begin()
        with self._lock:
            self._newest = progress
            self.totals.add(progress)
            if progress.dead_letters is not None:
                self._counts_rejects = True
                self._dead_letters += progress.dead_letters
            self._ended = self._clock()
            self._read(self.totals.rows)

    def examined(self, rejected: Examined) -> None:
        """Count the rejected records found in finished batches."""
        with self._lock:
            self.totals.add_examined(rejected)

    def _span(self, now: float) -> float:
        """Return the seconds that the rate covers."""
        counts = self._newest is not None and self._newest.trigger != REAL_TIME  # one in real time is read all along
        newest = self._newest.duration_ms / 1000 if self._newest and counts else 0.0
        return max(newest, min(RATE_S, now - (self._began or now)), 0.001)

    def statistics(self) -> QueryStatistics:
        """Return the progress so far."""
        with self._lock:
            now = self._clock()
            span = self._span(now)
            newest = self._newest
            before = max((rows for at, rows in self._recent if at < now - span), default=0)
            late = self.totals.late_readings if self._counts_rejects else None
            malformed = self.totals.malformed + self._dead_letters if self._counts_rejects else None
            watermark = newest.watermark_ms if newest else None
            return QueryStatistics(
                trigger={mode: int(mode == self._mode) for mode in MODES},
                rows=self._rows,
                batches=self.totals.batches,
                rows_per_second=(self._rows - before) / span,
                position=self._position,
                lag=lag(self._position, self._ends),
                late_rows=self.totals.late_rows,
                late=late,
                late_by_others=self.totals.late_by_others if self._counts_rejects else None,
                malformed=malformed,
                dead_letters=None if malformed is None or late is None else malformed + late,
                batch=newest.batch if newest else None,
                batch_duration_ms=newest.duration_ms if newest else None,
                last_batch_timestamp_s=self._ended,
                watermark_lag_ms=round(now * 1000) - watermark if watermark else None,  # 0: before the first
                state_rows=newest.state_rows if newest else None,
                state_bytes=newest.state_bytes if newest else None,
                restarts=self.restarts,
            )

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return self._metrics.render()

    @contextlib.contextmanager
    def serve(self, address: Listen) -> Iterator[Listen]:
        """Serve them over HTTP in a thread, and yield the actual address; OSError if it cannot listen there."""
        server, thread = start_http_server(address.port, address.host, self._metrics.registry)
        self.address = Listen.of(address.host, server.server_port)
        try:
            yield self.address
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def lag(position: Offsets, ends: Offsets) -> Offsets:
    """Return the records between a position and the topics' ends; empty while the position is unknown."""
    if not position:
        return {}
    return {
        topic: {
            partition: max(0, end - position.get(topic, {}).get(partition, 0)) for partition, end in partitions.items()
        }
        for topic, partitions in ends.items()
    }
