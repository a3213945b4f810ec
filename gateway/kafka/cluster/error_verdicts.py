"""What Kafka's errors mean: one table of produce errors for a batch and the records in it, and denied requests."""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

from aiokafka import errors

from mapping.outcomes import Outcome


class Remedy(enum.Enum):
    """What to do with a batch that was not stored."""

    RESEND = "resend"  # send the same records in the same order through another producer, until they time out
    SPLIT = "split"  # one record is the cause: halve the batch until it is found; only it gets the outcome
    GIVE_UP = "give up"  # the whole batch gets the outcome


class Verdict(NamedTuple):
    """A remedy, and the outcome for records that it does not save."""

    remedy: Remedy
    outcome: Outcome


VERDICTS: Final[dict[type[Exception], Verdict]] = {
    # Refused because of a record in the batch.
    errors.MessageSizeTooLargeError: Verdict(Remedy.SPLIT, Outcome.TOO_LARGE),
    errors.RecordListTooLargeError: Verdict(Remedy.SPLIT, Outcome.TOO_LARGE),
    errors.InvalidTimestampError: Verdict(Remedy.SPLIT, Outcome.UNFIT),
    errors.PolicyViolationError: Verdict(Remedy.SPLIT, Outcome.UNFIT),
    errors.CorruptRecordException: Verdict(Remedy.SPLIT, Outcome.BROKEN),
    # Also every code that aiokafka has no name for, such as INVALID_RECORD (87).
    errors.UnknownError: Verdict(Remedy.SPLIT, Outcome.BROKEN),
    # Refused because of the topic or the request.
    errors.TopicAuthorizationFailedError: Verdict(Remedy.GIVE_UP, Outcome.DENIED),
    errors.ClusterAuthorizationFailedError: Verdict(Remedy.GIVE_UP, Outcome.DENIED),
    errors.InvalidTopicError: Verdict(Remedy.GIVE_UP, Outcome.UNKNOWN_TOPIC),
    errors.UnsupportedForMessageFormatError: Verdict(Remedy.GIVE_UP, Outcome.BROKEN),
    errors.InvalidRequiredAcksError: Verdict(Remedy.GIVE_UP, Outcome.BROKEN),
    errors.UnsupportedVersionError: Verdict(Remedy.GIVE_UP, Outcome.BROKEN),
    errors.IncompatibleBrokerVersion: Verdict(Remedy.GIVE_UP, Outcome.BROKEN),
}
"""All other errors are not caused by the records: the producer lost its sequence (OutOfOrderSequenceNumber,
InvalidProducerEpoch, ProducerFenced, UnknownProducerId), the partition had no leader for too long
(NotLeaderForPartition, LeaderNotAvailable), or the sender has ended. aiokafka itself retries retriable errors under
the same sequence numbers, without limit."""

_OTHERWISE: Final = Verdict(Remedy.RESEND, Outcome.BUSY)


DENIALS: Final = (
    errors.ClusterAuthorizationFailedError,
    errors.GroupAuthorizationFailedError,
    errors.TopicAuthorizationFailedError,
)
"""Answers to requests about groups and topics that Kafka's ACLs forbid."""


def verdict(error: errors.KafkaError) -> Verdict:
    """Return what to do about a batch that failed with `error`."""
    return VERDICTS.get(type(error), _OTHERWISE)


def name_of(error: errors.KafkaError) -> str:
    """Return the error's name for clients and the log, without the addresses that Kafka's texts may contain."""
    return str(getattr(error, "message", None) or type(error).__name__)
