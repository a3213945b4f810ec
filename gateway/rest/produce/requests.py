"""Produce requests, each with one owner and one future for all its records.

A request is answered when its last record is settled. The answer is 200 with one entry for each record, unless all
records failed with the same status: then that is the status of the answer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any, cast

import msgspec
from aiohttp import web

from flowcontrol.budget import ConnectionBudget
from gateway.kafka.contracts import Owner, Refused, Result
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.publish.sender_partitions import RememberedSender
from gateway.net.http.http_server import HttpConnection
from gateway.rest.produce.idempotency import KEY_FIELD, KeyedRequests, request_key
from gateway.rest.produce.tickets import (
    Results,
    check_place,
    denied_key,
    error_of,
    failure_of,
    raise_common_failure,
    store,
    submit_allowed,
)
from gateway.rest.server.answers import control_answer, no_content
from gateway.rest.server.call import Call
from gateway.rest.server.direct_requests import DirectRequest
from gateway.rest.server.operation_set import OperationSet
from gateway.rest.server.overload import OverloadGuard, ProduceSlot
from gateway.rest.server.request_login import forbidden
from gateway.runtime.failures import failures
from gateway.security.rights.authorization import Grant
from gateway.settings.config import HttpConfig
from mapping.outcomes import Outcome
from mapping.record import Headers, Record
from mapping.rest.incoming import to_records
from protocols.rest.errors import RestError, unprocessable
from protocols.rest.media import Format, produce_format
from protocols.rest.responses import Stored, encode_results
from telemetry.statistics import counter, gauge


class Storing:
    """Stores the records of produce requests."""

    def __init__(self, publisher: Publisher, keyed: KeyedRequests) -> None:
        """Store records with `publisher`, and those of requests with an `Idempotency-Key` with `keyed`."""
        self.failed = 0
        self._publisher = publisher
        self.keyed = keyed

    async def store(self, call: Call, records: list[Record], body: bytes, key: str | None) -> web.Response:
        """Store the records, all of one topic, and answer when the last one is settled.

        `body` is the decompressed body, and what else its records are made of: a repeated request must have the same.
        `key` is from `idempotency.request_key`.

        Raises:
            RestError: All records failed with the same status; or 409 or 422 because of the request's key.
            Refused: Kafka does not answer, and no record was submitted.
        """
        if key is not None:
            return await self.keyed.store(call, records, body, key)
        topic = records[0].topic
        if self._publisher.known_topic(topic) is None:
            await self._look_up(topic, call.grant.identity.name)
        storing = store(self._publisher, call.grant, records)
        del records, body  # for the same reason as in `store`
        return control_answer(self.answer_of(await storing))

    def answer_of(self, ticket: Results) -> bytes:
        """Return the body of the answer; RestError if all records failed with the same status."""
        if ticket.failed:
            self.failed += ticket.failed
            raise_common_failure(ticket)
        return encode_results(ticket.results)

    async def _look_up(self, topic: str, principal: str) -> None:
        """Refuse the request early if Kafka does not answer. Other errors of the topic are reported for each record."""
        try:
            await self._publisher.topic(topic, principal=principal)
        except Refused as refused:
            if refused.outcome is Outcome.BUSY:
                raise


class ProduceStatistics(msgspec.Struct, frozen=True):
    """Counts of produce requests, since the start."""

    requests_total: Annotated[int, counter("produce requests")]
    records_total: Annotated[int, counter("records of produce requests")]
    records_failed_total: Annotated[int, counter("records of produce requests that were not stored")]
    active: Annotated[int, gauge("produce requests that wait for Kafka")]
    uploading_bytes: Annotated[int, gauge("bytes of bodies being received")]
    refused_total: Annotated[int, counter("produce requests refused before their body was read")]


class Unacknowledged(Owner):
    """The owner of records of `async=true` requests, which count against their connection's budget."""

    __slots__ = ("_storing", "budget")

    def __init__(self, budget: ConnectionBudget, storing: Storing) -> None:
        self.budget = budget
        self._storing = storing

    def settle(self, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        """Count the records that were not stored."""
        if result.outcome is not Outcome.STORED:
            self._storing.failed += len(tokens)


class _Target(msgspec.Struct, frozen=True):
    """Topic, partition and format from the head of a produce request."""

    topic: str
    partition: int | None
    embedded: Format


class _Answers(Owner):
    """The owner of the records of direct requests with one record each. The token is the request.

    One owner for all of them: a batch of such records is one run, and needs no object for each request.
    """

    protocol = "http"

    def __init__(self, storing: Storing) -> None:
        self._storing = storing

    def settle(self, tokens: Sequence[DirectRequest], offsets: Sequence[int], result: Result) -> None:
        """Answer the requests."""
        if result.outcome is Outcome.STORED:
            for request, offset in zip(tokens, offsets, strict=True):
                try:
                    request.answer(encode_results((Stored(result.partition, offset),)))
                except Exception as error:  # a bug with one request must not affect the others
                    failures.report("request", error)
                    failures.guard("request", request.fail, error)
            return
        self._storing.failed += len(tokens)
        failure = failure_of(result)
        for request in tokens:
            failures.guard("request", request.fail, error_of(failure))

    def broken(self, error: Exception, tokens: Sequence[DirectRequest]) -> None:
        """Fail the requests after a bug in `settle` (`contracts.Owner`)."""
        for request in tokens:
            failures.guard("request", request.fail, error)


class _DirectTicket(Results):
    """The records of a request that is served directly."""

    __slots__ = ("_request", "_storing")

    def __init__(self, count: int, principal: str, request: DirectRequest, storing: Storing) -> None:
        super().__init__(count, principal)
        self._request = request
        self._storing = storing

    def complete(self) -> None:
        """Answer."""
        try:
            body = self._storing.answer_of(self)
        except RestError as error:
            self._request.fail(error)
        else:
            self._request.answer(body)

    def broken(self, error: Exception, _tokens: Sequence[Any]) -> None:
        """Fail the request after a bug in `settle` (`contracts.Owner`)."""
        self._request.fail(error)


class Produce(OperationSet):
    """The two produce operations. Their bodies are validated while they are decoded, not against the schemas."""

    def __init__(self, publisher: Publisher, storing: Storing, overload: OverloadGuard, config: HttpConfig) -> None:
        self._storing = storing
        self._publisher = publisher
        self._overload = overload
        self._config = config
        self._requests = 0
        self._records = 0
        self._answers = _Answers(storing)
        self.operations = {"send": self.send, "sendToPartition": self.send}

    async def send(self, call: Call, topic: str, partition: int | None = None) -> web.StreamResponse:
        """`POST /topics/{topicname}`, and `POST /topics/{topicname}/partitions/{partitionid}`."""
        request, grant = call.request, call.grant
        target = _Target(topic, partition, produce_format(request.headers.get("Content-Type")))
        unacknowledged = call.query["async"]
        if not grant.publish.some(topic):
            raise forbidden(f"publish to {topic}")
        key = request_key(request)
        if unacknowledged and key is not None:
            raise unprocessable(f"{KEY_FIELD} and async exclude each other")
        with call.enter(self._overload, topic) as slot:
            body = await call.unchecked_body()
            records = self._read(body, target, grant, slot, call.begin_publish(topic))
            if unacknowledged:
                await check_place(self._publisher, topic, partition, grant.identity.name)
                return self._send_unacknowledged(records, call)
            if not records:
                return await self._answer_empty(target, grant)
            if key is None:
                call.serve_directly(functools.partial(self._accepts, target), functools.partial(self._begin, target))
            storing = self._storing.store(call, records, body, key)
            del records, body  # from here on only the publisher, which counts them in its budget, may hold them
            return await storing

    def _accepts(self, target: _Target, size: int) -> bool:
        """Whether a body of this size may be served directly now."""
        return size <= self._config.max_body_bytes and self._publisher.is_open(target.topic)

    def _begin(self, target: _Target, request: DirectRequest, grant: Grant, body: bytes) -> None:
        """Like `send`, for a complete body and a known topic; see `direct_requests.Begin`."""
        topic = target.topic
        if not grant.publish.some(topic):
            raise forbidden(f"publish to {topic}")
        request.slot = slot = self._overload.enter(topic, request.connection, len(body), grant.identity)
        records = self._read(body, target, grant, slot)
        if not records:
            request.answer_by(lambda: self._answer_empty(target, grant))
            return
        if len(records) == 1:
            if not grant.publish(topic, records[0].key):
                self._storing.failed += 1
                raise denied_key(grant, topic)
            self._publisher.submit(records[0], self._answers, request)
            return
        ticket = _DirectTicket(len(records), grant.identity.name, request, self._storing)
        submit_allowed(self._publisher, grant, records, ticket)

    def _read(self, body: bytes, target: _Target, grant: Grant, slot: ProduceSlot, trace: Headers = ()) -> list[Record]:
        """Decode a body into records, and count them; RestError if the body is not valid."""
        records = to_records(
            body,
            target.embedded,
            topic=target.topic,
            partition=target.partition,
            limit=self._config.max_records,
            principal=grant.identity.name,
            trace=trace,
        )
        self._requests += 1
        self._records += len(records)
        slot.count_records(len(records), len(body))
        return records

    async def _answer_empty(self, target: _Target, grant: Grant) -> web.Response:
        """Return the answer to a request without records."""
        await check_place(self._publisher, target.topic, target.partition, grant.identity.name)
        return control_answer(encode_results(()))

    def _send_unacknowledged(self, records: Sequence[Record], call: Call) -> web.Response:
        """Serve `async=true`: the 204 means that the records are submitted, not that Kafka has them."""
        for record in records:
            if not call.grant.publish(record.topic, record.key):
                raise forbidden(f"publish to {record.topic} with this key")
        connection = cast("HttpConnection", call.request.protocol)
        if connection.unacknowledged is None:
            connection.unacknowledged = self._publisher.budgets.connection()
        sender, owner = RememberedSender(), Unacknowledged(connection.unacknowledged, self._storing)
        for record in records:
            self._publisher.submit(record, owner, None, sender)
        return no_content()

    def statistics(self) -> ProduceStatistics:
        """Return the counts so far."""
        return ProduceStatistics(
            requests_total=self._requests,
            records_total=self._records,
            records_failed_total=self._storing.failed,
            active=self._overload.active,
            uploading_bytes=self._overload.receiving,
            refused_total=self._overload.refused,
        )
