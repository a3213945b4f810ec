"""Runs a job in this process: command line, waiting for Kafka, the main loop, shutdown.

It is independent of the single jobs, which `known_jobs` finds. When a query fails, the job ends (exit code 1); its
next start continues from the checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from spark_sinks.read.sources import Broker
from spark_sinks.run.declared import kind_of
from spark_sinks.run.failures import told
from spark_sinks.run.flow_execution import FlowExecution, begin_anew
from spark_sinks.run.job import DRIVER_MB, Flow, JobKind, JobOptions, duration, known_jobs, listen
from spark_sinks.run.job_file import JobFileError, is_job_file, read
from spark_sinks.run.metrics import JobMetrics
from spark_sinks.run.output import OutputLines, Screen
from spark_sinks.run.runs import Registration, RunsError
from spark_sinks.spark import lost_jvm
from spark_sinks.spark.process import JobConsole, StopRequest, die_with_parent, end_jvm, on_stop
from spark_sinks.spark.progress import Examined, Progress, ProgressListener, Totals
from spark_sinks.spark.real_time_reads import HEARTBEAT
from spark_sinks.spark.session import session
from spark_sinks.spec.jobs import JobSpec
from spark_sinks.spec.triggers import MICRO_BATCH, REAL_TIME
from spark_sinks.spec.values import Listen

REAL_TIME_SLOTS = 16
"""Slots of the default master, enough for 13 partitions. A slot is a thread, not a core; unused ones cost little."""
FIRST_ANSWER_S = 3.0
"""How long to wait for Kafka's first answer; each failed attempt doubles the time."""
LONGEST_ANSWER_S = 24.0
HEAP_ROWS = 1_000_000
"""From this many rows on, state is kept in RocksDB."""
ROW_BYTES = 2_048
"""Heap reserved for each row of state: two versions of the row, and the garbage of a batch."""

Event = Progress | Examined | BaseException | str | None
"""A finished batch, a scan for rejected records or why scanning failed, the id of a run that ended, a stop request."""


def heap_holds_state(trigger: str, rows: int | None) -> bool:
    """Whether this many rows of state (None if unknown) are kept in the heap, which is faster than RocksDB."""
    return trigger == MICRO_BATCH and rows is not None and rows < HEAP_ROWS


def run(
    flow: Flow,
    *,
    report: Callable[[Progress | Examined], None],
    ready: Callable[[], None],
    events: SimpleQueue[Event],
    say: Callable[[str], None] = lambda _: None,
    metrics: JobMetrics | None = None,
) -> Totals:
    """Start a job and run it until `events` yields None, or a query fails (its exception is raised).

    Args:
        flow: the job; its session is left open.
        report: called with each batch's progress, and with the result of each scan for rejected records.
        ready: called once, when its query has started to read.
        events: what its threads report, and None, the request to stop.
        say: called with messages for people.
        metrics: where the query's numbers are collected.

    Raises:
        ValueError: a checkpoint does not support the trigger.
    """
    listener: Any = ProgressListener(flow.spark, events.put)
    flow.spark.streams.addListener(listener)
    metrics = metrics or JobMetrics(flow.name)
    ended: set[str] = set()  # runs of the query

    def take(event: Event) -> None:
        if isinstance(event, BaseException):
            raise event
        if isinstance(event, Progress) and event.run in execution.runs:  # another job in the session may report too
            done = execution.finished(event)
            metrics.finished(done)
            report(done)
        elif isinstance(event, Examined):
            metrics.examined(event)
            report(event)
        elif isinstance(event, str):
            ended.add(event)

    try:
        with Broker(flow.spark, flow.options.connection, FIRST_ANSWER_S) as broker:
            execution = FlowExecution(flow, broker, report=events.put, say=say)
            execution.begin()
            try:
                waiting = True
                while True:
                    try:
                        if (event := events.get(timeout=0.05 if waiting else 0.25)) is None:
                            break
                        take(event)
                    except Empty:
                        pass
                    execution.step()
                    metrics.reads(
                        execution.mode,
                        execution.read,
                        execution.ends,
                        unfinished=execution.unfinished_rows,
                        counts_rejects=flow.rejects_topic is not None,
                    )
                    if waiting and execution.reads():
                        waiting = False
                        ready()
            finally:
                execution.stop()
                left = _until_ended(events, execution.runs.keys() - ended)
                execution.close()
    finally:
        flow.spark.streams.removeListener(listener)
    while not events.empty():
        left.append(events.get())
    for event in left:
        take(event)
    return metrics.totals


def _until_ended(events: SimpleQueue[Event], missing: set[str], limit_s: float = 2.0) -> list[Event]:
    """Wait, at most `limit_s`, for the end of every run, which follows all its progress; return the other events."""
    happened: list[Event] = []
    deadline = time.monotonic() + limit_s
    while missing and (left := deadline - time.monotonic()) > 0:
        try:
            event = events.get(timeout=left)
        except Empty:
            break
        if isinstance(event, str):
            missing.discard(event)
        else:
            happened.append(event)
    return happened


def wait_for_topics(flow: Flow, say: Callable[[str], None], events: SimpleQueue[Event]) -> bool:
    """Wait until Kafka answers and has the job's topics; say every 5 s what is missing.

    Returns:
        False if a stop was requested meanwhile.

    Raises:
        ValueError: in real-time mode, the local master has fewer slots than the job has tasks.
    """
    spark, options = flow.spark, flow.options
    said = float("-inf")
    answer_s = FIRST_ANSWER_S
    while True:
        with Broker(spark, options.connection, answer_s) as broker:
            known = broker.partitions(options.topics)
        if known is None:
            # The first timeout is not reported: the machine may just be busy.
            lack = "" if answer_s == FIRST_ANSWER_S else f"Kafka: {options.bootstrap_servers} does not answer"
            answer_s = min(2 * answer_s, LONGEST_ANSWER_S)
        elif missing := [name for name in options.topics if name not in known]:
            lack = f"topic {', '.join(missing)} on {options.bootstrap_servers}: create it"
        else:
            break
        if lack and time.monotonic() - said > 5:
            said = time.monotonic()
            say(f"waiting for {lack}")
        try:
            if events.get(timeout=0.5) is None:
                return False
        except Empty:
            continue
    context = spark.sparkContext
    needed = flow.slots(known, int(spark.conf.get("spark.sql.shuffle.partitions", "2") or 2))
    slots = context.defaultParallelism
    if options.trigger == REAL_TIME and str(context.master).startswith("local") and slots < needed:
        raise ValueError(
            f"real-time mode runs all tasks at once: {flow.name} needs {needed} slots for the partitions of its topics "
            f"and {context.master} has {slots}; use --master 'local[{needed}]'"
        )
    return True


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise argparse.ArgumentTypeError(f"NAME=VALUE, not {text!r}")
    return name, value


def arguments(kinds: Iterable[JobKind]) -> argparse.ArgumentParser:
    """Return the command line parser of `python -m spark_sinks`: a job, and its options."""
    parser = argparse.ArgumentParser(prog="spark_sinks", description="Run a streaming job on Kafka topics.")
    commands = parser.add_subparsers(dest="job", required=True, metavar="JOB")
    for kind in kinds:
        command = commands.add_parser(kind.command, help=kind.summary, description=f"{kind.summary.capitalize()}.")
        _add_common(command, required=kind.file is None)
        kind.add_arguments(command)
    return parser


def _add_common(parser: argparse.ArgumentParser, *, required: bool) -> None:
    add = parser.add_argument
    add("--bootstrap-servers", required=required, help="Kafka, host:port,...")
    add("--checkpoint", required=required, help="directory or URL from which a restarted job continues")
    add("--trigger", choices=(MICRO_BATCH, REAL_TIME), default=MICRO_BATCH)
    add("--interval", dest="interval_ms", type=duration, help="of micro-batches (default: one after the other) or of "
        "real-time checkpoints (default: 5m; not below 5s)")  # fmt: skip
    add("--fresh", action="store_true", help="begin anew: move the checkpoint of an edited job aside")
    add("--starting-offsets", choices=("earliest", "latest"), default="earliest", help="where the first start begins")
    add("--max-offsets-per-trigger", type=int, default=100_000, help="the most records of one micro-batch")
    add("--accept-data-loss", action="store_true", help="continue when Kafka has deleted unread records")
    add("--kafka", type=_pair, action="append", default=[], metavar="NAME=VALUE", help="Kafka client setting")
    add("--master", help="any Spark master (default: local, with the slots that the trigger needs)")
    add("--jars", default="", help="the connector's jars, separated by commas")
    add("--shuffle-partitions", type=int, default=2)
    add(
        "--state-rows", type=int,
        help="expected rows of state; below a million, micro-batches keep them in the heap, which is faster (default: "
        "in RocksDB, which holds any number, and allows a change to real time)",
    )  # fmt: skip
    add("--driver-memory", help="Java heap (default: what the job and its state in the heap need)")
    add("--quick-start", action="store_true", help="start the driver sooner, but run it slower")
    add("--driver-java-options", default="", help="more options of the driver's JVM")
    add("--stop-limit", type=float, default=4.0, help="seconds that the JVM may take to end before it is killed")
    add("--conf", type=_pair, action="append", default=[], metavar="NAME=VALUE", help="Spark setting")
    add("--ui", action="store_true", help="serve Spark's web pages")
    add("--log-level", default="WARN", help="log level of Spark's log")
    add("--log-file", type=Path, help="where Spark's log goes (default: spark.log in a local checkpoint)")
    add("--ready-file", type=Path, help="written when the job has started to read")
    add("--metrics", type=listen, default=Listen("127.0.0.1:0"), metavar="HOST:PORT", help="where Prometheus and "
        "`trivium spark status` read its metrics (default: a free port of this machine)")  # fmt: skip
    add("--submitted", action="store_true", help="started by spark-submit, which sets master, jars and Java options")
    add("--die-with-parent", action="store_true", help="stop when the parent process ends for any reason")


def main(argv: Sequence[str]) -> int:
    """Run a job in this process, with progress as JSON lines on the standard output, or as a table on a terminal.

    SIGTERM and SIGINT stop the queries, the session and the JVM.

    Returns:
        0 after a requested stop. 1 when the job failed; one line is on the standard error, the traceback in the log.
        2 for a wrong command line or job file, an address in use, or a job that runs already.
    """
    try:
        given, kind, options = asked(argv)
    except JobFileError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if given.die_with_parent:
        die_with_parent()
    metrics = JobMetrics(kind.name)
    console = JobConsole()
    stop = StopRequest()
    on_stop(_stop_now)  # until the JVM has started there is nothing to stop cleanly
    with contextlib.ExitStack() as stack:
        stack.callback(console.close)
        try:
            address = stack.enter_context(metrics.serve(given.metrics))
            registration = _register(kind, options, address, console)
        except (OSError, RunsError) as error:
            console.say(str(error) if isinstance(error, RunsError) else f"metrics: {given.metrics}: {error.strerror}")
            return 2
        if registration is not None:
            metrics.restarts = registration.run.restarts
        log_file = given.log_file
        if log_file is None and "://" not in options.checkpoint:
            log_file = Path(options.checkpoint) / "spark.log"
        if log_file is not None:
            console.divert(log_file)
        log_size = 0 if log_file is None else log_file.stat().st_size
        failure: str | None = None
        try:
            _run_process(given, kind, options, console, metrics, stop=stop)
        except Exception as error:  # the last place to report it
            traceback.print_exc()
            if stop.comes():  # and so did the JVM; the checkpoint has what was finished
                return 0
            failure = lost_jvm.reason(error, log_file, log_size) or told(error)
            console.say(f"{given.job} failed: {failure}" + (f" (see {log_file})" if log_file else ""))
            return 1
        finally:
            end_jvm(given.stop_limit)
            if registration is not None:
                registration.end(failure)
    return 0


def asked(argv: Sequence[str]) -> tuple[argparse.Namespace, JobKind, JobOptions]:
    """Parse a command line; SystemExit if it is wrong, JobFileError if the job file is."""
    kinds = known_jobs()
    if argv and is_job_file(argv[0]):
        file = read(Path(argv[0]))
        if not isinstance(file.spec, JobSpec):
            raise JobFileError(f"{argv[0]}: job: a {file.spec.job} job needs no Spark; start it by `trivium spark run`")
        kinds = {argv[0]: kind_of(file)}
    parser = arguments(kinds.values())
    given = parser.parse_args(argv)
    kind = kinds[given.job]
    values = {name: value for name, value in vars(given).items() if name in kind.options.__struct_fields__}
    try:
        return given, kind, kind.options(**{**values, "kafka": dict(given.kafka)})
    except ValueError as error:
        parser.error(str(error))


def _stop_now() -> None:
    raise SystemExit(0)


def _register(kind: JobKind, options: JobOptions, metrics: Listen, console: JobConsole) -> Registration | None:
    """Register the job for `trivium spark status`; None, with a message, if that fails. May raise RunsError."""
    try:
        registration = Registration(kind.name, kind.file, options.checkpoint)
        registration.begin(str(metrics))
    except OSError as error:
        console.say(f"`trivium spark status` will not list this job: {error}")
        return None
    return registration


def _run_process(
    given: argparse.Namespace, kind: JobKind, options: JobOptions, console: JobConsole, metrics: JobMetrics, *,
    stop: StopRequest,
) -> None:  # fmt: skip
    slots = REAL_TIME_SLOTS if options.trigger == REAL_TIME else max(2, os.cpu_count() or 2)
    in_heap = heap_holds_state(options.trigger, given.state_rows)
    spark = session(
        f"trivium {given.job}",
        master=None if given.submitted else given.master or f"local[{slots}]",
        jars=[Path(jar) for jar in given.jars.split(",") if jar],
        driver_memory=given.driver_memory or f"{DRIVER_MB + (in_heap and given.state_rows * ROW_BYTES >> 20)}m",
        shuffle_partitions=given.shuffle_partitions,
        log_level=given.log_level,
        ui=given.ui,
        quick_start=given.quick_start,
        state_in_heap=in_heap,
        java_options=given.driver_java_options,
        conf={**(HEARTBEAT if options.trigger == REAL_TIME else {}), **dict(given.conf)},
    )
    flow = kind.flow(spark, options)
    events: SimpleQueue[Event] = SimpleQueue()

    def stop_soon() -> None:
        stop.made = True
        events.put(None)

    on_stop(stop_soon)
    terminal = console.terminal
    output = OutputLines(given.job, console) if terminal is None else Screen(kind.name, metrics, terminal)

    def ready() -> None:
        output.ready(options.trigger)
        if given.ready_file is not None:
            about = {"job": given.job, "trigger": options.trigger, "pid": os.getpid(), "metrics": str(metrics.address)}
            written = given.ready_file.with_suffix(".tmp")
            written.write_bytes(msgspec.json.encode(about))
            written.replace(given.ready_file)

    if given.fresh and (aside := begin_anew(flow)):
        output.say(f"{kind.name} begins anew; its earlier checkpoint is {aside}")
    try:
        if wait_for_topics(flow, output.say, events):
            totals = run(flow, report=output.report, ready=ready, events=events, say=output.say, metrics=metrics)
            output.summary({} if totals == Totals() else {flow.name: totals})
    finally:
        output.close()
        spark.stop()
