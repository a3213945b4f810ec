"""Runs the audit of gateways against the log at an interval, and writes each result once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from aiokafka import TopicPartition

from mapping.record import CONTENT_TYPE, GW_PROTOCOL
from spark_sinks.audit.balance import Acknowledged, AuditCheckpoint, Balance, Counted, OffsetRange, balance, uncounted
from spark_sinks.audit.figures import FiguresError, fetch, parse_figures
from spark_sinks.read.headers import ORIGIN_REPLAY
from spark_sinks.replay.items import Place
from spark_sinks.replay.kafka import LogReader, partitions_of
from spark_sinks.replay.ledger import LedgerEntry, LedgerError
from spark_sinks.replay.run import Clients, Say, StopRequest, connected, entry_of, stops_within, unless_stopped
from spark_sinks.spec.audit import BridgeAudit

JSON: Final = b"application/json"
Fetch = Callable[[str], Awaitable[str]]


class AuditState(msgspec.Struct):
    """The state that one audit leaves for the next."""

    places: dict[str, dict[int, AuditCheckpoint]]  # topic -> partition
    at: str  # time of the audit, UTC


class Audited(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="look"):
    """The totals of one audit."""

    job: str
    acknowledged: int
    stored: int
    missing: int
    partitions: int  # with new records
    silent: int  # gateways that did not answer
    unreadable: int  # batches that nothing can read; their records are not counted as stored
    duration_ms: int


async def run(
    job: BridgeAudit,
    *,
    report: Callable[[Audited], None],
    say: Say,
    stopped: asyncio.Event,
    once: bool,
    fetched: Fetch = fetch,
) -> int:
    """Audit until `stopped`, or once; return how many records are missing, and batches that nothing can read.

    Raises:
        LedgerError, ReplacedError, KafkaError: it cannot continue; the message says why.
    """
    missing = 0
    with contextlib.suppress(StopRequest):
        async with connected(job, say, stopped) as clients:
            entry = await unless_stopped(stopped, entry_of(job, clients))
            if job.sink.kafka not in await clients.topics.known([job.sink.kafka]):
                raise LedgerError(f"there is no topic {job.sink.kafka}")
            audit = _Audit(job, clients, entry, say, fetched)
            while not stopped.is_set():
                balance = await unless_stopped(stopped, audit.pass_once())
                missing += balance.missing + balance.unreadable
                report(balance)
                if once:
                    break
                left = job.run.interval.ms - time.time() * 1000 % job.run.interval.ms  # align intervals with the clock
                await stops_within(stopped, left / 1000)
    return missing


class _Audit:
    def __init__(self, job: BridgeAudit, clients: Clients, entry: LedgerEntry, say: Say, fetched: Fetch) -> None:
        self._job = job
        self._clients = clients
        self._say = say
        self._fetch = fetched
        self._records = entry.records
        self._unreadable = 0  # in this audit
        memo = entry.memo
        self._state = AuditState({}, "") if memo is None else msgspec.convert(memo, AuditState, str_keys=True)

    async def pass_once(self) -> Audited:
        """Audit every gateway against the log once, and write the results to Kafka."""
        began = time.monotonic()
        self._unreadable = 0
        current, silent = await self._ask()
        until = datetime.now(UTC).isoformat(timespec="seconds")
        places = {place for figures in current.values() for place in figures}
        # While a gateway is silent its records are not known, so every partition waits for it.
        ranges = [] if silent else [
            uncounted_range
            for place in sorted(places)
            if (uncounted_range := uncounted(place, self._checkpoint(place), _of(place, current))) is not None
        ]  # fmt: skip
        ready, counted = await self._count(ranges)
        balances = [
            balance(
                what, counted[what.place], self._checkpoint(what.place), gateways=len(self._job.source.gateways),
                since=self._state.at or None, until=until,
            )
            for what in ready
        ]  # fmt: skip
        if balances:
            state = AuditState({topic: dict(known) for topic, known in self._state.places.items()}, until)
            for one in balances:
                place = Place(one.topic, one.partition)
                state.places.setdefault(place.topic, {})[place.partition] = AuditCheckpoint(
                    one.end, _of(place, current), one.surplus
                )
            await self._write(balances, state)
        for one in balances:
            self._report(one)
        return Audited(
            job=self._job.title,
            acknowledged=sum(one.acknowledged for one in balances),
            stored=sum(one.stored for one in balances),
            missing=sum(one.missing for one in balances),
            partitions=len(balances),
            silent=silent,
            unreadable=self._unreadable,
            duration_ms=round((time.monotonic() - began) * 1000),
        )

    def _checkpoint(self, place: Place) -> AuditCheckpoint | None:
        return self._state.places.get(place.topic, {}).get(place.partition)

    async def _ask(self) -> tuple[dict[str, dict[Place, Acknowledged]], int]:
        """Return the numbers that each gateway reports, and how many gateways did not answer."""
        figures: dict[str, dict[Place, Acknowledged]] = {}
        for address in self._job.source.gateways:
            try:
                figures[address] = parse_figures(address, await self._fetch(address), self._job.source.topics)
            except FiguresError as error:
                self._say(str(error))
        return figures, len(self._job.source.gateways) - len(figures)

    async def _count(self, ranges: Collection[OffsetRange]) -> tuple[list[OffsetRange], dict[Place, Counted]]:
        """Count the ranges that can be read to their end; an open transaction may hide the end until it is finished."""
        if not ranges:
            return [], {}
        consumer = self._clients.committed
        partitions = partitions_of(what.place for what in ranges)
        visible = await consumer.end_offsets(partitions)
        oldest = await consumer.beginning_offsets(partitions)
        ready = [what for what in ranges if visible[TopicPartition(*what.place)] >= what.end]
        begins = {what.place: max(what.begin, oldest[TopicPartition(*what.place)]) for what in ready}
        ends = {what.place: max(what.end, begins[what.place]) for what in ready}
        stored: Counter[Place] = Counter()
        others: Counter[Place] = Counter()
        minutes: dict[Place, Counter[int]] = {what.place: Counter() for what in ready}
        reader = LogReader(consumer, begins, ends)
        async for record in reader.records():
            place = Place(record.topic, record.partition)
            if _of_gateway(record.headers):
                stored[place] += 1
                minutes[place][record.timestamp // 60_000] += 1
            else:
                others[place] += 1
        for gap in reader.unreadable():
            self._unreadable += 1
            self._say(f"not counted: {gap}")
        counted = {
            what.place: Counted(
                stored[what.place],
                others[what.place],
                {_minute(number): count for number, count in sorted(minutes[what.place].items())},
                deleted=begins[what.place] > what.begin,
            )
            for what in ready
        }
        return ready, counted

    async def _write(self, balances: Collection[Balance], state: AuditState) -> None:
        async def fill() -> LedgerEntry:
            for counted in balances:
                key = f"{counted.topic}/{counted.partition}".encode()
                value = msgspec.json.encode(counted)
                await self._clients.writer.send_plain(self._job.sink.kafka, key, value, [(CONTENT_TYPE, JSON)])
            state_now = msgspec.to_builtins(state)
            return LedgerEntry(
                task=self._job.task, began={}, positions={}, records=self._records + len(balances), memo=state_now
            )

        await self._clients.writer.commit(fill)
        self._state = state
        self._records += len(balances)

    def _report(self, balance: Balance) -> None:
        where = (
            f"{balance.topic}-{balance.partition}, offsets {balance.begin} to {balance.end},"
            f" {balance.since} to {balance.until}"
        )
        if balance.verdict == "missing":
            self._say(f"{where}: {balance.missing:,} of {balance.acknowledged:,} acknowledged records are missing")
        elif balance.verdict == "deleted":
            self._say(f"{where}: Kafka deleted records before they were counted")


def _of(place: Place, current: Mapping[str, Mapping[Place, Acknowledged]]) -> dict[str, Acknowledged]:
    return {address: figures[place] for address, figures in current.items() if place in figures}


def _of_gateway(headers: Collection[tuple[str, Any]]) -> bool:
    """Whether a gateway wrote the record itself, rather than a replay."""
    names = {name for name, _ in headers}
    return GW_PROTOCOL in names and ORIGIN_REPLAY not in names


def _minute(number: int) -> str:
    return datetime.fromtimestamp(number * 60, UTC).strftime("%Y-%m-%dT%H:%M")
