"""Dead letters: records that their receivers reject, or fail on too often, go to another topic and are done with then.

A record is settled in its group only when every in-sync replica has its dead letter; until then it is held, and when it
cannot be stored it goes back to the group. Off when no topic is configured: then a rejected record is done with, and
one that fails is offered again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import structlog

from gateway.amqp.counters import Counts
from gateway.kafka.contracts import Result
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.publish.sender_partitions import Sender
from mapping.dead_letters import Cause, dead_letter, dead_letter_topic
from mapping.outcomes import Outcome
from mapping.record import Received
from mapping.tenants import Names

log = structlog.get_logger(__name__)


Told = Callable[[Received, bool], None]
"""Told the fate of a record's dead letter: whether it is stored."""
Token = tuple[Told, Received, str]


class DeadLetters:
    """All dead letters of the process; the publisher's `Owner` of them."""

    def __init__(self, publisher: Publisher, template: str | None, max_attempts: int, counts: Counts) -> None:
        """`template`: the topic's name, in which `{topic}` stands for the record's own; None: no dead letters."""
        self.max_attempts = max_attempts  # how often a record may fail
        self._counts = counts
        self._submit = publisher.submit
        self._sender = Sender(lasting=True)  # one for all: they are few, and then they lie as they were rejected
        self._template = template
        self._troubled: set[str] = set()  # topics that did not take the last one; logged once

    def take(self, record: Received, cause: Cause, told: Told, names: Names) -> bool:
        """Store a record's dead letter, below its receivers' prefix; `told` learns its fate.

        `names` are the receivers'.

        Returns:
            False when it cannot have one: there is no topic for it.
        """
        shown = names.shown(record)
        own = dead_letter_topic(self._template, shown) if self._template is not None else None
        if own is None:
            return False
        topic = names.topic(own)
        cause = msgspec.structs.replace(cause, group=names.own(cause.group))
        self._submit(dead_letter(shown, topic, cause), self, (told, record, topic), self._sender)
        return True

    def settle(self, tokens: Sequence[Token], offsets: Sequence[int], result: Result) -> None:
        """Kafka's answer; see `gateway.kafka.contracts.Owner`."""
        stored = result.outcome is Outcome.STORED
        for told, record, topic in tokens:
            if stored:
                self._counts.dead_letters += 1
                self._troubled.discard(topic)
            else:
                self._counts.dead_letters_failed += 1
                if topic not in self._troubled:
                    self._troubled.add(topic)
                    log.warning("a dead letter could not be stored", topic=topic, origin=record.topic,
                                outcome=result.outcome.value, reason=result.reason)  # fmt: skip
            told(record, stored)
