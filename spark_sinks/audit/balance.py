"""Compares the records that gateways have acknowledged with the records in the log. No I/O.

A gateway reports for each partition how many records Kafka has acknowledged to it, the first offset, and the offset
after the last one. Its batches of a partition are stored one after another, so between two audits the count grew by
exactly the records that it stored between the two end offsets. Transaction markers and records of other writers do
not count, and in-flight records do not disturb the comparison.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from spark_sinks.replay.items import Place


class Acknowledged(msgspec.Struct, frozen=True, array_like=True):
    """The numbers that one gateway process has reported for a partition."""

    started: float  # start time of the process, when its counts were 0
    count: int  # records acknowledged by Kafka
    first: int  # offset of the first of them
    behind: int  # offset after the last of them


class AuditCheckpoint(msgspec.Struct, frozen=True):
    """The state of a partition after an audit, where the next audit starts."""

    end: int  # end of the counted offsets
    acknowledged: dict[str, Acknowledged]  # by the gateway's address
    surplus: int = 0  # records in the log that no gateway had reported yet


class OffsetRange(msgspec.Struct, frozen=True):
    """An offset range of a partition that is to be counted."""

    place: Place
    begin: int
    end: int  # exclusive
    acknowledged: int  # acknowledged records in it; a lower limit if not `certain`
    certain: bool  # False if a gateway restarted: some of its records may be unreported


class Counted(msgspec.Struct, frozen=True):
    """The records in the log within a range."""

    stored: int  # records written by gateways
    others: int  # records written by others
    minutes: dict[str, int]  # of `stored`, by Kafka's timestamps, `2026-11-23T06:01`
    deleted: bool = False  # whether Kafka deleted some before they were counted


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """The result for a range of a partition: acknowledged records against stored ones."""

    topic: str
    partition: int
    begin: int
    end: int
    since: str | None  # time of the previous audit (UTC); None at the first, which covers all since start
    until: str
    acknowledged: int
    stored: int
    others: int
    missing: int  # acknowledged records that are not in the log
    surplus: int  # gateways' records in the log beyond the acknowledged ones
    verdict: str  # whole, missing, uncertain (a gateway restarted) or deleted (before they were counted)
    minutes: dict[str, int]


def uncounted(place: Place, before: AuditCheckpoint | None, current: Mapping[str, Acknowledged]) -> OffsetRange | None:
    """Return the range of a partition to count; None if no record was acknowledged since.

    Args:
        place: the partition.
        before: the state after the previous audit; None for the first.
        current: each gateway's present numbers, by its address.
    """
    acknowledged, certain = 0, True
    begins, ends = [], []
    for address, now in current.items():
        then = None if before is None else before.acknowledged.get(address)
        if then is None:
            certain = certain and (before is None or now.first >= before.end)  # else surplus in an earlier audit
        elif then.started != now.started or then.first != now.first or now.count < then.count:
            then, certain = None, False
        elif now.behind < then.behind:  # the log was truncated: compare all since the process started
            then = None
        acknowledged += now.count - (0 if then is None else then.count)
        begins.append(now.first if then is None else then.behind)
        ends.append(now.behind)
    if not acknowledged:
        return None
    end = max(ends)
    begin = before.end if before is not None and end >= before.end else min(begins)
    return OffsetRange(place, begin, end, acknowledged, certain)


def balance(
    what: OffsetRange, counted: Counted, before: AuditCheckpoint | None, *, gateways: int, since: str | None, until: str
) -> Balance:
    """Compare the acknowledged records of a range with the counted ones.

    With several gateways, a record stored between the polls of two gateways may be counted now and acknowledged in the
    next audit. So the previous surplus may be missing here.
    """
    allowed = before.surplus if before is not None and gateways > 1 else 0
    missing = max(0, what.acknowledged - counted.stored - allowed)
    if counted.deleted:
        verdict, missing = "deleted", 0
    elif missing:
        verdict = "missing"
    else:
        verdict = "whole" if what.certain else "uncertain"
    return Balance(
        topic=what.place.topic,
        partition=what.place.partition,
        begin=what.begin,
        end=what.end,
        since=since,
        until=until,
        acknowledged=what.acknowledged,
        stored=counted.stored,
        others=counted.others,
        missing=missing,
        surplus=max(0, counted.stored + missing - what.acknowledged),
        verdict=verdict,
        minutes=counted.minutes,
    )
