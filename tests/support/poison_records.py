"""Everything that a topic can hold, besides good readings: what no job may end by."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from typing import Any, Final

from aiokafka import AIOKafkaProducer

LIMIT: Final = 1_048_588
"""The most bytes of a batch of a topic, unless it or the brokers are configured."""
ANY_TIME: Final = {"message.timestamp.after.max.ms": str(2**63 - 1)}
"""The configuration of a topic that takes any timestamp."""
MICROSECONDS: Final = time.time_ns() // 1_000
LONGEST: Final = b'{"n": 1, "x": 1, "s": "' + b"x" * (LIMIT - 130) + b'"}'
Record = dict[str, Any]
"""Arguments of aiokafka's `send`."""
DEVICES: Final = [f"good-{number}" for number in range(5)]
POISON: Final = b"poison"
FAST: Final = {"fast-50": 50_000, "fast-600": 600_000}
"""Devices by how many milliseconds their clocks are fast; their readings are good too."""

LARGEST: Final = [
    b'{"n": 9223372036854775807, "x": 1.7976931348623157e308, "s": "\\uffff"}',
    b'{"n": -9223372036854775808, "x": -1.7976931348623157e308, "s": ""}',
    b'{"n": 5, "x": 4.9e-324, "s": "a"}',
]
VALUES: Final = [
    None, b"", b" ", b"{}", b"[]", b"null", b"NaN", b"\xff\xfe", b'{"n": null, "x": null, "s": null}',
    b'{"n": 9223372036854775808, "x": 1, "s": "a"}', b'{"n": 1e400, "x": 1e400, "s": 1e400}',
    b'{"n": 1, "x": NaN, "s": "a"}', b'{"n": 1, "x": "Infinity", "s": "a"}', b'{"n": 1, "n": 2, "x": 1, "s": "a"}',
    b'{"n": 1, "x": ' + b"9" * 5_000 + b', "s": "a"}', b'{"x": 1e999999999, "n": 1, "s": "a"}',
    b"[" * 100_000, b'{"n":' * 100_000, b"-" * 100_000, b"9" * 1_000_000, b"," * 100_000, b'"' * 1_001,
    *(
        b'{"n": 1, "x": 1, "s": "a", "at": %s}' % at
        for at in (
            b"0", b"-1", b"1e13", b"99999999999999", b"9" * 400, b'"0000-01-01T00:00:00Z"',
            b'"0001-01-01T00:00:00+14:00"', b'"0001-01-02T00:00:00Z"', b'"9999-12-31T23:59:59-18:00"', b'{"a": [1]}',
        )
    ),
]  # fmt: skip
"""JSON that is at or beyond some limit, and what is not JSON."""


def arbitrary(seed: int) -> list[Record]:
    """Make 120 records of arbitrary bytes, and of what JSON is made of."""
    rng = random.Random(seed)
    pieces = [b"{", b"}", b'"n"', b":", b",", b"1", b"-", b"e9", b"[", b"]", b"\\", b"\xff", b"\0", b" ", b"2e308"]
    made: list[Record] = [{"value": rng.randbytes(rng.randint(1, 60)), "key": POISON} for _ in range(60)]
    made += [{"value": b"".join(rng.choices(pieces, k=rng.randint(1, 12))), "key": POISON} for _ in range(60)]
    return made


def extremes() -> list[Record]:
    """Make the largest, smallest, longest, nested, repeated, empty and non-finite records."""
    made: list[Record] = [{"value": value, "key": POISON} for value in (*LARGEST, *LARGEST, *VALUES)]
    small = LARGEST[2]
    made += [
        {"value": LONGEST, "key": b"long"},
        {"value": LONGEST, "key": b"\xff" * 60},
        {"value": b"\xff" * (LIMIT - 100), "key": POISON},
        {"value": small, "key": None},
        {"value": small, "key": b""},
        {"value": small, "key": b"k" * (LIMIT - 200)},
        {"value": b"bad", "key": b"k" * (LIMIT - 200)},
        {"value": small, "key": POISON, "headers": [("h" * 400_000, b"v" * 400_000)]},
        {"value": b"bad", "key": POISON, "headers": [("h" * 500_000, b"v" * 500_000)]},
        {"value": b"bad", "key": POISON, "headers": [("", b"") for _ in range(50_000)]},
        {"value": small, "key": POISON, "headers": [("content-type", b"c" * (LIMIT - 200))]},
        {"value": small, "key": POISON, "headers": [("creation-time", b"99999999999999"), ("creation-time", b"\xff")]},
        {"value": small, "key": POISON, "timestamp_ms": 0},
        {"value": small, "key": POISON, "timestamp_ms": MICROSECONDS},
    ]
    return made


def good(n: int) -> list[Record]:
    """Make a reading of each good device."""
    value = b'{"n": %d, "x": 50.5, "s": "text"}' % n
    return [{"value": value, "key": device.encode()} for device in DEVICES]


def fast(n: int, now_ms: int) -> list[Record]:
    """Make a reading of each device with a fast clock: in the value's field, and in the sender's header as of JMS."""
    return [
        {
            "value": b'{"n": %d, "x": 50.5, "s": "text", "at": %d}' % (n, now_ms + ahead_ms),
            "key": device.encode(),
            "headers": [("creation-time", b"%d" % (now_ms + ahead_ms))],
        }
        for device, ahead_ms in FAST.items()
    ]


def stream(now_ms: int) -> list[Record]:
    """Make two readings of each good device and of each fast one, with everything else between."""
    made = [*good(0), *fast(0, now_ms), *extremes(), *arbitrary(0), *fast(0, now_ms), *good(0)]
    return at_once(made, now_ms)


def at_once(records: Iterable[Record], now_ms: int) -> list[Record]:
    """Return the records with timestamps a millisecond apart, unless they have their own."""
    return [{"timestamp_ms": now_ms + place, **record} for place, record in enumerate(records)]


async def send(bootstrap: str, topic: str, records: Iterable[Record]) -> None:
    """Write records in their order."""
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, max_request_size=2 * LIMIT) as producer:
        sent = [await producer.send(topic, **record) for record in records]
        await asyncio.gather(*sent)
