"""Dead letters: records that receivers reject, or fail on too often, are stored in another topic.

A record is settled in its group only when every in-sync replica has its dead letter; if that cannot be stored, the
record returns to the group. Without a configured topic a rejected record is dropped, and a record that fails is offered
again without limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import structlog

from gateway.amqp.counters import Counts
from gateway.kafka.contracts import Owner, Result
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.publish.sender_partitions import RememberedSender
from mapping.dead_letters import Cause, dead_letter, dead_letter_topic
from mapping.outcomes import Outcome
from mapping.record import Received
from mapping.tenants import Names

log = structlog.get_logger(__name__)


OnResult = Callable[[Received, bool], None]
"""Called with a record and whether its dead letter was stored."""
Token = tuple[OnResult, Received, str]


class DeadLetters(Owner):
    """Stores all dead letters of the process, as their `Owner` for the publisher."""

    def __init__(self, publisher: Publisher, template: str | None, max_attempts: int, counts: Counts) -> None:
        """`template` is the dead-letter topic, with `{topic}` for the record's own. None means no dead letters."""
        self.max_attempts = max_attempts  # how often a record may fail
        self._counts = counts
        self._submit = publisher.submit
        self._sender = RememberedSender(lasting=True)  # one for all, which keeps the order: dead letters are few
        self._template = template
        self._failing_topics: set[str] = set()  # topics whose last dead letter could not be stored; logged once

    def store(self, record: Received, cause: Cause, on_result: OnResult, names: Names) -> bool:
        """Store a record's dead letter in a topic of its receivers' tenant (`names`), then call `on_result`.

        Returns:
            False when there is no dead-letter topic for it.
        """
        shown = names.shown(record)
        own = dead_letter_topic(self._template, shown) if self._template is not None else None
        if own is None:
            return False
        topic = names.topic(own)
        cause = msgspec.structs.replace(cause, group=names.own(cause.group))
        self._submit(dead_letter(shown, topic, cause), self, (on_result, record, topic), self._sender)
        return True

    def settle(self, tokens: Sequence[Token], offsets: Sequence[int], result: Result) -> None:
        """Report Kafka's answer; see `gateway.kafka.contracts.Owner`."""
        stored = result.outcome is Outcome.STORED
        for on_result, record, topic in tokens:
            if stored:
                self._counts.dead_letters += 1
                self._failing_topics.discard(topic)
            else:
                self._counts.dead_letters_failed += 1
                if topic not in self._failing_topics:
                    self._failing_topics.add(topic)
                    log.warning("a dead letter could not be stored", topic=topic, origin=record.topic,
                                outcome=result.outcome.value, reason=result.reason)  # fmt: skip
            on_result(record, stored)
