"""How far the group readers have read: their statistics, and what is left for one subscriber."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated

import msgspec
from aiokafka import AIOKafkaConsumer, TopicPartition

from gateway.kafka.driver.fetch.fetching import without_leader
from gateway.kafka.driver.kafka_consumer import next_offset
from gateway.kafka.groups.delivery.assignment import Member
from gateway.kafka.groups.delivery.dispatch import Dispatch
from telemetry.statistics import counter, gauge, structs_by


class GroupStatistics(msgspec.Struct, frozen=True):
    """A snapshot of one reader."""

    group: str
    topics: tuple[str, ...]
    subscribers: Annotated[int, gauge("receivers here that share the group")]
    positions: Annotated[dict[str, dict[int, int]], gauge("offset of the next record to read", "topic", "partition")]
    committed: Annotated[dict[str, dict[int, int]], gauge("committed offset", "topic", "partition")]
    lag: Annotated[dict[str, int], gauge("records stored and not read yet, as of the last fetch", "topic")]
    unsettled: Annotated[int, gauge("records read and not settled")]
    waiting: Annotated[int, gauge("records waiting for their next attempt")]
    commits: Annotated[int, counter("commit requests answered")]
    redelivered: Annotated[int, counter("records offered again")]
    late: Annotated[int, counter("settlements of records that had gone to another receiver")]
    rebalances: Annotated[int, counter("assignments received")]
    unwanted: Annotated[int, counter("records settled because no receiver here wants them")] = 0
    unselected: Annotated[int, gauge("records of queues that no receiver here selects, kept in the log")] = 0
    behind: Annotated[int, gauge("receivers, by partition, that catch up on records not selected before")] = 0
    expired: Annotated[int, counter("records kept for later receivers that retention has deleted")] = 0
    stalled: Annotated[int, gauge("partitions paused: too many records lie behind an unsettled one")] = 0
    leaderless: Annotated[int, gauge("partitions here without a leader")] = 0


class GroupsStatistics(msgspec.Struct, frozen=True):
    """A snapshot of all readers, by the name of the group."""

    group: Annotated[dict[str, GroupStatistics], structs_by("group")]


def snapshot(
    group: str,
    topics: Collection[str],
    dispatch: Dispatch,
    consumer: AIOKafkaConsumer | None,
    *,
    commits: int,
    rebalances: int,
    stalled: int,
) -> GroupStatistics:
    """Return the statistics of one reader; `consumer` is its group member, or None while it has none."""
    positions: dict[str, dict[int, int]] = {}
    committed: dict[str, dict[int, int]] = {}
    lag: dict[str, int] = {}
    partitions = consumer.assignment() if consumer is not None else ()
    for (topic, number), assigned in dispatch.assignment.items():
        if assigned.position is not None:
            positions.setdefault(topic, {})[number] = assigned.position
        if assigned.committed is not None:
            committed.setdefault(topic, {})[number] = assigned.committed.offset
        end = consumer.highwater(assigned.partition) if consumer and assigned.partition in partitions else None
        if end is not None and assigned.position is not None:
            lag[topic] = lag.get(topic, 0) + max(0, end - assigned.position)
    return GroupStatistics(
        group=group,
        topics=tuple(sorted(topics)),
        subscribers=len(dispatch.members),
        positions=positions,
        committed=committed,
        lag=lag,
        unsettled=sum(one.checkpoint.outstanding + len(one.in_flight) for one in dispatch.assignment.values()),
        waiting=dispatch.delayed,
        commits=commits,
        redelivered=dispatch.redelivered,
        late=dispatch.late,
        rebalances=rebalances,
        unwanted=dispatch.unwanted,
        unselected=sum(len(one.unselected) - len(one.in_flight) for one in dispatch.assignment.values()),
        behind=sum(len(member.behind) for member in dispatch.members.values()),
        expired=dispatch.catch_up.expired,
        stalled=stalled,
        leaderless=len(without_leader(consumer, partitions)) if consumer is not None else 0,
    )


def unread(
    dispatch: Dispatch, consumer: AIOKafkaConsumer | None, member: Member, ends: Mapping[TopicPartition, int]
) -> int:
    """Return how many offsets below `ends` are still to be read for a subscriber, in partitions assigned here.

    AMQP's drain waits for them. At least 1 while partitions may be moving. Records that other subscribers hold, or gave
    back, are not counted.
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
