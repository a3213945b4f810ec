"""Translates Kafka's errors for subscribers and members of groups."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Final

from aiokafka import TopicPartition, errors

from gateway.kafka.cluster.error_verdicts import DENIALS
from gateway.kafka.contracts import Refused
from mapping.outcomes import Outcome

COMMIT_S: Final = 10.0
OTHER_ASSIGNOR: Final = "it has members that do not know Kafka's assignor 'range'"
_REFUSALS: Final[tuple[tuple[type[errors.KafkaError], Outcome], ...]] = (
    (errors.GroupAuthorizationFailedError, Outcome.DENIED),
    (errors.TopicAuthorizationFailedError, Outcome.DENIED),
    (errors.UnknownTopicOrPartitionError, Outcome.UNKNOWN_TOPIC),
    (errors.InvalidGroupIdError, Outcome.UNFIT),
    (errors.InconsistentGroupProtocolError, Outcome.BROKEN),
)


def not_joined(group: str, error: errors.KafkaError) -> Refused:
    """Return the refusal for a subscriber that cannot join."""
    outcome = next((outcome for kind, outcome in _REFUSALS if isinstance(error, kind)), Outcome.BUSY)
    reason = OTHER_ASSIGNOR if isinstance(error, errors.InconsistentGroupProtocolError) else repr(error)
    return Refused(outcome, f"group {group!r} cannot be joined: {reason}")


def not_read(error: errors.KafkaError) -> Refused:
    """Return the refusal for a client's own member that cannot read or commit."""
    name = type(error).__name__
    if isinstance(error, DENIALS):
        return Refused(Outcome.DENIED, f"Kafka denies access ({name})")
    if isinstance(error, errors.OffsetOutOfRangeError | errors.NoOffsetForPartitionError):
        return Refused(Outcome.UNFIT, f"There is no position to read from ({name}); seek to one")
    if isinstance(error, errors.OffsetMetadataTooLargeError):
        return Refused(Outcome.UNFIT, "The metadata of an offset is longer than Kafka accepts")
    if isinstance(error, errors.InconsistentGroupProtocolError):
        return Refused(Outcome.BROKEN, f"The group cannot be joined: {OTHER_ASSIGNOR}")
    if isinstance(error, errors.CommitFailedError):
        return Refused(Outcome.BUSY, "The group has rebalanced; poll again")
    return Refused(Outcome.BUSY, f"Kafka does not answer ({name})")


class NotAssignedError(Exception):
    """A partition is not assigned to this member now."""

    def __init__(self, partitions: Iterable[TopicPartition]) -> None:
        names = ", ".join(sorted(f"{partition.topic}-{partition.partition}" for partition in partitions))
        super().__init__(f"No current assignment for partition {names}")


@contextlib.asynccontextmanager
async def answering(late: str = "Kafka did not answer in time") -> AsyncIterator[None]:
    """Await an answer of Kafka's for at most `COMMIT_S`. Raises Refused: `late`, or see `not_read`."""
    try:
        async with asyncio.timeout(COMMIT_S):
            yield
    except TimeoutError as error:
        raise Refused(Outcome.BUSY, late) from error
    except errors.KafkaError as error:
        raise not_read(error) from error
