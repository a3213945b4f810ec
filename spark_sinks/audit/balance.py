"""What gateways say they have stored, beside what the log holds. No I/O.

A gateway tells of each partition how many records Kafka has acknowledged to it, where the first was, and where the last
one ended. Its batches of a partition are stored one after the other, so between two looks its count grew by exactly the
records that it has stored between the two ends: whatever else is in between (markers of transactions, records of
others) does not count, and nothing that is on its way disturbs.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from spark_sinks.replay.items import Place


class Acknowledged(msgspec.Struct, frozen=True, array_like=True):
    """What a process of a gateway has said of a partition."""

    started: float  # when the process started: its counts began at 0 then
    count: int  # records that Kafka has acknowledged to it
    first: int  # offset of the first of them
    behind: int  # offset behind the last one


class Checkpoint(msgspec.Struct, frozen=True):
    """What is known of a partition since the last look: what the next one begins with."""

    end: int  # where it was counted to
    told: dict[str, Acknowledged]  # by the gateway's address
    surplus: int = 0  # records in the log that nobody had acknowledged when it was looked


class OffsetRange(msgspec.Struct, frozen=True):
    """A part of a partition that is to be counted."""

    place: Place
    begin: int
    end: int  # exclusive
    acknowledged: int  # records in it that gateways say are there; at least so many where not `certain`
    certain: bool  # False: a gateway started again, and what it had stored since the last look is not known


class Counted(msgspec.Struct, frozen=True):
    """What the log holds of a range."""

    stored: int  # records that a gateway has written
    others: int  # records that somebody else has written
    minutes: dict[str, int]  # of `stored`, by Kafka's timestamps, `2026-11-23T06:01`
    deleted: bool = False  # Kafka has deleted its beginning before it was counted


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """A range of a partition: what was acknowledged, and what is there."""

    topic: str
    partition: int
    begin: int
    end: int
    since: str | None  # when it was looked before (UTC); None: never, so all since the gateway's start
    until: str
    acknowledged: int
    stored: int
    others: int
    missing: int  # records that were acknowledged and are not there
    surplus: int  # records of gateways that are there, and were not acknowledged
    verdict: str  # whole, missing, uncertain (a gateway started again) or deleted (before it could be counted)
    minutes: dict[str, int]


def uncounted(place: Place, before: Checkpoint | None, told: Mapping[str, Acknowledged]) -> OffsetRange | None:
    """What is to be counted of a partition; None: nothing new was stored.

    Args:
        place: which.
        before: what the last look has left; None: this is the first.
        told: what each gateway says now, by its address.
    """
    acknowledged, certain = 0, True
    begins, ends = [], []
    for address, now in told.items():
        then = None if before is None else before.told.get(address)
        if then is None:
            certain = certain and (before is None or now.first >= before.end)  # else they were another look's surplus
        elif then.started != now.started or then.first != now.first or now.count < then.count:
            then, certain = None, False
        elif now.behind < then.behind:  # the log was cut off: what was acknowledged since the start must be there
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
    what: OffsetRange, counted: Counted, before: Checkpoint | None, *, gateways: int, since: str | None, until: str
) -> Balance:
    """Compare.

    With several gateways, what one has stored behind its own look, and before another's, is counted now and
    acknowledged at the next look: so much may be short then.
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
