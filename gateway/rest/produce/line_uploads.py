"""Uploads: records line by line, stored and reported while the request is being sent (`POST /topics/T/records`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Annotated

import msgspec
from aiohttp import StreamReader, web

from flowcontrol.admission import Admission, Refusal, client_share
from gateway.kafka.publish.publisher import Publisher
from gateway.rest.produce.streamed_records import Upload
from gateway.rest.produce.tickets import denied_key
from gateway.rest.server.call import Call
from gateway.rest.server.operation_set import OperationSet
from gateway.rest.server.overload import OverloadGuard
from gateway.rest.server.request_login import forbidden
from gateway.runtime.turns import Slices
from gateway.security.rights.authorization import Grant
from gateway.settings.config import HttpConfig
from mapping.record import Headers, Record
from mapping.rest.incoming import from_lines
from protocols.rest.errors import SHUTTING_DOWN, RestError, busy, too_many
from protocols.rest.responses import ErrorBody, error_body
from protocols.rest.splitters import LineSplitter
from protocols.rest.streams.streaming import LINES_TYPE
from telemetry.statistics import counter, gauge


class UploadsStatistics(msgspec.Struct):
    """Counts of uploads, since the start."""

    active: Annotated[int, gauge("uploads in progress")] = 0
    uploads_total: Annotated[int, counter("uploads started")] = 0
    records_total: Annotated[int, counter("records of uploads")] = 0
    records_failed_total: Annotated[int, counter("records of uploads that were not stored")] = 0


class LineUpload(Upload):
    """An upload of lines."""

    def __init__(self, publisher: Publisher, topic: str, grant: Grant, trace: Headers, config: HttpConfig) -> None:
        super().__init__(publisher, topic, config.max_upload_errors)
        self._grant = grant
        self._trace = trace
        self._limit = config.max_line_bytes
        self._splitter = LineSplitter(self._limit)

    def feed(self, part: bytes | None) -> Iterator[None]:
        """Take a part of the body, None at its end; yields where other work may run."""
        for block in self._splitter.finish() if part is None else self._splitter.feed(part):
            if block is None:
                self.take([ErrorBody(413, f"The line is longer than {self._limit} bytes")])
                continue
            for records in from_lines(block, self.topic, self._grant.identity.name, self._trace):
                self.take(self._allowed(records))
                yield

    def _allowed(self, records: Sequence[Record | ErrorBody]) -> Sequence[Record | ErrorBody]:
        grant, topic = self._grant, self.topic
        if grant.publish.uniform(topic):  # checked again: rights may change during a long upload
            return records
        return [
            item
            if isinstance(item, ErrorBody) or grant.publish(topic, item.key)
            else error_body(denied_key(grant, topic))
            for item in records
        ]


class _Running:
    """An upload in progress: how much came, and how long the gateway waited for it."""

    __slots__ = ("_clock", "_received", "_since", "_waited_s", "content")

    def __init__(self, content: StreamReader) -> None:
        self.content = content
        self._clock = asyncio.get_running_loop().time
        self._received = 0  # bytes
        self._waited_s = 0.0
        self._since: float | None = None  # since when the gateway waits for the next part

    async def timed(self, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the parts; the time between them counts, that in which the gateway works does not."""
        self._since = self._clock()
        async for part in parts:
            self._waited_s, self._since = self.waited_s, None
            self._received += len(part)
            yield part
            self._since = self._clock()

    @property
    def waited_s(self) -> float:
        """How long the gateway has waited for the client."""
        return self._waited_s + (0.0 if self._since is None else self._clock() - self._since)

    def is_slow(self, grace_s: float, rate: int) -> bool:
        """Whether less than `rate` bytes/s came, after `grace_s` seconds."""
        waited_s = self.waited_s
        return waited_s > grace_s and self._received < (waited_s - grace_s) * rate


class Uploads(OperationSet):
    """The operation that stores lines. It also runs the uploads of other dialects."""

    name = "uploads"

    def __init__(self, publisher: Publisher, overload: OverloadGuard, config: HttpConfig) -> None:
        self._publisher = publisher
        self._overload = overload
        self._config = config
        self._idle_s = config.header_timeout_s  # the longest pause of a client, in sending or in reading its reports
        self._places = Admission(config.max_uploads, client_share(config.max_uploads, config.max_uploads_per_client))
        self._active: set[_Running] = set()
        self._counts = UploadsStatistics()
        self.operations = {"uploadRecords": self.upload}

    async def drain(self) -> None:
        """Stop reading uploads; report the records that were read, then end each upload with an error."""
        for running in self._active:
            running.content.set_exception(busy(SHUTTING_DOWN, close=True))

    async def upload(self, call: Call, topic: str) -> web.StreamResponse:
        """`POST /topics/{topicname}/records`."""
        _ = call.media  # raises 400 for another media type
        call.negotiate(LINES_TYPE)
        trace = call.begin_publish(topic)

        def make() -> LineUpload:
            return LineUpload(self._publisher, topic, call.grant, trace, self._config)

        return await self.run(call, topic, make, LINES_TYPE)

    async def run(self, call: Call, topic: str, make: Callable[[], Upload], media: str) -> web.StreamResponse:
        """Run one upload of any dialect to its end.

        `make` makes the owner of its records. `media` is the answer's media type.

        Raises:
            Refused: The topic does not exist and may not be created, or Kafka does not answer.
            RestError: 403, 415, 503.
        """
        if not call.grant.publish.some(topic):
            raise forbidden(f"publish to {topic}")
        with call.enter(self._overload, topic) as slot, self._place(call) as running:
            await self._publisher.topic(topic, principal=call.grant.identity.name)
            upload = make()
            slot.budget = upload.budget
            self._counts.uploads_total += 1
            try:
                answer = await call.stream(media)
                await answer.write(b"")  # send the head now: some clients wait for it before they send more
                async with asyncio.TaskGroup() as tasks:
                    writing = tasks.create_task(upload.write(answer, self._idle_s))
                    ended = None
                    try:
                        slices = Slices()
                        async for part in running.timed(call.pieces(self._idle_s)):
                            before = upload.taken
                            for _ in upload.feed(part):
                                await upload.wait_for_capacity()
                                await slices.rest()
                            slot.count_records(upload.taken - before, len(part))
                            await upload.wait_for_capacity()
                            await slot.wait_for_rate()
                        for _ in upload.feed(None):
                            await slices.rest()
                    except RestError as error:
                        ended = error_body(error)
                    upload.finish()
                    await writing
                if ended is not None:
                    answer.force_close()
                    await answer.write(upload.ended(ended.error_code, ended.message))
                return answer
            except* ConnectionError as group:
                raise ConnectionError("the client has disconnected") from group
            finally:
                upload.close()
                self._counts.records_total += upload.taken
                self._counts.records_failed_total += upload.failures

    @contextlib.contextmanager
    def _place(self, call: Call) -> Iterator[_Running]:
        """Count an upload until the end of the block: each holds up to `streamed_records.WINDOW` reports.

        Raises:
            RestError: 503 or 429 if there is no place. With 503, a slow upload ends, so that the next try finds one.
        """
        client = call.connection.share
        refusal = self._places.enter(client)
        if refusal is not None:
            if refusal is Refusal.FULL:
                self._end_slow()
                raise busy("Too many uploads; try again", close=True)
            raise too_many(f"You have {self._places.limit_per_client} uploads in progress; try again", close=True)
        running = _Running(call.request.content)
        self._active.add(running)
        try:
            yield running
        finally:
            self._active.discard(running)
            self._places.leave(client)

    def _end_slow(self) -> None:
        """End the slowest upload that comes too slowly, if there is one; only while others wait for a place."""
        config = self._config
        slow = [upload for upload in self._active if upload.is_slow(config.header_timeout_s, config.min_upload_rate)]
        if slow:
            slowest = max(slow, key=lambda upload: upload.waited_s)
            slowest.content.set_exception(RestError(408, "The upload comes too slowly while others wait", close=True))

    def statistics(self) -> UploadsStatistics:
        """Return the counts so far; records are counted at the end of their upload."""
        return msgspec.structs.replace(self._counts, active=len(self._active))
