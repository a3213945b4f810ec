"""Stateless reads: a page of a topic's log from any position, and the position of the next page.

Nothing is kept between two requests. The catch-up reader (`gateway.kafka.read.catch_up_reader`), which other clients
share, reads the pages. A request that waits at the end of the log sleeps until the live reader has a new record.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import msgspec
from aiohttp import web
from aiohttp.helpers import ETAG_ANY
from aiokafka import TopicPartition

from gateway.kafka.contracts import Subscriber
from gateway.kafka.read.arrivals import Arrivals
from gateway.kafka.read.catch_up_reader import CatchUpReader, Reading
from gateway.net.http.http_server import SERVER
from gateway.rest.consume.page_size import reserved_page
from gateway.rest.consume.start_positions import Span, find_span
from gateway.rest.server.call import Call
from gateway.rest.server.client_limits import RequestLimits
from gateway.rest.server.operation_set import OperationSet
from gateway.rest.server.request_login import forbidden
from gateway.rest.services import RestServices
from gateway.security.rights.authorization import Grant
from gateway.security.rights.permissions import Permission
from mapping.record import Received
from mapping.rest.outgoing import RecordFilter, view, view_line
from mapping.tenants import Names
from protocols.rest.errors import busy
from protocols.rest.media import FORMATS, Format
from protocols.rest.positions import BEGINNING, format_position, wanted
from protocols.rest.responses import Page
from protocols.rest.streams.streaming import LINES_TYPE, Lines
from telemetry.statistics import counter, gauge

PAGES_AT_ONCE: Final = 8  # pages filled concurrently; with `http.poll_max_bytes` it bounds their memory
FILL_S: Final = 10.0  # the longest time to fill a page, and to wait for a slot
MAX_SCANNED: Final = 100_000  # records read for one page, matching or not
CHUNK: Final = 500  # records that a page takes in one turn


class RecordPagesStatistics(msgspec.Struct):
    """Counts of stateless reads, since the start."""

    waiting: Annotated[int, gauge("reads that wait for a record")] = 0
    pages_total: Annotated[int, counter("pages read from the log")] = 0
    records_total: Annotated[int, counter("records on pages of the log")] = 0
    unchanged_total: Annotated[int, counter("reads answered with 304, not changed")] = 0


class Filling(Subscriber):
    """A page that is being filled: a subscriber that accepts matching records until the page is full."""

    def __init__(
        self, add: Callable[[Received], bool], limit: int, chosen: RecordFilter, allowed: Permission | None
    ) -> None:
        """`add` returns whether a record fits. `allowed` checks the right for each record's key; None allows all."""
        self.done = asyncio.Event()
        self.count = 0
        self._add = add
        self._limit = limit
        self._chosen = chosen
        self._allowed = allowed
        self._scanned = 0
        self._left = 0

    @property
    def demand(self) -> int:
        """The number of records that the page accepts next; 0 once it is full (`contracts.Subscriber`)."""
        return 0 if self.done.is_set() else CHUNK

    def offer_nowait(self, record: Received, context: object = None) -> bool:
        """Add the record if it matches; False if the page is full (`contracts.Subscriber`)."""
        if self.done.is_set():
            return False
        wanted_here = self._chosen.everything or self._chosen.matches(record)
        if wanted_here and (self._allowed is None or self._allowed(record.topic, record.key)):
            if not self._add(record):
                self.done.set()
                return False
            self.count += 1
            if self.count >= self._limit:
                self.done.set()
        self._scanned += 1
        if self._scanned >= MAX_SCANNED:
            self.done.set()
        return True

    async def fill(self, catch_up_reader: CatchUpReader, topic: str, span: Span) -> dict[int, int]:
        """Read until the page is full or the span's end is reached. Returns the position of the next page."""
        position = dict(span.start)

        def finished(reading: Reading) -> None:
            position[reading.partition.partition] = max(reading.position, reading.goal())
            self._left -= 1
            if not self._left:
                self.done.set()

        starts = {number: start for number, start in span.start.items() if start < span.ends.get(number, start)}
        self._left = len(starts)
        try:
            for number, start in starts.items():
                partition = TopicPartition(topic, number)
                goal = partial(span.ends.__getitem__, number)
                catch_up_reader.start(Reading(self, partition, start, goal=goal, finished=finished))
            if starts:
                async with asyncio.timeout(FILL_S):
                    await self.done.wait()
        except TimeoutError as error:
            if not self.count:
                raise busy("Kafka is slow; try again") from error
        finally:
            for reading in catch_up_reader.forget(self):
                position[reading.partition.partition] = reading.position
        return position


def _page(
    media: str, embedded: Format, max_bytes: int, names: Names
) -> tuple[Lines | Page, Callable[[Received], bool]]:
    """Return an empty answer of this media type, and a function that adds a record to it."""
    shown = names.shown
    if media == LINES_TYPE:
        lines = Lines(max_bytes)
        return lines, lambda record: lines.add(view_line(shown(record), embedded))
    page = Page(max_bytes)
    return page, lambda record: page.add(view(shown(record), embedded))


def _allowed(grant: Grant, topic: str) -> Permission | None:
    """Return the permission to check for each record, None if all may be read; RestError 403 if none may."""
    if not grant.subscribe.some(topic):
        raise forbidden(f"read {topic}")
    return None if grant.subscribe.uniform(topic) else grant.subscribe


class RecordPages(OperationSet):
    """The operation that reads a page of the log without a consumer."""

    name = "reads"

    def __init__(self, services: RestServices, limits: RequestLimits) -> None:
        self._config = services.config
        self._limits = limits
        self._lookup = services.lookup
        self._catch_up_reader = services.catch_up_reader
        self._outgoing = services.publisher.budgets.outgoing
        self._clock = services.clock
        self._arrivals = Arrivals(services.live_reader, services.lookup)
        self._filling = asyncio.Semaphore(PAGES_AT_ONCE)
        self._sleepers: set[asyncio.Event] = set()
        self._draining = False
        self._counts = RecordPagesStatistics()
        self.operations = {"readRecords": self.read}

    async def read(self, call: Call, topic: str) -> web.StreamResponse:
        """`GET /topics/{topicname}/records`."""
        query = call.query
        _allowed(call.grant, topic)
        pace = self._limits.check_reading(call.connection)
        media = call.negotiate()
        embedded = FORMATS.get(media) or Format(query["format"])
        chosen = RecordFilter(query.get("key", ()), query.get("header", ()))
        limit, max_bytes = query["limit"], min(query.get("max_bytes", 2**63), self._config.poll_max_bytes)
        if pace is not None:
            limit, max_bytes = pace.page(limit, max_bytes)
        deadline = self._clock() + min(query["wait"] / 1000, self._config.max_poll_wait_s)
        span = await find_span(self._lookup, topic, wanted(query), BEGINNING)
        while True:
            await self._enter()
            try:
                with reserved_page(self._outgoing, max_bytes) as size:
                    page, add = _page(media, embedded, size, call.grant.names)
                    # Checked again: the rights may have changed during a long wait.
                    filling = Filling(add, limit, chosen, _allowed(call.grant, topic))
                    position = await filling.fill(self._catch_up_reader, topic, span)
            finally:
                self._filling.release()
            if filling.count or self._draining or self._clock() >= deadline:
                break
            await self._wait(topic, position, deadline)
            ends = await self._lookup.ends([TopicPartition(topic, number) for number in position], led=True)
            span = Span(position, {partition.partition: end for partition, end in ends.items()})
        self._counts.pages_total += 1
        self._counts.records_total += filling.count
        full = len(position) == 1 and any(offset < span.ends.get(number, 0) for number, offset in position.items())
        content = page.finish()
        if pace is not None:
            pace.spend(filling.count, len(content))
        return self._answer(call, media, content, position, span, full=full)

    async def _enter(self) -> None:
        """Wait for a slot to fill a page; RestError 503 after `FILL_S`."""
        try:
            async with asyncio.timeout(FILL_S):
                await self._filling.acquire()
        except TimeoutError as error:
            raise busy("Too many pages are being read; try again") from error

    async def _wait(self, topic: str, position: Mapping[int, int], deadline: float) -> None:
        """Sleep until a record is stored behind the position, or until the deadline."""
        sleeper = asyncio.Event()
        self._sleepers.add(sleeper)
        try:
            offsets = {TopicPartition(topic, number): offset for number, offset in position.items()}
            if await self._arrivals.wait_for(sleeper, offsets):
                async with asyncio.timeout(max(0.0, deadline - self._clock())):
                    await sleeper.wait()
        except TimeoutError:
            return  # the caller reads once more
        finally:
            self._sleepers.discard(sleeper)
            self._arrivals.forget(sleeper)

    def _answer(
        self, call: Call, media: str, content: bytes, position: Mapping[int, int], span: Span, *, full: bool
    ) -> web.StreamResponse:
        """Return the page. A full page never changes, so it gets an entity tag and may be cached and revalidated."""
        varies = call.answer_headers.get("Vary")
        call.answer_headers["Vary"] = "Accept" if varies is None else f"{varies}, Accept"
        headers = {
            "Content-Type": media,
            "Server": SERVER,
            "Link": f'<{_following(call, position)}>; rel="next"',
            "Next-Position": format_position(position),
            "End-Position": format_position(span.ends),
            "Cache-Control": "no-store",
        }
        if full:
            tag = hashlib.blake2b(content, digest_size=16).hexdigest()
            headers["ETag"] = f'"{tag}"'
            headers["Cache-Control"] = "private, no-cache"
            known = call.request.if_none_match or ()  # weak comparison (RFC 9110 section 13.1.2)
            is_any = call.request.headers.get("If-None-Match") == ETAG_ANY  # `known` has the tag "*" for it too
            if is_any or any(entity_tag.value == tag for entity_tag in known):
                self._counts.unchanged_total += 1
                del headers["Content-Type"]
                return web.Response(status=304, headers=headers)
        return web.Response(body=content, headers=headers)

    async def drain(self) -> None:
        """Answer the waiting requests now."""
        self._draining = True
        for sleeper in self._sleepers:
            sleeper.set()

    async def stop(self) -> None:
        """Stop watching topics."""
        self._arrivals.stop()

    def statistics(self) -> RecordPagesStatistics:
        """Return the counts so far."""
        return msgspec.structs.replace(self._counts, waiting=len(self._sleepers))


def _following(call: Call, position: Mapping[int, int]) -> str:
    """Return the next page's URL, relative to this one so that it is right behind any proxy."""
    query: list[tuple[str, Any]] = [
        (name, value)
        for name, value in call.request.rel_url.query.items()
        if name not in ("from", "offset", "timestamp") and name in call.operation.query
    ]
    return "?" + urlencode([*query, ("from", format_position(position))], safe=":,")
