"""What the protocols' sessions and the Kafka clients promise each other: tickets in, subscribers out.

Into Kafka: a session submits a record with itself as the owner and a token of its choice. The pair is the ticket:
it is settled exactly once, after Kafka answered, together with all other tickets of that owner in the same batch.
No future and no task exists per record.

Out of Kafka: a reader offers records to subscribers, which take them or say that they have no capacity.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import msgspec

from mapping.outcomes import Outcome
from mapping.record import Received


class Result(msgspec.Struct, frozen=True, gc=False):
    """What became of a batch's share of one owner."""

    outcome: Outcome  # the same for all tokens of the call
    partition: int = -1  # where they were stored; -1 when they were not
    reason: str = ""  # one line for the client; empty when stored
    crowded: bool = False  # more waits for the partition than keeps Kafka busy


class Owner(Protocol):
    """Whoever submits records and answers for them."""

    def settle(self, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        """Learn the fate of `tokens`, in order of submission to one partition.

        Called once per owner and Kafka batch, from the event loop, never from inside `submit`. `offsets` stands
        beside `tokens` when stored and is empty otherwise. It must not raise and must not wait: queue the
        acknowledgements, write them once.

        An owner that has a client to answer to has a method `broken(error)`, too: it is called when this has raised,
        and ends what the client would wait in for ever.
        """


class Refused(Exception):  # noqa: N818 - an answer, not an error of anybody
    """A topic or group cannot be used now; carries what to tell the client."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason


class Subscriber(Protocol):
    """A place for records on their way to one client: an MQTT session, an AMQP link, an HTTP consumer.

    One that knows why it has no capacity has a method `lacks`, too: reason and subject for `gateway.pauses`; None where
    another tells of it.
    """

    def offer_nowait(self, record: Received, context: Any = None) -> bool:
        """Take the record (True; also when it is not wanted, expired or denied) or say "no capacity" (False).

        `context` is what `Fanout.select` gave beside the subscriber; None for a record that is caught up on, or a
        group's.

        After False the reader keeps the record's position and offers it again when `resume` was called on the
        handle that the reader gave at subscription.
        """

    @property
    def demand(self) -> int:
        """How many more records would be taken now; 0 when there is no capacity: as False of `offer_nowait`."""

    @property
    def lossy(self) -> bool:
        """False: what it has no capacity for now comes later."""


class RunSubscriber(Subscriber, Protocol):
    """A subscriber of a group that takes several records at once."""

    def offer_run(self, records: Sequence[Received], context: Any = None) -> int:
        """As `offer_nowait` of one after the other, up to the first for which there is no capacity: how many before.

        They were given to nobody before, and no condition is asked. None of them is given back from within.
        """


class LossySubscriber(Protocol):
    """A subscriber that is at the end of the log or misses something; it takes several records at once."""

    @property
    def lossy(self) -> bool:
        """True: what it has no capacity for is dropped (MQTT QoS 0), which is counted, and not sent later."""

    def offer_run(self, records: Sequence[Received], context: Any) -> int:
        """As `offer_nowait` of one after the other, up to the first for which there is no capacity: how many before.

        `context` is what `Fanout.select_run` gave for all of them.
        """


class Fanout(Protocol):
    """Chooses, for one record at the end of the log, who might want it (the MQTT subscription trie is one).

    One that keeps offsets has a method `made_anew(topic)`, too: the topic was deleted and made again, they are void.

    One that chooses the same for many has a method `select_run(records, at)`, too: what `select` gives for the record
    at a place, and for how many records from there on that is the same, one at least.
    """

    def select(self, record: Received) -> Collection[tuple[Subscriber | LossySubscriber, Any]]:
        """The candidates, each with the context that its `offer_nowait` is to be given, where it still decides."""
