"""The number of records that a group's subscriber is still to be offered: AMQP's drain waits for them."""

from __future__ import annotations

from collections.abc import Mapping

from aiokafka import AIOKafkaConsumer, TopicPartition

from gateway.kafka.driver.kafka_consumer import next_offset
from gateway.kafka.groups.assignment import Member
from gateway.kafka.groups.dispatch import Dispatch


def unread(
    dispatch: Dispatch, consumer: AIOKafkaConsumer | None, member: Member, ends: Mapping[TopicPartition, int]
) -> int:
    """Return how many offsets below `ends` are still to be read for a subscriber, in partitions assigned here.

    At least 1 while partitions may be moving. Records that other subscribers hold, or gave back, are not counted.
    """
    if dispatch.suspended or consumer is None:
        return 1
    left = 0
    for tp in ends.keys() & dispatch.assignment.keys():
        assigned = dispatch.assignment[tp]
        position = assigned.position or 0
        if assigned in member.behind:
            left += max(1, position - member.behind[assigned].position)
        elif (next_offset(consumer, tp) or 0) < ends[tp]:
            left += max(1, ends[tp] - position)
    return left
