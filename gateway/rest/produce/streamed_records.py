"""Records that are stored while their request is still being sent, each with a report in its turn.

An upload is the owner of its records: no future and no task exists for one of them. Kafka's answers come by batches and
from several partitions; the reports leave in the order of the records, as far as the first whose fate is not known.

Reading stops while Kafka is slow (the budgets of the process, of the topic and of this upload), and while the client
does not read its reports: then it is not sent more, and what is kept for it stays small.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from aiohttp import web

from gateway.kafka.contracts import Result
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.publish.sender_partitions import Sender
from mapping.outcomes import ANSWERS, Outcome
from mapping.record import Record
from protocols.rest.responses import ErrorBody, encode

WINDOW: Final = 32_768
"""Records that are submitted, or reported and not yet written to the client."""
RECHECK_S: Final = 1.0
"""A topic that was made anew has a new budget: whoever waits for the old one looks again after this time."""


class Upload:
    """One request whose records are stored and reported while it is sent.

    A subclass writes the reports of another dialect: `stored`, `failed` and `ended`.
    """

    def __init__(self, publisher: Publisher, topic: str) -> None:
        """For records of `topic`; `close` must be called in the end."""
        # bytes and records in flight of this upload; see `Publisher.submit`
        self.budget = publisher.budgets.connection()
        self.taken = 0  # records so far, those that were refused included
        self.failures = 0  # of them, how many were not stored
        self._publisher = publisher
        self._topic = topic
        self._sender = Sender(lasting=True)
        self._first = 0  # the record that the next report is for
        self._written = 0  # reports that the client's socket has taken
        self._reports: list[bytes | None] = []  # from `_first` on; None: not known yet
        self._ready: list[bytes] = []  # reports that may leave
        self._moved = asyncio.Event()  # something that `wait_for_capacity` waits for may have changed
        self._wake = asyncio.Event()  # there may be something to write
        self._over = False
        self._gates = [publisher.gate, publisher.budgets.topic(topic).gate, self.budget.gate]
        for gate in self._gates:
            gate.subscribe(self._turned)

    # Reports, which a dialect overrides

    def stored(self, tokens: Sequence[int], partition: int, offsets: Sequence[int]) -> list[bytes]:
        """Reports of records that every in-sync replica has, `tokens` being their indexes in the upload."""
        return [b'{"partition":%d,"offset":%d}\n' % (partition, offset) for offset in offsets]

    def failed(self, token: int, status: int, message: str, errors: Sequence[str] = ()) -> bytes:
        """The report of a record that was not stored."""
        return encode(ErrorBody(status, message, tuple(errors))) + b"\n"

    def ended(self, status: int, message: str) -> bytes:
        """What stands behind the last report of an upload that cannot go on; it is for no record."""
        return encode(_Ended(status, message)) + b"\n"

    # Records in

    def submit(self, records: Sequence[Record]) -> None:
        """Records on their way to Kafka; their fate is reported."""
        submit, sender = self._publisher.submit, self._sender
        token = self.taken
        self._reports += [None] * len(records)
        for record in records:
            submit(record, self, token, sender)
            token += 1
        self.taken = token

    def refuse(self, status: int, message: str, errors: Sequence[str] = ()) -> None:
        """The next record is none, or not allowed."""
        self._reports.append(self.failed(self.taken, status, message, errors))
        self.taken += 1
        self.failures += 1
        self._advance()

    def settle(self, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        """Report the outcome that records share (`contracts.Owner`)."""
        reports, first = self._reports, self._first
        if result.outcome is Outcome.STORED:
            made = self.stored(tokens, result.partition, offsets)
        else:
            self.failures += len(tokens)
            status, reason = ANSWERS[result.outcome].http, result.reason or result.outcome.value
            made = [self.failed(token, status, reason) for token in tokens]
        if tokens[-1] - tokens[0] == len(tokens) - 1:  # neighbours, as they are with one partition
            reports[tokens[0] - first : tokens[-1] - first + 1] = made
        else:
            for token, report in zip(tokens, made, strict=True):
                reports[token - first] = report
        self._advance()

    async def wait_for_capacity(self) -> None:
        """Wait until more may be read from the client."""
        while not self._has_capacity():
            self._moved.clear()
            try:
                async with asyncio.timeout(RECHECK_S):
                    await self._moved.wait()
            except TimeoutError:
                pass  # looked at again

    def _has_capacity(self) -> bool:
        publisher = self._publisher
        return (
            self.taken - self._written < WINDOW
            and self.budget.gate.is_open
            and publisher.gate.is_open
            and publisher.budgets.topic(self._topic).gate.is_open
        )

    # Reports out

    def finish(self) -> None:
        """No more records come; `write` ends when the last one is reported."""
        self._over = True
        self._wake.set()

    async def write(self, answer: web.StreamResponse, stall_s: float) -> None:
        """Write reports as they come, until the last one after `finish`.

        Raises:
            ConnectionError: the client is gone, or takes no reports for `stall_s` seconds.
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
                self._written += len(reports)
                self._moved.set()
            if self._over and not self._ready and self._first == self.taken:
                return

    def close(self) -> None:
        """Stop waiting for gates; outcomes of records in flight are dropped."""
        self._sender.leave()
        for gate in self._gates:
            gate.unsubscribe(self._turned)
        self._gates.clear()

    def _advance(self) -> None:
        """Move the reports before the first unknown one to those that may leave."""
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

    def _turned(self, _is_open: bool) -> None:
        self._moved.set()


class _Ended(msgspec.Struct, frozen=True):
    """The last line of an upload that was not taken to its end."""

    error_code: int
    message: str
    ended: bool = True
