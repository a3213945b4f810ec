"""The delivery state for a record's outcome, and the error for a refused topic; the table is `mapping.outcomes`."""

from __future__ import annotations

from typing import Final

from gateway.kafka.contracts import Refused
from mapping.outcomes import ANSWERS, AmqpAnswer, Outcome
from protocols.amqp.links import Link
from protocols.amqp.outcomes import (
    INTERNAL_ERROR,
    STATE_ACCEPTED,
    STATE_FAILED,
    STATE_RELEASED,
    DeliveryState,
    Error,
    rejected,
)

MODIFIED_OUTCOME: Final = "amqp:modified:list"


def delivery_state(link: Link, outcome: Outcome, reason: str) -> DeliveryState:
    """Return the delivery state that settles one of the peer's deliveries.

    A transient error is never `rejected`, because clients move rejected messages to a dead-letter queue. A source that
    does not list `modified` gets `released` (part 3.5.3: only listed outcomes may be used).
    """
    answer = ANSWERS[outcome]
    if answer.amqp is AmqpAnswer.ACCEPTED:
        return STATE_ACCEPTED
    if answer.amqp is AmqpAnswer.MODIFIED:
        listed = link.source.outcomes
        return STATE_FAILED if not listed or MODIFIED_OUTCOME in listed else STATE_RELEASED
    return rejected(answer.condition or INTERNAL_ERROR, reason)


def refusal(refused: Refused) -> Error:
    """Return the error for a refused link; without a condition of its own, it asks the client to try again."""
    condition = ANSWERS[refused.outcome].condition
    if condition is None:
        return Error(INTERNAL_ERROR, f"{refused.reason}; try again later")
    return Error(condition, refused.reason)
