"""What Kafka's errors mean for a batch and for the records in it: one table.

Together with `topics` (which asks about names) the only place that knows Kafka's errors.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

from aiokafka import errors

from mapping.outcomes import Outcome


class Remedy(enum.Enum):
    """What to do with a batch that was not stored."""

    RESEND = "resend"  # the same records in the same order, through another producer, until their time is up
    SPLIT = "split"  # one record is to blame: find it by halving; it alone gets the outcome
    GIVE_UP = "give up"  # all of it gets the outcome


class Verdict(NamedTuple):
    """A remedy, and the outcome for the records that it cannot help."""

    remedy: Remedy
    outcome: Outcome


VERDICTS: Final[dict[type[Exception], Verdict]] = {
    # The batch is refused because of a record in it.
    errors.MessageSizeTooLargeError: Verdict(Remedy.SPLIT, Outcome.TOO_LARGE),
    errors.RecordListTooLargeError: Verdict(Remedy.SPLIT, Outcome.TOO_LARGE),
    errors.InvalidTimestampError: Verdict(Remedy.SPLIT, Outcome.UNFIT),
    errors.PolicyViolationError: Verdict(Remedy.SPLIT, Outcome.UNFIT),
    errors.CorruptRecordException: Verdict(Remedy.SPLIT, Outcome.BROKEN),
    # Also every code that aiokafka has no name for, such as INVALID_RECORD (87).
    errors.UnknownError: Verdict(Remedy.SPLIT, Outcome.BROKEN),
    # The topic is refused.
    errors.TopicAuthorizationFailedError: Verdict(Remedy.GIVE_UP, Outcome.DENIED),
    errors.ClusterAuthorizationFailedError: Verdict(Remedy.GIVE_UP, Outcome.DENIED),
    errors.InvalidTopicError: Verdict(Remedy.GIVE_UP, Outcome.UNKNOWN_TOPIC),
    errors.UnsupportedForMessageFormatError: Verdict(Remedy.GIVE_UP, Outcome.BROKEN),
    errors.InvalidRequiredAcksError: Verdict(Remedy.GIVE_UP, Outcome.BROKEN),
    errors.UnsupportedVersionError: Verdict(Remedy.GIVE_UP, Outcome.BROKEN),
    errors.IncompatibleBrokerVersion: Verdict(Remedy.GIVE_UP, Outcome.BROKEN),
}
"""Everything else is a fault of the way, not of the records: the producer lost its place in the sequence
(OutOfOrderSequenceNumber, InvalidProducerEpoch, ProducerFenced, UnknownProducerId), the partition had no leader for
too long (NotLeaderForPartition, LeaderNotAvailable), the sender died. aiokafka itself retries what it calls
retriable, under the same sequence numbers, for as long as it takes."""

_OTHERWISE: Final = Verdict(Remedy.RESEND, Outcome.BUSY)


def verdict(error: errors.KafkaError) -> Verdict:
    """What to do about `error`."""
    return VERDICTS.get(type(error), _OTHERWISE)


def name_of(error: errors.KafkaError) -> str:
    """One word for a client and the log, without the addresses that Kafka's texts may carry."""
    return str(getattr(error, "message", None) or type(error).__name__)
