"""The outcomes of a record, and each protocol's answer for them, in one table.

Only `gateway.kafka.publish.publisher` turns Kafka's errors into an `Outcome`; only this table turns an `Outcome` into a
reason code (MQTT 5.0 section 2.4), a delivery outcome (AMQP 1.0 part 3.4) or an HTTP status (RFC 9110 section 15).
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple


class Outcome(enum.Enum):
    """The outcome of one record."""

    __hash__ = object.__hash__  # Enum hashes the name, in Python, at each look-up

    STORED = "stored"  # every in-sync replica has it
    BUSY = "busy"  # transient, the client should retry: Kafka unreachable, a quota, a batch of unknown outcome
    UNFIT = "unfit"  # cannot be mapped or decoded
    TOO_LARGE = "too-large"
    MANY_HEADERS = "many-headers"  # more than `mapping.max_headers`
    DENIED = "denied"
    UNKNOWN_TOPIC = "unknown-topic"
    UNSAFE = "unsafe"  # the topic has too few replicas: an operator must change the topic, or the setting
    FULL = "full"  # a limit of topics is reached: a topic must be deleted first
    EXPIRED = "expired"  # it expired before it was stored
    BROKEN = "broken"  # a permanent Kafka error


class AmqpAnswer(enum.Enum):
    """The terminal state that settles an AMQP delivery (AMQP 1.0 part 3.4)."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    MODIFIED = "modified"  # delivery-failed; `released` when the source does not list modified


class Answer(NamedTuple):
    """The answer for one outcome in three protocols. `condition` is the AMQP error of a rejected delivery."""

    mqtt: int
    amqp: AmqpAnswer
    condition: str | None
    http: int


ANSWERS: Final[dict[Outcome, Answer]] = {
    Outcome.STORED: Answer(0x00, AmqpAnswer.ACCEPTED, None, 200),
    Outcome.BUSY: Answer(0x97, AmqpAnswer.MODIFIED, None, 503),
    Outcome.UNFIT: Answer(0x99, AmqpAnswer.REJECTED, "amqp:decode-error", 422),
    Outcome.TOO_LARGE: Answer(0x95, AmqpAnswer.REJECTED, "amqp:link:message-size-exceeded", 413),
    Outcome.MANY_HEADERS: Answer(0x97, AmqpAnswer.REJECTED, "amqp:resource-limit-exceeded", 422),
    Outcome.DENIED: Answer(0x87, AmqpAnswer.REJECTED, "amqp:unauthorized-access", 403),
    Outcome.UNKNOWN_TOPIC: Answer(0x90, AmqpAnswer.REJECTED, "amqp:not-found", 404),
    # 0x83: "the PUBLISH is valid but the receiver is not willing to accept it"; 503: it is the server's state.
    Outcome.UNSAFE: Answer(0x83, AmqpAnswer.REJECTED, "amqp:precondition-failed", 503),
    Outcome.FULL: Answer(0x97, AmqpAnswer.REJECTED, "amqp:resource-limit-exceeded", 429),
    Outcome.EXPIRED: Answer(0x00, AmqpAnswer.ACCEPTED, None, 200),
    Outcome.BROKEN: Answer(0x83, AmqpAnswer.REJECTED, "amqp:internal-error", 500),
}
