"""Produce requests: one owner and one future a request, never one a record.

A request is answered when the fate of its last record is known. It is 200 with one entry for each record, unless no
record at all was stored for one and the same reason: then that reason is the status of the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from aiohttp import web

from gateway.kafka.contracts import Result
from gateway.kafka.publisher import Publisher
from gateway.rest.access import forbidden
from gateway.rest.admission import Admission
from gateway.rest.answers import control_answer, no_content
from gateway.rest.body import BodyReader
from gateway.rest.call import Call, Handler, Module
from gateway.security.authorization import Grant
from mapping.outcomes import ANSWERS, Outcome
from mapping.record import Headers, Record
from mapping.rest import standard_headers, to_records, trace_headers
from protocols.rest.errors import RETRY_AFTER_S, RestError, not_found
from protocols.rest.media import Format, produce_format
from protocols.rest.responses import ErrorBody, Stored, encode_results

PRINCIPALS: Final = 4096  # sets of standard headers that are kept ready
_STATUS_BUSY: Final = ANSWERS[Outcome.BUSY].http


class ProduceStatistics(msgspec.Struct, frozen=True):
    """What produce requests came to, since the start."""

    requests_total: int
    records_total: int
    records_failed_total: int
    active: int
    uploading_bytes: int
    refused_total: int


class Ticket:
    """One request that waits for Kafka: the owner of its records, whose tokens are their places in the request."""

    __slots__ = ("_left", "done", "failed", "results")

    def __init__(self, count: int, done: asyncio.Future[None]) -> None:
        self.results: list[Stored | ErrorBody] = [_PENDING] * count
        self.failed = 0
        self.done = done
        self._left = count

    def settle(self, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        """See `contracts.Owner`."""
        results = self.results
        if result.outcome is Outcome.STORED:
            partition = result.partition
            for index, offset in zip(tokens, offsets, strict=True):
                results[index] = Stored(partition, offset)
            self._settled(len(tokens))
        else:
            error = ErrorBody(ANSWERS[result.outcome].http, result.reason or result.outcome.value)
            for index in tokens:
                results[index] = error
            self.failed += len(tokens)
            self._settled(len(tokens))

    def refuse(self, index: int, error: ErrorBody) -> None:
        """A record that is not even submitted."""
        self.results[index] = error
        self.failed += 1
        self._settled(1)

    def _settled(self, count: int) -> None:
        self._left -= count
        assert self._left >= 0
        if not self._left and not self.done.done():  # done already: the client left
            self.done.set_result(None)


_PENDING: Final = ErrorBody(_STATUS_BUSY, "pending")


class Produce(Module):
    """The two produce operations. Their bodies are checked while they are read into records, not by the schemas."""

    def __init__(self, publisher: Publisher, admission: Admission, bodies: BodyReader, max_records: int) -> None:
        """Publish through `publisher` what `admission` lets in and `bodies` reads."""
        self._publisher = publisher
        self._admission = admission
        self._bodies = bodies
        self._max_records = max_records
        self._standard: dict[tuple[Format, str], Headers] = {}
        self._requests = 0
        self._records = 0
        self._failed = 0

    def operations(self) -> Mapping[str, Handler]:
        """See `Module`."""
        return {"send": self.send, "sendToPartition": self.send_to_partition}

    async def send(self, call: Call, topic: str) -> web.StreamResponse:
        """`POST /topics/{topicname}`."""
        return await self._produce(call, topic, None)

    async def send_to_partition(self, call: Call, topic: str, partition: int) -> web.StreamResponse:
        """`POST /topics/{topicname}/partitions/{partitionid}`."""
        return await self._produce(call, topic, partition)

    async def _produce(self, call: Call, topic: str, partition: int | None) -> web.StreamResponse:
        request, grant = call.request, call.grant
        fields = request.headers
        embedded = produce_format(fields.get("Content-Type"))
        unacknowledged = call.query["async"]
        if not grant.publish.some(topic):
            raise forbidden(f"publish to {topic}")
        with self._admission.enter(topic):
            body = await self._bodies.read(request)
            records = to_records(
                body,
                embedded,
                topic=topic,
                partition=partition,
                limit=self._max_records,
                headers=self._standard_headers(embedded, grant.identity.name),
                trace=trace_headers(fields.get("traceparent"), fields.get("tracestate")),
            )
            self._requests += 1
            self._records += len(records)
            if unacknowledged or not records:  # nothing else would say that there is no such place
                info = self._publisher.known_topic(topic) or await self._publisher.topic(topic)
                if partition is not None and partition >= info.partitions:
                    raise not_found(f"Topic {topic} has no partition {partition}")
            if unacknowledged:
                return self._send_unacknowledged(records, grant)
            if not records:
                return control_answer(encode_results(()))
            ticket = Ticket(len(records), asyncio.get_running_loop().create_future())
            submit = self._publisher.submit
            everything = grant.publish.uniform(topic)
            for index, record in enumerate(records):
                if everything or grant.publish(topic, record.key):
                    submit(record, ticket, index)
                else:
                    ticket.refuse(index, ErrorBody(403, f"Not allowed: publish to {topic} with this key"))
            del records, body  # what Kafka has not answered yet is in the publisher's budget, and only there
            await ticket.done
        if ticket.failed:
            self._failed += ticket.failed
            _raise_common_failure(ticket)
        return control_answer(encode_results(ticket.results))

    def _send_unacknowledged(self, records: Sequence[Record], grant: Grant) -> web.Response:
        """`async=true`: 204 says that the records are on their way, not that Kafka has them."""
        for record in records:
            if not grant.publish(record.topic, record.key):
                raise forbidden(f"publish to {record.topic} with this key")
        for record in records:
            self._publisher.submit(record, None)
        return no_content()

    def _standard_headers(self, embedded: Format, principal: str) -> Headers:
        headers = self._standard.get((embedded, principal))
        if headers is None:
            if len(self._standard) >= PRINCIPALS:
                self._standard.clear()
            headers = self._standard[embedded, principal] = standard_headers(embedded, principal)
        return headers

    def statistics(self) -> ProduceStatistics:
        """Counts so far."""
        return ProduceStatistics(
            requests_total=self._requests,
            records_total=self._records,
            records_failed_total=self._failed,
            active=self._admission.active,
            uploading_bytes=self._admission.uploading,
            refused_total=self._admission.refused,
        )


def _raise_common_failure(ticket: Ticket) -> None:
    """Raise the request's error when every record failed with the same status."""
    first = ticket.results[0]
    if ticket.failed < len(ticket.results) or not isinstance(first, ErrorBody):
        return
    status = first.error_code
    if any(isinstance(result, ErrorBody) and result.error_code != status for result in ticket.results):
        return
    headers = (("Retry-After", str(RETRY_AFTER_S)),) if status == _STATUS_BUSY else ()
    raise RestError(status, first.message, headers=headers)
