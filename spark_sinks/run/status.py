"""Reads the status of jobs from their metrics, for `trivium spark status`, a terminal and the console.

Needs no Spark.
"""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spark_sinks.run.runs import Known
from spark_sinks.spec.values import Listen
from telemetry.job_figures import Figures, figures

ANSWER_S: Final = 3.0
LARGEST: Final = 4 << 20
"""The largest answer accepted, bytes; a few hundred partitions are 100 kB."""
PIPE_COLUMNS: Final = 160  # used if the output is not a terminal
_ANY: Final[Mapping[str, str]] = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not a listen address
_MINUTE, _HOUR, _DAY = 60, 3_600, 86_400


class NoFigures(Exception):  # noqa: N818 - an answer, not an error of ours
    """A job's metrics cannot be read; the message says why."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a job runs, and the state of its queries."""

    job: str
    state: str  # runs | starts | does not answer | stopped | failed | killed
    detail: str = ""
    address: str = ""
    pid: int | None = None
    file: str | None = None
    checkpoint: str | None = None
    queries: tuple[Figures, ...] = ()

    @property
    def good(self) -> bool:
        """Whether it runs and answers."""
        return self.state in {"runs", "starts"}


def read(address: str, answer_s: float = ANSWER_S) -> tuple[Figures, ...]:
    """Return the queries of the job whose metrics are at `HOST:PORT`; NoAnswer if they cannot be read."""
    try:
        listen = Listen.parse(address)
        with contextlib.closing(
            http.client.HTTPConnection(_ANY.get(listen.host, listen.host), listen.port, timeout=answer_s)
        ) as connection:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            body = answer.read(LARGEST)
        if answer.status != http.client.OK:
            raise NoFigures(f"{address} answers with status {answer.status}")
        return figures(body.decode())
    except (OSError, http.client.HTTPException) as error:
        raise NoFigures(f"{address}: {getattr(error, 'strerror', None) or repr(error)}") from error
    except ValueError as error:
        raise NoFigures(f"{address} has no valid metrics: {error}") from error


def status_of(known: Sequence[Known], addresses: Sequence[str] = ()) -> list[Status]:
    """Return the status of all jobs, running or not, and of those at further addresses; asks all in parallel."""
    if not known and not addresses:
        return []
    with ThreadPoolExecutor(max_workers=16) as pool:
        return [*pool.map(_status, known), *(status for statuses in pool.map(_at, addresses) for status in statuses)]


def _status(known: Known) -> Status:
    run = known.run

    def status(state: str, detail: str = "", queries: tuple[Figures, ...] = ()) -> Status:
        return Status(
            job=run.job, state=state, detail=detail, file=run.file, checkpoint=run.checkpoint, queries=queries,
            pid=run.pid if known.alive else None, address=run.metrics if known.alive else "",
        )  # fmt: skip

    if known.alive:
        try:
            queries = read(run.metrics)
        except NoFigures as error:
            return status("does not answer", str(error))
        return status("runs" if queries else "starts", queries=queries)
    if run.ended is None:
        return status("killed", f"process {run.pid} does not exist")
    ago = f"{age(time.time() - run.ended)} ago"
    return status("stopped", ago) if run.error is None else status("failed", f"{ago}: {run.error}")


def _at(address: str) -> list[Status]:
    """Return the jobs at an address; usually one."""
    try:
        if not (answer := read(address)):
            raise NoFigures("no Spark job serves metrics there")
    except NoFigures as error:
        return [Status(job=address, address=address, state="does not answer", detail=str(error))]
    jobs = dict.fromkeys(status.job for status in answer)
    return [
        Status(job=job, address=address, state="runs", queries=tuple(status for status in answer if status.job == job))
        for job in jobs
    ]


def as_json(jobs: Sequence[Status]) -> str:
    """Return all of their status as a JSON array."""
    return msgspec.json.format(msgspec.json.encode(jobs)).decode()


def show(jobs: Sequence[Status]) -> None:
    """Print the table to the standard output."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=PIPE_COLUMNS, highlight=False)
    console.print(table(jobs))


COLUMNS: Final = (
    "job", "trigger", "rows/s", "lag", "batch s", "late", "dead letters", "state rows", "last batch",
)  # fmt: skip


def table(jobs: Iterable[Status], now: float | None = None) -> Table:
    """Return a table with one row per query, or one row with the state of a job that has none."""
    now = time.time() if now is None else now
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for at, column in enumerate(COLUMNS):
        made.add_column(column, justify="left" if at < 2 else "right", no_wrap=at > 0, overflow="fold")
    notes = []
    for job in jobs:
        for query in job.queries:
            made.add_row(*row(query, now))
        if not job.queries:
            made.add_row(Text(job.job), Text(job.state, style="" if job.state in {"starts", "stopped"} else "red"))
        if job.detail:
            notes.append(Text(f"{job.job}: {job.state}, {job.detail}"))
    if notes:
        made.caption = Text("\n").join(notes)
        made.caption_justify = "left"
        made.caption_style = ""
    return made


def row(query: Figures, now: float) -> list[Text]:
    """Return the cells of one query, in the order of `COLUMNS`."""
    name = query.job if query.query in {"", query.job} else f"{query.job}: {query.query}"
    cells = [
        name,
        query.trigger or "-",
        f"{query.rows_per_second:,.0f}",
        _number(query.lag),
        "-" if query.batch_s is None else f"{query.batch_s:,.1f}",
        _number(query.late),
        _number(query.dead_letters),
        _number(query.state_rows),
        "none yet" if query.last_batch is None else f"{age(now - query.last_batch)} ago",
    ]
    return [Text(cell) for cell in cells]


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def age(seconds: float) -> str:
    """Format a duration in one unit."""
    whole = max(0, round(seconds))
    if whole < 2 * _MINUTE:
        return f"{whole} s"
    if whole < 2 * _HOUR:
        return f"{whole // _MINUTE} min"
    return f"{whole // _HOUR} h" if whole < 2 * _DAY else f"{whole // _DAY} d"
