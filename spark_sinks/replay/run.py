"""Runs a replay to its end: slices of records, each in one transaction with the ledger's entry."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeVar

import msgspec
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaConnectionError

from spark_sinks.replay import ledger
from spark_sinks.replay.items import Item, Place
from spark_sinks.replay.kafka import CommittedReader, ReplayTarget, ReplayTopics
from spark_sinks.replay.ledger import LedgerEntry, LedgerError, places_of, positions_of
from spark_sinks.replay.sources import ReplaySource, Slice, SourceError, of_log
from spark_sinks.replay.writer import Writer
from spark_sinks.spec import kafka_client
from spark_sinks.spec.replays import Once

MOST: Final = 1_000
"""The most records of a transaction."""
TOGETHER_S: Final = 1.0
"""With a rate, records of this time share a transaction, so readers of committed records wait this long."""
RETRY_S: Final = 1.0
"""Time between two attempts to reach Kafka."""
MOST_REPORTED: Final = 20
"""The most messages about single records."""
Say = Callable[[str], None]
_Result = TypeVar("_Result")


class StopRequest(Exception):  # noqa: N818 - no error
    """The run was asked to stop."""


class Replayed(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="replayed"):
    """One transaction of a replay, or (kind `summary`) the totals of a run."""

    job: str
    records: int  # replayed
    unfit: int  # records that could not be replayed
    repeated: int  # skipped: another dead letter of the same record was replayed
    left: int  # upper limit of the records left
    duration_ms: int


class Clients(msgspec.Struct):
    """The Kafka clients of one run."""

    topics: ReplayTopics
    writer: Writer
    committed: CommittedReader


Open = Callable[[Clients, LedgerEntry], Awaitable[ReplaySource]]
"""Creates a job's source from its clients and its ledger entry."""


async def run(
    job: Once, open_source: Open, *, report: Callable[[Replayed], None], say: Say, stopped: asyncio.Event
) -> Replayed:
    """Replay the rest, or until `stopped`; return the totals of this run.

    Args:
        job: the job.
        open_source: creates its source.
        report: called for each transaction.
        say: called with messages for people.
        stopped: ends the run: at once, or after the current transaction.

    Raises:
        LedgerError, SourceError, ReplacedError: it cannot continue; the message says why.
        KafkaError: Kafka failed; the next run continues.
    """
    began = time.monotonic()
    before = after = _new_entry(job)
    with contextlib.suppress(StopRequest):
        async with connected(job, say, stopped) as clients:
            before = after = await unless_stopped(stopped, entry_of(job, clients))
            source = await unless_stopped(stopped, open_source(clients, before))
            after = await _Run(job, clients, source, before, report=report, say=say, stopped=stopped).run()
            if clients.writer.late:
                say(
                    f"{clients.writer.late:,} records are older than their topic's retention and will be deleted; "
                    'sink.timestamp = "now" prevents that'
                )
    return _between(job, before, after, left=0, began=began)


def _new_entry(job: Once) -> LedgerEntry:
    return LedgerEntry(task=job.task, began={}, positions={})


def _between(job: Once, before: LedgerEntry, after: LedgerEntry, *, left: int, began: float) -> Replayed:
    """Return what was done between two entries, since the time `began`."""
    return Replayed(
        job=job.title,
        records=after.records - before.records,
        unfit=after.unfit - before.unfit,
        repeated=after.repeated - before.repeated,
        left=left,
        duration_ms=round((time.monotonic() - began) * 1000),
    )


async def replay(job: Any, *, report: Callable[[Replayed], None], say: Say, stopped: asyncio.Event) -> Replayed:
    """Replay the rest of a log range or of dead letters; see `run`."""

    async def open_source(clients: Clients, entry: LedgerEntry) -> ReplaySource:
        sources = await clients.topics.known(job.topics)
        if missing := [name for name in job.topics if name not in sources]:
            raise SourceError(f"topic {', '.join(missing)} does not exist")
        began, positions = places_of(entry.began), places_of(entry.positions)
        return await of_log(job, clients.committed, sources, began=began, positions=positions, say=say)

    return await run(job, open_source, report=report, say=say, stopped=stopped)


async def entry_of(job: Once, clients: Clients) -> LedgerEntry:
    """Return a job's ledger entry, a new one at its first run; LedgerError if another task uses its name."""
    async with kafka_client.started(AIOKafkaConsumer(**kafka_client.arguments(job.run.connection))) as plain:
        entry = await ledger.read(clients.committed, plain, job.title) or _new_entry(job)
    if entry.task != job.task:
        raise LedgerError(f"the name {job.title} is used by another task, {entry.task}: choose another name")
    return entry


async def stops_within(stopped: asyncio.Event, seconds: float) -> bool:
    """Wait until `stopped` is set, at most this long; return whether it is."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stopped.wait(), max(seconds, 0.0))
    return stopped.is_set()


async def unless_stopped(stopped: asyncio.Event, work: Awaitable[_Result]) -> _Result:
    """Await `work`, or cancel it and raise StopRequest as soon as `stopped` is set."""
    doing, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stopped.wait())
    try:
        await asyncio.wait((doing, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise StopRequest
        return doing.result()
    finally:
        doing.cancel()
        stopping.cancel()
        await asyncio.wait((doing, stopping))


@contextlib.asynccontextmanager
async def connected(job: Once, say: Say, stopped: asyncio.Event) -> AsyncIterator[Clients]:
    """Connect the clients; StopRequest if stopped before they are."""
    given = kafka_client.arguments(job.run.connection)
    async with contextlib.AsyncExitStack() as stack:
        yield await unless_stopped(stopped, _connect(stack, given, job, say))


async def _connect(stack: contextlib.AsyncExitStack, given: dict[str, Any], job: Once, say: Say) -> Clients:
    said = False
    while True:
        admin = AIOKafkaAdminClient(**given)
        stack.push_async_callback(admin.close)
        try:
            await admin.start()
            break
        except KafkaConnectionError:
            await stack.aclose()
            if not said:
                say(f"waiting for Kafka: {job.run.bootstrap_servers} does not answer")
            said = True
        await asyncio.sleep(RETRY_S)
    topics = ReplayTopics(admin)
    await topics.make(ledger.LEDGER, ledger.SETTINGS)
    writer = await stack.enter_async_context(kafka_client.started(Writer(given, job.title)))
    committed = await stack.enter_async_context(kafka_client.started(CommittedReader(given)))
    return Clients(topics, writer, committed)


class _Run:
    def __init__(
        self, job: Any, clients: Clients, source: ReplaySource, entry: LedgerEntry, *,
        report: Callable[[Replayed], None], say: Say, stopped: asyncio.Event,
    ) -> None:  # fmt: skip
        self._job = job
        self._clients = clients
        self._source = source
        self._entry = msgspec.structs.replace(entry, began=positions_of(source.began))
        self._positions: dict[Place, int] = places_of(entry.positions)
        self._report = report
        self._say = say
        self._reported = 0
        self._stopped = stopped
        self._targets: dict[str, ReplayTarget | None] = {}

    async def run(self) -> LedgerEntry:
        """Replay every slice, and return the newest entry."""
        rate = self._job.run.rate
        most = MOST if rate is None else max(1, min(MOST, round(rate * TOGETHER_S)))
        start, sent = time.monotonic(), 0
        slices = aiter(self._source.slices(most))
        while (slice_ := await self._next(slices)) is not None:
            begin = time.monotonic()
            before = self._entry
            await self._clients.writer.commit(functools.partial(self._fill, slice_))
            sent += self._entry.records - before.records
            self._report(_between(self._job, before, self._entry, left=slice_.left, began=begin))
            pause = 0.0 if rate is None else start + sent / rate - time.monotonic()
            if await stops_within(self._stopped, pause):
                break
        return self._entry

    async def _next(self, slices: AsyncIterator[Slice]) -> Slice | None:
        """Return the next slice; None if there is none, or the run was asked to stop."""
        try:
            return await unless_stopped(self._stopped, anext(slices, None))
        except StopRequest:
            return None

    async def _fill(self, part: Slice) -> LedgerEntry:
        """Send a slice, and return its ledger entry."""
        names = {self._job.sink.kafka or item.topic for item in part.items} | {item.topic for item in part.items}
        if unknown := names - self._targets.keys():
            known = await self._clients.topics.known(unknown)
            self._targets.update({name: known.get(name) for name in unknown})
        sent = 0
        unfit = list(part.unfit)
        for item in part.items:
            wrong = await self._send(item)
            if wrong is None:
                sent += 1
            else:
                unfit.append(f"{item}: {wrong}")
        for sentence in unfit:
            self._report_unfit(sentence)
        self._positions.update(part.positions)
        entry = self._entry
        self._entry = msgspec.structs.replace(
            entry,
            positions=positions_of(self._positions),
            records=entry.records + sent,
            unfit=entry.unfit + len(unfit),
            repeated=entry.repeated + part.repeated,
        )
        return self._entry

    async def _send(self, item: Item) -> str | None:
        name = self._job.sink.kafka or item.topic
        target, origin = self._targets[name], self._targets[item.topic]
        if target is None:
            return f"topic {name} does not exist"
        original = self._job.sink.timestamp == "original"
        partitions = None if origin is None else origin.partitions
        return await self._clients.writer.send(item, target, partitions, original_time=original)

    def _report_unfit(self, sentence: str) -> None:
        self._reported += 1
        if self._reported <= MOST_REPORTED:
            self._say(f"not replayed: {sentence}")
        elif self._reported == MOST_REPORTED + 1:
            self._say("not replayed: more records, which the summary counts")
