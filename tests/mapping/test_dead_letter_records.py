"""Dead letters as records, and as AMQP messages."""

from __future__ import annotations

from typing import Any

import pytest
from proton import Message

from mapping.amqp.outgoing import from_record
from mapping.dead_letters import REASON_LIMIT, Cause, dead_letter, dead_letter_topic
from mapping.record import Received

CAUSE = Cause("g", 3, "amqp:decode-error", "no JSON")


def received(**fields: Any) -> Received:
    values: dict[str, Any] = {
        "topic": "orders", "key": b"k", "value": b"v", "headers": (), "timestamp": 5, "partition": 2, "offset": 7,
    }  # fmt: skip
    return Received(**{**values, **fields})


def test_all_of_the_record_and_why() -> None:
    own = (("unit", b"C"), ("unit", None), ("expiry", b"1000"), ("mqtt.exchange", b"n/1/2"), ("gw.client", b"c"))
    letter = dead_letter(received(headers=own), "orders-dlq", CAUSE)
    assert (letter.topic, letter.key, letter.value, letter.timestamp, letter.partition) == (
        "orders-dlq", b"k", b"v", None, None,
    )  # fmt: skip
    assert letter.headers == (
        ("unit", b"C"),
        ("unit", None),
        ("gw.client", b"c"),
        ("dead-letter.topic", b"orders"),
        ("dead-letter.partition", b"2"),
        ("dead-letter.offset", b"7"),
        ("dead-letter.group", b"g"),
        ("dead-letter.attempts", b"3"),
        ("dead-letter.condition", b"amqp:decode-error"),
        ("dead-letter.reason", b"no JSON"),
    )


def test_a_tombstone_stays_one_and_texts_are_bounded() -> None:
    letter = dead_letter(received(value=None, key=None), "d", Cause("g", 1, "x", "\ud800" + "r" * 5000))
    assert letter.value is None
    reason = dict(letter.headers)["dead-letter.reason"]
    assert reason is not None
    assert reason == b"?" + b"r" * (REASON_LIMIT - 1)


@pytest.mark.parametrize(
    ("template", "topic", "headers", "expected"),
    [
        ("{topic}-dlq", "orders", (), "orders-dlq"),
        ("dead", "orders", (), "dead"),
        ("dead", "dead", (), None),
        ("{topic}-dlq", "orders-dlq", (("dead-letter.topic", b"orders"),), None),
        ("{topic}-dlq", "orders-dlq", (), "orders-dlq-dlq"),
        ("{topic}-dlq", "orders", (("dead-letter.topic", b"orders"),), "orders-dlq"),  # moved back for a retry
        ("{topic}-dlq", "orders", (("dead-letter.topic", b"\xff"),), "orders-dlq"),
    ],
)
def test_topics(template: str, topic: str, headers: Any, expected: str | None) -> None:
    assert dead_letter_topic(template, received(topic=topic, headers=headers)) == expected


def test_a_second_death_replaces_the_first() -> None:
    first = dead_letter(received(), "d", CAUSE)
    again = dead_letter(received(headers=first.headers), "d", Cause("h", 1, "rejected"))
    assert [value for name, value in again.headers if name == "dead-letter.group"] == [b"h"]


@pytest.mark.parametrize("sections_header", [False, True])
def test_as_a_message(sections_header: bool) -> None:
    """The bare message is unchanged; annotations have the origin."""
    source = Message(body=b"v", inferred=True, properties={"unit": "C"}, annotations=None)
    headers = (("amqp.sections", bytes(source.encode()[:-6])),) if sections_header else (("unit", b"C"),)
    letter = dead_letter(received(headers=headers), "orders-dlq", CAUSE)
    data = from_record(received(topic="orders-dlq", headers=letter.headers), 0)
    assert data is not None
    message = Message()
    message.decode(data)
    assert message.annotations is not None
    found = {
        str(name): value for name, value in message.annotations.items() if str(name).startswith("x-opt-dead-letter-")
    }
    assert found == {
        "x-opt-dead-letter-topic": "orders",
        "x-opt-dead-letter-partition": "2",
        "x-opt-dead-letter-offset": "7",
        "x-opt-dead-letter-group": "g",
        "x-opt-dead-letter-attempts": "3",
        "x-opt-dead-letter-condition": "amqp:decode-error",
        "x-opt-dead-letter-reason": "no JSON",
    }
    assert message.properties is not None
    assert message.properties["unit"] == "C"
