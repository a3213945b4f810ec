"""Interfaces between the protocols' sessions and the Kafka clients: tickets in, subscribers out.

Into Kafka: a session submits a record with itself as the owner and a token of its choice. This pair is the ticket. It
is settled exactly once, after Kafka has answered, together with all other tickets of that owner in the same batch.
There is no future and no task per record.

Out of Kafka: a reader offers records to subscribers, which accept them or report that they have no capacity.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec

from flowcontrol.budget import ConnectionBudget
from mapping.outcomes import Outcome
from mapping.record import Received

T = TypeVar("T")


class Result(msgspec.Struct, frozen=True, gc=False):
    """The result of one owner's records in a batch."""

    outcome: Outcome  # the same for all tokens of the call
    partition: int = -1  # where the records were stored; -1 when they were not
    reason: str = ""  # one line for the client; empty when stored
    crowded: bool = False  # more is queued for the partition than keeps Kafka busy


class Owner:
    """Submits records and handles their results."""

    __slots__ = ()

    protocol: ClassVar[str] = ""  # of the client that waits for the result: the time until then is counted; "": none
    budget: ConnectionBudget | None = None  # counts the client's records in flight; None: they are not counted
    principal: str | None = None  # the client's name, by which the topics that it creates are limited

    @property
    def acts_for(self) -> Owner | None:
        """The owner whose records are withdrawn together with these."""
        return self

    def settle(self, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        """Accept the result of the records with these tokens, in order of submission to one partition.

        Called once per owner and Kafka batch, from the event loop, never from inside `submit`. `offsets` has one offset
        per token when the records are stored, and is empty otherwise. `settle` must neither raise nor block: queue the
        acknowledgements and write them in one call.
        """
        raise NotImplementedError

    def broken(self, error: Exception, tokens: Sequence[Any]) -> None:
        """End what a client would otherwise wait for forever: `settle` has raised for these tokens."""


class Refused(Exception):  # noqa: N818 - an answer, not an error
    """A topic or group cannot be used now. Carries the outcome and the reason for the client."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason

    def bare(self) -> Refused:
        """Return the same refusal to be kept or raised elsewhere: an exception keeps its frames."""
        return Refused(self.outcome, self.reason)


async def in_time(work: Awaitable[T], limit_s: float) -> T:
    """Wait for Kafka while a client waits; raise Refused (BUSY) after `limit_s` seconds, so that it tries again."""
    try:
        async with asyncio.timeout(limit_s):
            return await work
    except TimeoutError:
        raise Refused(Outcome.BUSY, "Kafka does not answer") from None


class Subscriber(Protocol):
    """Receives the records for one client: an MQTT session, an AMQP link, an HTTP consumer."""

    __slots__ = ()

    def offer_nowait(self, record: Received, context: Any = None) -> bool:
        """Accept the record (True; also when it is unwanted, expired or denied) or report no capacity (False).

        `context` comes from `Fanout.select`. It is None for a record from the catch-up reader or from a group.

        After False the reader keeps the record's position. It offers the record again after `resume` was called on the
        handle that the reader returned at subscription.
        """

    @property
    def demand(self) -> int:
        """How many more records would be accepted now. 0 means no capacity, like False from `offer_nowait`."""

    @property
    def lossy(self) -> bool:
        """False: a record that finds no capacity is delivered later."""
        return False

    def pause_reason(self) -> tuple[str, str] | None:
        """Return why there is no capacity, and the subject, for `gateway.views.pauses`; None: others report it."""
        return None


class RunSubscriber(Subscriber, Protocol):
    """A subscriber of a group that accepts several records in one call."""

    def offer_run(self, records: Sequence[Received], context: Any = None) -> int:
        """Like calling `offer_nowait` for each record until one finds no capacity; return how many were accepted.

        None of the records has a failed attempt, and no condition is checked. The subscriber must not give any of them
        back during the call.
        """


class LossySubscriber(Protocol):
    """A subscriber at the end of the log that loses what it cannot accept. It accepts several records in one call."""

    @property
    def lossy(self) -> bool:
        """True: a record that finds no capacity is dropped (MQTT QoS 0) and counted, and not sent later."""

    def offer_run(self, records: Sequence[Received], context: Any) -> int:
        """Like calling `offer_nowait` for each record until one finds no capacity; return how many were accepted.

        `context` is what `Fanout.select` returned for all of them.
        """


class Fanout:
    """Selects the subscribers for the records at the end of the log (the MQTT subscription trie is one)."""

    __slots__ = ()

    def select(
        self, records: Sequence[Received], at: int
    ) -> tuple[Collection[tuple[Subscriber | LossySubscriber, Any]], int]:
        """Return the candidates for the record at `at`, and for how many records from there on, at least one.

        The records are of one partition. Each candidate comes with the context for its offer, which still decides.
        """
        raise NotImplementedError

    def topic_recreated(self, topic: str) -> None:
        """Drop the offsets of a topic, if any are kept: it was deleted and recreated."""
