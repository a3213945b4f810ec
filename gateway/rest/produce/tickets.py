"""Requests that wait for Kafka, each with one owner and one future for all its records."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Final

from gateway.kafka.contracts import Owner, Result
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.publish.sender_partitions import RememberedSender
from gateway.rest.server.request_login import forbidden
from gateway.runtime.audited import Where, audit
from gateway.security.rights.authorization import Grant
from mapping.outcomes import ANSWERS, Outcome
from mapping.record import Record
from protocols.rest.errors import Fault, RestError, not_found, retry_after
from protocols.rest.responses import ErrorBody, Stored

NOT_THIS_KEY: Final = "with this key"
_STATUS_BUSY: Final = ANSWERS[Outcome.BUSY].http


class Results(Owner):
    """The results of a request's records. It is the records' owner; their tokens are their indexes in the request."""

    __slots__ = ("_left", "failed", "principal", "results")
    protocol = "http"

    def __init__(self, count: int, principal: str) -> None:
        self.principal = principal  # the client's; see `Publisher.submit`
        self.results: list[Stored | ErrorBody] = [_PENDING] * count  # by index
        self.failed = 0  # records that were not stored
        self._left = count

    def complete(self) -> None:
        """Called when every record has its result."""
        raise NotImplementedError

    def settle(self, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        """Note an outcome that is the same for several records (`contracts.Owner`)."""
        results = self.results
        if result.outcome is Outcome.STORED:
            partition = result.partition
            for index, offset in zip(tokens, offsets, strict=True):
                results[index] = Stored(partition, offset)
        else:
            error = failure_of(result)
            for index in tokens:
                results[index] = error
            self.failed += len(tokens)
        self._settled(len(tokens))

    def stored_before(self, index: int, stored: Stored) -> None:
        """Note a record that an earlier attempt has stored."""
        self.results[index] = stored
        self._settled(1)

    def refuse(self, index: int, error: ErrorBody) -> None:
        """Note a record that is not submitted."""
        self.results[index] = error
        self.failed += 1
        self._settled(1)

    def _settled(self, count: int) -> None:
        self._left -= count
        assert self._left >= 0
        if not self._left:
            self.complete()


class Ticket(Results):
    """One request that waits for Kafka."""

    __slots__ = ("done",)

    def __init__(self, count: int, principal: str) -> None:
        super().__init__(count, principal)
        # done when every record has its result
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def complete(self) -> None:
        """All records have a result: let the request go on."""
        if not self.done.done():  # it is cancelled if the client has disconnected
            self.done.set_result(None)

    def broken(self, error: Exception, _tokens: Sequence[Any]) -> None:
        """Fail the request after a bug in `settle` (`contracts.Owner`)."""
        if not self.done.done():
            self.done.set_exception(error)


_PENDING: Final = ErrorBody(_STATUS_BUSY, "pending")


def failure_of(result: Result) -> ErrorBody:
    """Return the error of records that were not stored."""
    return ErrorBody(ANSWERS[result.outcome].http, result.reason or result.outcome.value)


def error_of(failure: ErrorBody) -> RestError:
    """Return the error of a request all of whose records have this one."""
    return RestError(failure.error_code, failure.message, headers=retry_after(failure.error_code))


def common_failure(ticket: Results) -> ErrorBody | None:
    """Return what `error_of` needs for the request's error if all records failed with the same status, else None."""
    first = ticket.results[0]
    if ticket.failed < len(ticket.results) or not isinstance(first, ErrorBody):
        return None
    status = first.error_code
    if any(isinstance(result, ErrorBody) and result.error_code != status for result in ticket.results):
        return None
    return first


def raise_common_failure(ticket: Results) -> None:
    """Raise `common_failure` if there is one."""
    failure = common_failure(ticket)
    if failure is not None:
        raise error_of(failure)


def submit_allowed(
    publisher: Publisher,
    grant: Grant,
    records: list[Record],
    ticket: Results,
    *,
    tokens: Iterable[int] | None = None,
    sender: RememberedSender | None = None,
) -> None:
    """Submit the records, all of one topic, that the client may write; refuse the others.

    `tokens` are the records' indexes in the request, by default 0, 1 and so on. Records of the same `sender` keep their
    order; by default the order is kept within this request.
    """
    topic = records[0].topic
    places = list(range(len(records)) if tokens is None else tokens)
    if len(records) > 1:
        sender = sender or RememberedSender()
        if grant.publish.uniform(topic):
            publisher.submit_run(records, ticket, places, sender)
            return
    for token, record in zip(places, records, strict=True):
        if grant.publish(topic, record.key):
            publisher.submit(record, ticket, token, sender)
        else:
            denied = denied_key(grant, topic)
            ticket.refuse(token, ErrorBody(denied.status, denied.message))


async def store(publisher: Publisher, grant: Grant, records: list[Record]) -> Ticket:
    """Store the records of a request, all of one topic, and return their results."""
    ticket = Ticket(len(records), grant.identity.name)
    submit_allowed(publisher, grant, records, ticket)
    del records  # from here on only the publisher, which counts them in its budget, may hold them
    await ticket.done
    return ticket


async def check_place(publisher: Publisher, topic: str, partition: int | None, principal: str) -> None:
    """Refuse an unknown topic or partition, where no record's result reports it."""
    info = await publisher.topic(topic, principal=principal, partition=partition)
    if partition is not None and partition >= info.partitions:
        raise not_found(f"Topic {topic} has no partition {partition}", Fault.PARTITION)


def denied_key(grant: Grant, topic: str) -> RestError:
    """Return the error of a record whose key the client may not write, and write it to the audit trail."""
    audit.denied(Where("http"), grant.identity.name, "publish", topic, NOT_THIS_KEY)
    return forbidden(f"publish to {grant.names.own(topic)} {NOT_THIS_KEY}")
