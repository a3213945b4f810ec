"""The values of a selector's names, for records of every origin."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proton import Message, int32, symbol, timestamp, ubyte, ulong

from mapping.amqp.incoming import AmqpDestination, gateway_headers, to_record
from mapping.amqp.selection import selector
from mapping.record import AMQP_SECTIONS, AMQP_TYPES, CORRELATION_ID, Headers, Received
from protocols.amqp.selectors.parser import SelectorError

ONE = "00000000-0000-0000-0000-000000000001"
NOW = 1_700_000_000_000


def stored(message: Message) -> Received:
    """The record of an AMQP message."""
    destination = AmqpDestination("t", b"t", None, None, "alice", gateway_headers("client"))
    record = to_record(bytes(message.encode()), destination, NOW)
    return Received("t", record.key, record.value, record.headers, record.timestamp or NOW, 2, 77)


def plain(*headers: tuple[str, bytes | None], key: bytes | None = None) -> Received:
    """A record of any Kafka client."""
    return Received("t", key, b"x", headers, NOW, 2, 77)


FULL = Message(
    body=b"x",
    inferred=True,
    id="ID:1",
    correlation_id="order-7",
    subject="kind",
    address="to-there",
    reply_to="back",
    user_id=b"alice",
    content_type=symbol("text/plain"),
    content_encoding=symbol("none"),
    creation_time=NOW / 1000 - 1,
    group_id="g",
    group_sequence=3,
    reply_to_group_id="rg",
    priority=7,
    durable=True,
    properties={
        "text": "5",
        "int": int32(-4),
        "float": 2.5,
        "flag": True,
        "null": None,
        "when": timestamp(NOW),
        "uuid": uuid.UUID(int=5),
        "binary": b"\x00\xff",
        "tiny": ubyte(200),
        "content-type": "own",
        "cloudEvents:type": "made",
    },
    annotations={symbol("x-opt-jms-dest"): ubyte(1), symbol("x-opt-who"): "me", symbol("x-opt-offset"): "-9"},
)


@pytest.mark.parametrize(
    "text",
    [
        "JMSMessageID = 'ID:1' AND amqp.message_id = 'ID:1'",
        "JMSCorrelationID = 'order-7' AND amqp.correlation_id LIKE 'order-%'",
        "JMSType = 'kind' AND amqp.subject = 'kind'",
        "JMSPriority BETWEEN 5 AND 9 AND amqp.priority = 7",
        "JMSDeliveryMode = 'PERSISTENT' AND amqp.durable AND amqp.durable = TRUE",
        f"JMSTimestamp = {NOW - 1000} AND amqp.creation_time = {NOW - 1000}",
        "JMSXGroupID = 'g' AND JMSXGroupSeq = 3 AND JMSXUserID = 'alice'",
        "amqp.to = 'to-there' AND amqp.reply_to = 'back' AND amqp.user_id = 'alice'",
        "amqp.content_type = 'text/plain' AND amqp.content_encoding = 'none'",
        "amqp.group_id = 'g' AND amqp.group_sequence = 3 AND amqp.reply_to_group_id = 'rg'",
        "amqp.absolute_expiry_time IS NULL",
        "text = '5' AND NOT text = 5",
        "int = -4 AND int < -3.5 AND tiny = 200",
        "float > 2.4",
        "flag AND flag = TRUE AND NOT flag = 'true'",
        '"null" IS NULL AND missing IS NULL',
        f"when = {NOW}",
        "uuid = '00000000-0000-0000-0000-000000000005'",
        "\"binary\" IS NOT NULL AND NOT binary = 'x'",
        "\"content-type\" = 'own' AND \"cloudEvents:type\" = 'made'",
        "amqp.annotation.x-opt-jms-dest = 1 AND amqp.annotation.x-opt-who = 'me'",
        "amqp.annotation.x-opt-none IS NULL",
        "amqp.annotation.x-opt-offset = 77 AND amqp.annotation.x-opt-offset = '77'",
        "amqp.annotation.x-opt-bridge.partition = 2 AND amqp.annotation.x-opt-bridge.topic = 't'",
        '"gw.client" IS NULL',
    ],
)
def test_a_message_of_amqp(text: str) -> None:
    assert selector(text)(stored(FULL))


@pytest.mark.parametrize(
    ("message_id", "text"),
    [
        ("plain", "JMSMessageID = 'ID:AMQP_NO_PREFIX:plain' AND amqp.message_id = 'plain'"),
        (ulong(42), "JMSMessageID = 'ID:AMQP_ULONG:42' AND amqp.message_id = 42"),
        (uuid.UUID(ONE), f"JMSMessageID = 'ID:AMQP_UUID:{ONE}' AND amqp.message_id = '{ONE}'"),
        (b"\x01\xfe", "JMSMessageID = 'ID:AMQP_BINARY:01fe' AND amqp.message_id IS NOT NULL"),
        ("AMQP_ULONG:1", "JMSMessageID = 'ID:AMQP_STRING:AMQP_ULONG:1' AND amqp.message_id = 'AMQP_ULONG:1'"),
        (None, "JMSMessageID IS NULL AND amqp.message_id IS NULL"),
    ],
)  # fmt: skip
def test_ids(message_id: Any, text: str) -> None:
    record = stored(Message(body=b"x", inferred=True, id=message_id, correlation_id=message_id))
    assert selector(text)(record)
    if message_id not in ("plain", "AMQP_ULONG:1"):
        assert selector(text.replace("Message", "Correlation").replace("message", "correlation"))(record)
    elif message_id:
        assert selector(f"JMSCorrelationID = '{message_id}'")(record)


@pytest.mark.parametrize(
    "text",
    [
        "level = 5 AND level = '5' AND level > 4",
        "flag = TRUE AND flag AND flag = 'true'",
        "JMSMessageID = 'ID:AMQP_NO_PREFIX:m' AND JMSCorrelationID = 'c'",
        "JMSPriority = 4 AND JMSDeliveryMode = 'PERSISTENT'",
        f"JMSTimestamp = {NOW}",
        '"x-raw" IS NOT NULL AND NOT "x-raw" = \'a\'',
        "amqp.annotation.x-opt-bridge.key = 'k' AND amqp.annotation.x-opt-enqueued-time > 1",
        "amqp.annotation.x-opt-who IS NULL",
        "twice = 'first'",
    ],
)
def test_a_record_of_another_protocol(text: str) -> None:
    headers: Headers = (
        ("level", b"5"), ("flag", b"true"), ("message-id", b"m"), ("correlation-id", b"c"), ("x-raw", b"\xff"),
        ("twice", b"first"), ("twice", b"second"), ("none", None),
    )  # fmt: skip
    assert selector(text)(plain(*headers, key=b"k"))


def test_a_message_that_is_not_durable() -> None:
    record = stored(Message(body=b"x", inferred=True, priority=5))
    assert selector("JMSDeliveryMode = 'NON_PERSISTENT' AND NOT amqp.durable")(record)


@pytest.mark.parametrize("name", ["JMSReplyTo", "JMSRedelivered", "amqp.ttl", "amqp.nothing"])
def test_names_that_cannot_be_selected(name: str) -> None:
    with pytest.raises(SelectorError, match=name):
        selector(f"a = 1 AND {name} = 1")


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "message-id", AMQP_TYPES, AMQP_SECTIONS, CORRELATION_ID]),
                       st.one_of(st.none(), st.binary(max_size=30), st.sampled_from([b"sd", b"ss", b"AMQP_ULONG:x"])))),
    st.sampled_from(["a = 1 OR b > 2", "JMSMessageID = 'x' OR amqp.message_id = 1", "amqp.annotation.x = 1"]),
)  # fmt: skip
def test_headers_of_any_kind_are_no_error(headers: list[tuple[str, bytes | None]], text: str) -> None:
    assert isinstance(selector(text)(plain(*headers)), bool)
