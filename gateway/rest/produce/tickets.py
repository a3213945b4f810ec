"""Requests that wait for Kafka: one owner and one future a request, never one a record."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from gateway.kafka.contracts import Result
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.publish.sender_partitions import Sender
from gateway.security.authorization import Grant
from mapping.outcomes import ANSWERS, Outcome
from mapping.record import Headers, Record
from mapping.rest import standard_headers
from protocols.rest.errors import RestError, retry_after
from protocols.rest.media import Format
from protocols.rest.responses import ErrorBody, Stored

PRINCIPALS: Final = 4096  # sets of standard headers that are kept ready
_STATUS_BUSY: Final = ANSWERS[Outcome.BUSY].http


class Ticket:
    """One request that waits for Kafka: the owner of its records, whose tokens are their places in the request."""

    __slots__ = ("_left", "done", "failed", "principal", "results")

    def __init__(self, count: int, done: asyncio.Future[None], principal: str) -> None:
        self.principal = principal
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

    def broken(self, error: Exception) -> None:
        """Our bug, in `settle`: the request fails."""
        if not self.done.done():
            self.done.set_exception(error)

    def found(self, index: int, stored: Stored) -> None:
        """A record that is there already."""
        self.results[index] = stored
        self._settled(1)

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


class StandardHeaders:
    """What every record of a client gets; made once for a format and principal."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: dict[tuple[Format, str], Headers] = {}

    def of(self, embedded: Format, principal: str) -> Headers:
        """The headers."""
        headers = self._made.get((embedded, principal))
        if headers is None:
            if len(self._made) >= PRINCIPALS:
                self._made.clear()
            headers = self._made[embedded, principal] = standard_headers(embedded, principal)
        return headers


def common_failure(ticket: Ticket) -> RestError | None:
    """The request's error, when every record failed with the same status."""
    first = ticket.results[0]
    if ticket.failed < len(ticket.results) or not isinstance(first, ErrorBody):
        return None
    status = first.error_code
    if any(isinstance(result, ErrorBody) and result.error_code != status for result in ticket.results):
        return None
    headers = retry_after(status)
    return RestError(status, first.message, headers=headers)


def raise_common_failure(ticket: Ticket) -> None:
    """Raise `common_failure`, where there is one."""
    failure = common_failure(ticket)
    if failure is not None:
        raise failure


def submit_allowed(
    publisher: Publisher,
    grant: Grant,
    records: Sequence[Record],
    ticket: Ticket,
    *,
    places: Sequence[int] | None = None,
    sender: Sender | None = None,
) -> None:
    """Submit the records that the client may write.

    Args:
        publisher: the way into Kafka.
        grant: the client's.
        records: of one topic; at least one.
        ticket: the request's.
        places: beside them, their tokens; None: 0, 1 and so on.
        sender: whose order they keep; None: that of this request alone.
    """
    topic = records[0].topic
    everything = grant.publish.uniform(topic)
    submit = publisher.submit
    sender = sender or Sender()
    for place, record in zip(range(len(records)) if places is None else places, records, strict=True):
        if everything or grant.publish(topic, record.key):
            submit(record, ticket, place, sender)
        else:
            ticket.refuse(place, ErrorBody(403, f"Not allowed: publish to {topic} with this key"))
