"""Interfaces between the protocols' sessions and the Kafka clients: tickets in, subscribers out.

Into Kafka: a session submits a record with itself as the owner and a token of its choice. This pair is the ticket. It
is settled exactly once, after Kafka has answered, together with all other tickets of that owner in the same batch.
There is no future and no task per record.

Out of Kafka: a reader offers records to subscribers, which accept them or report that they have no capacity.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from mapping.outcomes import Outcome
from mapping.record import Received

T = TypeVar("T")


class Result(msgspec.Struct, frozen=True, gc=False):
    """The result of one owner's records in a batch."""

    outcome: Outcome  # the same for all tokens of the call
    partition: int = -1  # where the records were stored; -1 when they were not
    reason: str = ""  # one line for the client; empty when stored
    crowded: bool = False  # more is queued for the partition than keeps Kafka busy


class Owner(Protocol):
    """Submits records and handles their results."""

    def settle(self, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        """Accept the result of the records with these tokens, in order of submission to one partition.

        Called once per owner and Kafka batch, from the event loop, never from inside `submit`. `offsets` has one offset
        per token when the records are stored, and is empty otherwise. `settle` must neither raise nor block: queue the
        acknowledgements and write them in one call.

        An owner with a waiting client also has an attribute `protocol`, by which the time until then is counted, and a
        method `broken(error, tokens)`. It is called with the same tokens when `settle` has raised, and must end what
        the client would otherwise wait for forever.
        """


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
    """Receives the records for one client: an MQTT session, an AMQP link, an HTTP consumer.

    A subscriber that knows why it has no capacity also has a method `pause_reason`: it returns the reason and the
    subject for `gateway.views.pauses`, or None when the pause is reported elsewhere.
    """

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

        `context` is what `Fanout.select_run` returned for all of them.
        """


class Fanout(Protocol):
    """Selects the subscribers for each record at the end of the log (the MQTT subscription trie is one).

    A fan-out that keeps offsets also has a method `topic_recreated(topic)`: the topic was deleted and recreated, so its
    offsets are void.

    A fan-out that selects the same subscribers for many records also has a method `select_run(records, at)`. It returns
    what `select` returns for the record at index `at`, and for how many records from there on (at least one) that
    selection holds.
    """

    def select(self, record: Received) -> Collection[tuple[Subscriber | LossySubscriber, Any]]:
        """Return the candidates, each with the context for its `offer_nowait`, which still decides."""
