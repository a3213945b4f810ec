"""Uploads: records line by line, stored and reported while the request is being sent (`POST /topics/T/records`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
from aiohttp import StreamReader, web

from gateway.kafka.publish.publisher import Publisher
from gateway.rest.produce.streamed_records import Upload
from gateway.rest.produce.tickets import denied_key
from gateway.rest.server.call import Call
from gateway.rest.server.operation_set import OperationSet
from gateway.rest.server.overload import OverloadGuard
from gateway.rest.server.request_login import forbidden
from gateway.security.authorization import Grant
from gateway.statistics import counter, gauge
from mapping.record import Headers, Record
from mapping.rest.incoming import from_lines
from protocols.rest.errors import SHUTTING_DOWN, RestError, busy
from protocols.rest.splitters import LineSplitter
from protocols.rest.streaming import LINES_TYPE

Kind = TypeVar("Kind", bound=Upload)


class UploadsStatistics(msgspec.Struct):
    """Counts of uploads, since the start."""

    active: Annotated[int, gauge("uploads in progress")] = 0
    uploads_total: Annotated[int, counter("uploads started")] = 0
    records_total: Annotated[int, counter("records of uploads")] = 0
    records_failed_total: Annotated[int, counter("records of uploads that were not stored")] = 0


class Uploads(OperationSet):
    """The operation that stores lines. It also runs the uploads of other dialects."""

    def __init__(
        self, publisher: Publisher, overload: OverloadGuard, *, max_uploads: int, max_line_bytes: int, idle_s: float
    ) -> None:
        """`idle_s` is the longest pause of a client, in sending or in reading its reports.

        Each of at most `max_uploads` uploads holds up to `streamed_records.WINDOW` reports.
        """
        self._publisher = publisher
        self._overload = overload
        self._max_uploads = max_uploads
        self._max_line_bytes = max_line_bytes
        self._idle_s = idle_s
        self._active: set[StreamReader] = set()
        self._counts = UploadsStatistics()
        self.operations = {"uploadRecords": self.upload}

    async def drain(self) -> None:
        """Stop reading uploads; report the records that were read, then end each upload with an error."""
        for content in self._active:
            content.set_exception(busy(SHUTTING_DOWN, close=True))

    async def upload(self, call: Call, topic: str) -> web.StreamResponse:
        """`POST /topics/{topicname}/records`."""
        _ = call.media  # raises 400 for another media type
        call.negotiate(LINES_TYPE)
        writer = _Writer(topic, call.grant, call.begin_publish(topic))
        splitter = LineSplitter(self._max_line_bytes)

        def take(upload: Upload, part: bytes | None) -> None:
            for block in splitter.finish() if part is None else splitter.feed(part):
                self._take(upload, block, writer)

        return await self.run(call, topic, lambda: Upload(self._publisher, topic), take, LINES_TYPE)

    async def run(
        self, call: Call, topic: str, make: Callable[[], Kind], take: Callable[[Kind, bytes | None], None], media: str
    ) -> web.StreamResponse:
        """Run one upload of any dialect to its end.

        `make` makes the owner of its records. `take` gets each part of the body as it arrives, and None at the end.
        `media` is the answer's media type.

        Raises:
            Refused: The topic does not exist and may not be created, or Kafka does not answer.
            RestError: 403, 415, 503.
        """
        if not call.grant.publish.some(topic):
            raise forbidden(f"publish to {topic}")
        if len(self._active) >= self._max_uploads:
            raise busy("Too many uploads; try again", close=True)
        with call.enter(self._overload, topic) as slot:
            await self._publisher.topic(topic, principal=call.grant.identity.name)
            upload = make()
            slot.budget = upload.budget
            self._active.add(call.request.content)
            self._counts.uploads_total += 1
            try:
                answer = await call.stream(media)
                await answer.write(b"")  # send the head now: some clients wait for it before they send more
                async with asyncio.TaskGroup() as tasks:
                    writing = tasks.create_task(upload.write(answer, self._idle_s))
                    try:
                        async for part in call.pieces(self._idle_s):
                            before = upload.taken
                            take(upload, part)
                            slot.count_records(upload.taken - before, len(part))
                            await upload.wait_for_capacity()
                            await slot.wait_for_rate()
                        take(upload, None)
                        ended = None
                    except RestError as error:
                        ended = error
                    upload.finish()
                    await writing
                if ended is not None:
                    answer.force_close()
                    await answer.write(upload.ended(ended.status, ended.message))
                return answer
            except* ConnectionError as group:
                raise ConnectionError("the client has disconnected") from group
            finally:
                upload.close()
                self._active.discard(call.request.content)
                self._counts.records_total += upload.taken
                self._counts.records_failed_total += upload.failures

    def _take(self, upload: Upload, block: bytes | None, writer: _Writer) -> None:
        """Submit the records of complete lines; None stands for a line that was too long."""
        if block is None:
            upload.refuse(413, f"The line is longer than {self._max_line_bytes} bytes")
            return
        run: list[Record] = []
        publish = writer.grant.publish
        everything = publish.uniform(writer.topic)  # checked again: rights may change during a long upload
        for found in from_lines(block, writer.topic, writer.grant.identity.name, writer.trace):
            if isinstance(found, Record) and (everything or publish(writer.topic, found.key)):
                run.append(found)
                continue
            if run:
                upload.submit(run)
                run = []
            if isinstance(found, Record):
                denied = denied_key(writer.grant, writer.topic)
                upload.refuse(denied.error_code, denied.message)
            else:
                upload.refuse(found.status, found.message, found.validation_errors)
        if run:
            upload.submit(run)

    def statistics(self) -> UploadsStatistics:
        """Return the counts so far; records are counted at the end of their upload."""
        return msgspec.structs.replace(self._counts, active=len(self._active))


class _Writer(msgspec.Struct, frozen=True):
    """The topic and client of an upload, and the trace context of its records."""

    topic: str
    grant: Grant
    trace: Headers
