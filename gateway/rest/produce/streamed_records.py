"""Stores records while their request is being sent, and reports each of them in order.

An upload is the owner of its records: there is no future and no task for a single record. Kafka answers by batches and
from several partitions; reports are sent in the order of the records, up to the first that is not settled.

Reading from the client stops while Kafka is slow (the budgets of the process, the topic and the upload) and while the
client does not read its reports, so the memory of an upload is bounded.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
from aiohttp import web

from flowcontrol.budget import ConnectionBudget
from gateway.kafka.contracts import Owner, Result
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.publish.sender_partitions import RememberedSender
from gateway.rest.produce.tickets import failure_of
from mapping.outcomes import Outcome
from mapping.record import Record
from protocols.rest.errors import RestError
from protocols.rest.responses import ErrorBody, encode

WINDOW: Final = 32_768
"""Records of an upload that are submitted but whose reports are not written to the client yet."""
RECHECK_S: Final = 1.0
"""Seconds after which a waiting upload checks again: a topic that was re-created has a new budget."""


class Upload(Owner, abc.ABC):
    """One request whose records are stored and reported while it is sent.

    A subclass splits the body. It also makes the reports of another dialect: `stored`, `failed` and `ended`.
    """

    protocol = "http"

    def __init__(self, publisher: Publisher, topic: str, most_refused: int) -> None:
        """Publish to `topic`; the caller must call `close` at the end. Break off at `most_refused` bad records, if any.

        With 0 there is no limit.
        """
        # bytes and records in flight of this upload; see `Publisher.submit`
        self.budget: ConnectionBudget = publisher.budgets.connection()
        self.taken = 0  # records so far, including refused ones
        self.failures = 0  # records that were not stored
        self._most_refused = most_refused
        self._refused = 0  # records that were not even sent to Kafka
        self._publisher = publisher
        self.topic = topic
        self._sender = RememberedSender(lasting=True)
        self._first = 0  # the record that the next report is for
        self.reported = 0  # reports that were written to the client's socket
        self._reports: list[bytes | None] = []  # from `_first` on; None: not settled yet
        self._ready: list[bytes] = []  # reports that may be written
        self._capacity_changed = asyncio.Event()  # wakes `wait_for_capacity` to check again
        self._wake = asyncio.Event()  # wakes `write`
        self._finished = False
        self._gates = [publisher.gate, publisher.budgets.topic(topic).gate, self.budget.gate]
        for gate in self._gates:
            gate.subscribe(self._gate_changed)

    @abc.abstractmethod
    def feed(self, part: bytes | None) -> Iterator[None]:
        """`take` the records in the next part of the body, or at its end (None), in short steps.

        Raises:
            RestError: The rest of the body cannot be used.
        """

    # Reports; a dialect overrides these methods

    def stored(self, tokens: Sequence[int], partition: int, offsets: Sequence[int]) -> list[bytes]:
        """Return the reports of stored records; `tokens` are their indexes in the upload."""
        return [b'{"partition":%d,"offset":%d}\n' % (partition, offset) for offset in offsets]

    def failed(self, token: int, status: int, message: str, errors: Sequence[str] = ()) -> bytes:
        """Return the report of a record that was not stored."""
        return encode(ErrorBody(status, message, tuple(errors))) + b"\n"

    def ended(self, status: int, message: str) -> bytes:
        """Return the final report of an upload that is broken off; it is not about a record."""
        return encode(_Ended(status, message)) + b"\n"

    # Records in

    def take(self, parsed: Iterable[Record | ErrorBody]) -> None:
        """Publish the next records and report their outcomes; an error is the report of one that is refused.

        Raises:
            RestError: Too many were refused. Those after the last of these are not published.
        """
        records: list[Record] = []
        tokens: list[int] = []
        for record in parsed:
            if isinstance(record, Record):
                records.append(record)
                tokens.append(self.taken)
                self._reports.append(None)
            else:
                self._reports.append(
                    self.failed(self.taken, record.error_code, record.message, record.validation_errors)
                )
                self.failures += 1
                self._refused += 1
            self.taken += 1
            if self._refused == self._most_refused > 0:
                break
        self._publisher.submit_run(records, self, tokens, self._sender)
        self._advance()
        if self._refused == self._most_refused > 0:
            raise RestError(400, f"{self._refused} records were refused: the rest of the upload is not read")

    def settle(self, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        """Report an outcome that is the same for several records (`contracts.Owner`)."""
        reports, first = self._reports, self._first
        if result.outcome is Outcome.STORED:
            made = self.stored(tokens, result.partition, offsets)
        else:
            self.failures += len(tokens)
            failure = failure_of(result)
            made = [self.failed(token, failure.error_code, failure.message) for token in tokens]
        if tokens[-1] - tokens[0] == len(tokens) - 1:  # consecutive, as with a single partition
            reports[tokens[0] - first : tokens[-1] - first + 1] = made
        else:
            for token, report in zip(tokens, made, strict=True):
                reports[token - first] = report
        self._advance()

    async def wait_for_capacity(self) -> None:
        """Wait until more may be read from the client."""
        while not self._has_capacity():
            self._capacity_changed.clear()
            try:
                async with asyncio.timeout(RECHECK_S):
                    await self._capacity_changed.wait()
            except TimeoutError:
                pass  # check again

    def _has_capacity(self) -> bool:
        publisher = self._publisher
        return (
            self.taken - self.reported < WINDOW
            and self.budget.gate.is_open
            and publisher.gate.is_open
            and publisher.budgets.topic(self.topic).gate.is_open
        )

    # Reports out

    def finish(self) -> None:
        """Note that no more records come; `write` returns when the last one is reported."""
        self._finished = True
        self._wake.set()

    async def write(self, answer: web.StreamResponse, stall_s: float) -> None:
        """Write reports as they become ready, until the last one after `finish`.

        Raises:
            ConnectionError: The client has disconnected, or reads no reports for `stall_s` seconds.
        """
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._ready:
                reports, self._ready = self._ready, []
                try:
                    async with asyncio.timeout(stall_s):
                        await answer.write(b"".join(reports))
                except TimeoutError as error:
                    raise ConnectionError("the client does not read its reports") from error
                self.reported += len(reports)
                self._capacity_changed.set()
            if self._finished and not self._ready and self._first == self.taken:
                return

    def close(self) -> None:
        """Unsubscribe from the gates; outcomes of in-flight records are ignored."""
        self._sender.leave()
        for gate in self._gates:
            gate.unsubscribe(self._gate_changed)
        self._gates.clear()

    def _advance(self) -> None:
        """Make the reports before the first unsettled record ready to be written."""
        reports = self._reports
        try:
            known = reports.index(None)
        except ValueError:
            known = len(reports)
        if known:
            self._ready += reports[:known]  # type: ignore[arg-type]  # none of them is None
            del reports[:known]
            self._first += known
            self._wake.set()

    def _gate_changed(self, _is_open: bool) -> None:
        self._capacity_changed.set()


class _Ended(msgspec.Struct, frozen=True):
    """The last line of the answer to an upload that was broken off."""

    error_code: int
    message: str
    ended: bool = True
