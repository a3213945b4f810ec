"""Translates Kafka's errors for subscribers and members of groups."""

from __future__ import annotations

from typing import Final

from aiokafka import errors

from gateway.kafka.cluster.error_verdicts import DENIALS
from gateway.kafka.contracts import Refused
from mapping.outcomes import Outcome

_REFUSALS: Final[tuple[tuple[type[errors.KafkaError], Outcome], ...]] = (
    (errors.GroupAuthorizationFailedError, Outcome.DENIED),
    (errors.TopicAuthorizationFailedError, Outcome.DENIED),
    (errors.UnknownTopicOrPartitionError, Outcome.UNKNOWN_TOPIC),
    (errors.InvalidGroupIdError, Outcome.UNFIT),
    (errors.InconsistentGroupProtocolError, Outcome.BROKEN),  # its members do not support "range"
)


def not_joined(group: str, error: errors.KafkaError) -> Refused:
    """Return the refusal for a subscriber that cannot join."""
    outcome = next((outcome for kind, outcome in _REFUSALS if isinstance(error, kind)), Outcome.BUSY)
    return Refused(outcome, f"group {group!r} cannot be joined: {error!r}")


def not_read(error: errors.KafkaError) -> Refused:
    """Return the refusal for a client's own member that cannot read or commit."""
    name = type(error).__name__
    if isinstance(error, DENIALS):
        return Refused(Outcome.DENIED, f"Kafka denies access ({name})")
    if isinstance(error, errors.OffsetOutOfRangeError | errors.NoOffsetForPartitionError):
        return Refused(Outcome.UNFIT, f"There is no position to read from ({name}); seek to one")
    if isinstance(error, errors.OffsetMetadataTooLargeError):
        return Refused(Outcome.UNFIT, "The metadata of an offset is longer than Kafka accepts")
    if isinstance(error, errors.CommitFailedError):
        return Refused(Outcome.BUSY, "The group has rebalanced; poll again")
    return Refused(Outcome.BUSY, f"Kafka does not answer ({name})")
