"""AMQP's answer to what became of a record, and to a topic that is refused; the table is `mapping.outcomes`."""

from __future__ import annotations

from typing import Final

from gateway.kafka.contracts import Refused
from mapping.outcomes import ANSWERS, AmqpAnswer, Outcome
from protocols.amqp.links import Link
from protocols.amqp.outcomes import INTERNAL_ERROR, STATE_ACCEPTED, STATE_FAILED, STATE_RELEASED, Error, State, rejected

MODIFIED_OUTCOME: Final = "amqp:modified:list"


def delivery_state(link: Link, outcome: Outcome, reason: str) -> State:
    """The state that settles a delivery of the peer's.

    Transient trouble is never `rejected`: clients put that into a dead-letter queue. A source that does not list
    `modified` gets `released` (part 3.5.3: only outcomes that it lists may be chosen).
    """
    answer = ANSWERS[outcome]
    if answer.amqp is AmqpAnswer.ACCEPTED:
        return STATE_ACCEPTED
    if answer.amqp is AmqpAnswer.MODIFIED:
        listed = link.source.outcomes
        return STATE_FAILED if not listed or MODIFIED_OUTCOME in listed else STATE_RELEASED
    return rejected(answer.condition or INTERNAL_ERROR, reason)


def refusal(refused: Refused) -> Error:
    """Why a link is refused. Kafka's silence has no condition of its own in AMQP; the text says to come again."""
    condition = ANSWERS[refused.outcome].condition
    if condition is None:
        return Error(INTERNAL_ERROR, f"{refused.reason}; try again later")
    return Error(condition, refused.reason)
