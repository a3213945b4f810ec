"""One running flow of a job: its present trigger, how far behind it is, and its finished batches."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_sinks.read.sources import Broker
from spark_sinks.run.job import Flow
from spark_sinks.run.reject_scanner import RejectScanner
from spark_sinks.spark.batch_size import SHORTEST_S, BatchSize
from spark_sinks.spark.catch_up_policy import CatchUpPolicy
from spark_sinks.spark.checkpoint import JobCheckpoint
from spark_sinks.spark.lease import TAKE_OVER_S, Lease
from spark_sinks.spark.progress import Examined, Offsets, Progress, offsets_sum
from spark_sinks.spark.real_time_reads import RealTimeReads
from spark_sinks.spec.meaning import ADVICE, Meaning
from spark_sinks.spec.triggers import CATCH_UP, CATCHING_UP, MICRO_BATCH, REAL_TIME

LOOK_S = 1.0
"""Time between two checks of how far a query in real time is behind."""
LAG_LOOK_S = 5.0
"""The same in micro-batches, where only the metrics use it."""
WORKER_TRIES = 5
NO_WORKER = re.compile("failed to connect back|CANNOT_OPEN_SOCKET")
"""Spark's error when the driver's Python was not ready within ten seconds, a limit without a setting."""
SCAN_WAIT_S = 3.0
"""The longest time that the scan of a real-time batch waits for the next batch to read."""
LAST_SCAN_S = 3.0
"""The time that a stop gives the scanner for the batches that have just finished."""


def begin_anew(flow: Flow) -> str:
    """Move the flow's checkpoint aside; return its new path, empty if there was none.

    A driver that still holds it, on any host, ends: it would go on writing results.

    Raises:
        LeaseError: Kafka does not allow the lease.
    """
    checkpoint = JobCheckpoint(flow.spark, flow.checkpoint)
    if not checkpoint.exists():
        return ""
    lease = Lease(flow.spark, flow.options.connection, checkpoint.query_id(), flow.topics[0], lambda _error: None)
    try:
        lease.begin()
    finally:
        lease.end()
    return checkpoint.move_aside()


class FlowExecution:
    """Runs a flow. In real time it catches up first, and again when it falls behind.

    Args:
        flow: the flow.
        broker: tells the offsets of its topics.
        found: called in a thread with the reject scanner's results, and the exception that ended it.
        say: called with messages for people.
    """

    def __init__(
        self,
        flow: Flow,
        broker: Broker,
        *,
        report: Callable[[Examined | BaseException], None],
        say: Callable[[str], None],
    ) -> None:
        self.flow = flow
        self.query: StreamingQuery
        self.mode = flow.trigger.mode
        self._broker = broker
        self._say = say
        self.runs: dict[str, str] = {}  # mode of each run of the query, by run id
        self._told_of_late = False
        self._found = report
        self._lease: Lease | None = None
        self._holds = True
        self._workers_missed = 0  # consecutive failures
        self._reads = False
        self._stopped = False
        self._policy = CatchUpPolicy(flow.behind_s)
        micro = flow.trigger.interval_ms if flow.trigger.mode == MICRO_BATCH else None
        self._size = BatchSize(flow.options.max_offsets_per_trigger, max(SHORTEST_S, (micro or 0) / 1000))
        self._meaning: Meaning | None = None  # of the checkpoint; None before it was checked
        self.position: Offsets = {}  # end offsets of the finished batches
        self.ends: Offsets = {}  # end offsets of the topics at the last check
        self._next_look = 0.0
        self._unfinished = RealTimeReads(flow.spark)
        self._checkpoint = JobCheckpoint(flow.spark, flow.checkpoint)
        self._scanner = None if flow.rejects_topic is None else RejectScanner(flow, report)
        self._scan_by = float("inf")  # deadline for scanning the finished batches

    def begin(self) -> None:
        """Take the lease, and start the query and the reject scanner.

        Raises:
            LeaseError: Kafka does not allow the lease.
            ValueError: the checkpoint does not fit the job or its topics. A driver that holds it goes on.
        """
        self._check()
        lease = self._lease = Lease(
            self.flow.spark,
            self.flow.options.connection,
            self._checkpoint.query_id(),
            self.flow.topics[0],
            self._lease_lost,
        )
        try:
            lease.begin()
            if self._checkpoint.is_held():
                self._say(
                    f"{self.flow.name}: its last driver did not give up the checkpoint, waiting until it has ended"
                )
                time.sleep(TAKE_OVER_S)
            self._checkpoint.hold()
            self._begin()
        except BaseException:
            self._release()
            raise

    def _lease_lost(self, error: BaseException) -> None:
        self._holds = False
        self._found(error)

    def _release(self) -> None:
        if self._lease is not None:
            self._lease.end()
            if self._holds:
                self._checkpoint.let_go()

    def _begin(self) -> None:
        self._checkpoint.forget_unfinished_start()
        self._continue(*self._check())  # again: the earlier driver may have gone on
        earliest = self.flow.options.starting_offsets == "earliest"
        self.position = self._checkpoint.position() or self._broker.ends(self.flow.topics, beginnings=earliest) or {}
        if self.flow.trigger.mode == REAL_TIME:
            self._start_fitting()
        else:
            self._start(self.flow.trigger.mode)
        if self._scanner:
            self._scanner.start()
            self._scan_by = time.monotonic() + SCAN_WAIT_S  # batches of an earlier run

    def _check(self) -> tuple[Meaning, list[str]]:
        """Check that the checkpoint is of this job and of these topics; ValueError if not.

        Returns:
            What it means from now on, and the topics that were deleted and made again.
        """
        if self.flow.trigger.mode == REAL_TIME:
            self._checkpoint.check_real_time()
        self._read_ends()
        known, path = self._broker.ids, self._checkpoint.path
        before = None if self._checkpoint.is_unread() else self._checkpoint.meaning()
        topics = {name: known[name] for name in self.flow.topics if name in known}
        now = Meaning(self.flow.meaning, dict.fromkeys(self.flow.topics, "") | topics)
        if before is None:
            return now, []
        if changes := before.changes_to(now):
            raise ValueError(
                f"{self.flow.name} was edited: {'; '.join(changes)}. State in {path} would mix both: {ADVICE}"
            )
        recreated = before.recreated(known)
        if recreated and not self.flow.options.accept_data_loss:
            raise ValueError(
                f"topic {', '.join(recreated)} was deleted and made again: the offsets in {path} are the old one's. "
                "With accept_data_loss the job reads the new one from its beginning, or "
                f"{ADVICE.removeprefix('use another checkpoint, or ')}"
            )
        ids = now.topics | {name: before.topics.get(name, "") for name in now.topics} | topics
        return Meaning(now.job, ids), recreated

    def _continue(self, meaning: Meaning, recreated: list[str]) -> None:
        """Store what the checkpoint means; topics that were made again are read from their beginnings."""
        if recreated:
            self._checkpoint.forget_position(recreated)
            names = ", ".join(recreated)
            self._say(f"topic {names} was deleted and made again: {self.flow.name} reads it from its beginning")
        self._checkpoint.keep_meaning(meaning)
        self._meaning = meaning

    @property
    def _read(self) -> int:
        return offsets_sum(self.position)

    @property
    def read(self) -> Offsets:
        """The offsets before which it has read everything; in real time a kill repeats those after `position`."""
        return self._unfinished.position or self.position

    @property
    def unfinished_rows(self) -> int:
        """The records read that no finished batch counts yet."""
        return self._unfinished.rows

    def _start_fitting(self) -> None:
        """Start in real time if the query is not far behind, else catching up."""
        real_time = self._policy.may_run_in_real_time(time.monotonic(), self._read)
        if not real_time and self.mode != CATCHING_UP:
            lag = self._policy.lag(self._read)
            self._say(f"{self.flow.name} is {lag:,} records behind: catching up in micro-batches")
        elif real_time and self.mode == CATCHING_UP:
            self._say(f"{self.flow.name} has caught up and continues in real time")
        self._start(REAL_TIME if real_time else CATCHING_UP)

    def _start(self, mode: str) -> None:
        self.mode = mode
        if mode == REAL_TIME:
            self._unfinished.begin()
        else:
            self._unfinished.end()
        trigger = CATCH_UP if mode == CATCHING_UP else self.flow.trigger
        self.query = self.flow.start(replace(trigger, most=self._size.now))
        self.runs[str(self.query.runId)] = mode
        if self._scanner:
            self._scanner.tasks = _spare_cores(self.flow.spark) if mode == REAL_TIME else None

    def step(self) -> None:
        """Check the query, and restart it if needed; raises the error that ended it."""
        if not self.query.isActive:
            error = self.query.exception()
            if error is not None and NO_WORKER.search(str(error)) and self._workers_missed < WORKER_TRIES:
                self._workers_missed += 1
                self._say(f"{self.flow.name}: Spark's Python was not ready within 10 s, restarting the query")
                self._start(self.mode)
                return
            if error is not None or self.mode != CATCHING_UP:
                raise error or RuntimeError(f"query {self.flow.name} ended by itself")
            self._reads = True
            self.position = self._checkpoint.position() or {}
            self._read_ends()
            self._start_fitting()
        elif time.monotonic() >= self._next_look:
            self._read_ends()
            if self.mode == REAL_TIME and self._tasks_run():
                self._unfinished.look(self.query)
        if self._lease is not None:
            self._lease.position = self.read
        self._scan()

    def _scan(self) -> None:
        """Let the scanner examine finished batches; in real time only when the next batch reads."""
        if self._scanner is None or self._scan_by == float("inf"):
            return
        if self.mode != REAL_TIME or time.monotonic() > self._scan_by or self._tasks_run():
            self._scan_by = float("inf")
            self._scanner.batch_finished()

    def _read_ends(self) -> None:
        self._next_look = time.monotonic() + (LOOK_S if self.flow.trigger.mode == REAL_TIME else LAG_LOOK_S)
        ends = self._broker.ends(self.flow.topics)
        if ends is not None:
            self.ends = ends
            if self._meaning is not None and (recreated := self._meaning.recreated(self._broker.ids)):
                raise ValueError(
                    f"topic {', '.join(recreated)} was deleted and made again while {self.flow.name} read it: start "
                    "it again"
                )
            if self.flow.trigger.mode == REAL_TIME:
                self._policy.observe_end(time.monotonic(), offsets_sum(ends))

    def finished(self, progress: Progress) -> Progress:
        """Handle a finished batch, and return its progress with the trigger and with the lag of real time."""
        self._scan_by = min(self._scan_by, time.monotonic() + SCAN_WAIT_S)
        mode = self.runs[progress.run]
        if progress.late_rows and not (self.flow.ACCOUNTS or self._told_of_late):
            self._told_of_late = True
            self._say(
                f"{self.flow.name}: its state dropped {progress.late_rows:,} rows as late; "
                "trivium_spark_late_rows_total counts them, and no dead letter has them"
            )
        self._workers_missed = 0
        lag = progress.lag
        if progress.end is not None and offsets_sum(progress.end) >= self._read:
            self.position = progress.end
        self._unfinished.finished(progress.batch)
        if mode == REAL_TIME and not self._stopped:
            self._read_ends()
            lag = self._policy.lag(self._read)  # Spark reports the topics' ends as of the batch's start
            if progress.run == str(self.query.runId) and self._policy.must_catch_up(time.monotonic(), self._read):
                self._say(f"{self.flow.name} has fallen {lag:,} records behind: catching up in micro-batches")
                self.query.stop()
                self._start(CATCHING_UP)
        elif progress.run == str(self.query.runId) and self._resized(progress):
            # A running query cannot change its limit. The batch it has just started is repeated with the same records.
            self._say(
                f"{self.flow.name} took {progress.duration_ms / 1000:.0f} s for {progress.rows:,} records: its batches "
                f"are limited to {self._size.now:,} from now on"
            )
            self.query.stop()
            self._start(self.mode)
        return msgspec.structs.replace(progress, trigger=mode, lag=lag)

    def _resized(self, progress: Progress) -> bool:
        """Whether this batch changes the size of the next ones."""
        if self._stopped or not self.flow.SIZED:
            return False
        return self._size.finished(progress.rows, progress.duration_ms / 1000)

    def reads(self) -> bool:
        """Whether it has started to read, so that new records are processed without start-up delay."""
        if not self._reads:
            status = self.query.status
            self._reads = status["message"].startswith("Waiting") or self.query.lastProgress is not None
            if self.mode == REAL_TIME and status["isTriggerActive"]:
                self._reads = self._tasks_run()
        return self._reads

    def _tasks_run(self) -> bool:
        """Whether a real-time batch reads: all tasks of all its stages are running."""
        tracker = self.flow.spark.sparkContext.statusTracker()
        infos = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        return len(infos) >= self.flow.STAGES and all(info and info.numActiveTasks == info.numTasks for info in infos)

    def stop(self) -> None:
        """Stop the query for good."""
        self._stopped = True
        self.query.stop()

    def close(self) -> None:
        """Stop the scanner, after `LAST_SCAN_S` at most, and give up the lease."""
        if self._scanner:
            self._scanner.stop(LAST_SCAN_S)
        self._unfinished.end()
        self._release()


def _spare_cores(spark: SparkSession) -> int | None:
    """Return the tasks a scan may use without delaying a real-time query on this machine; None on a cluster."""
    if not str(spark.sparkContext.master).startswith("local"):
        return None
    return max(1, (os.cpu_count() or 2) // 2)
