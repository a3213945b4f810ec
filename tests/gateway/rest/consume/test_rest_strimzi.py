"""The Strimzi bridge's operations, one row for each result: requests, statuses and bodies are the bridge's.

Where we differ on purpose, the row says so (`differs`) and docs/http-differences.md says why. The operations
of its management port are in tests/gateway/observe. TOPIC and SOURCE have three partitions, SOURCE with a
record in each. There are consumers that are fresh, subscribed and assigned, each in a group of its own.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from tests.gateway.rest.conftest import BINARY_RECORDS, CONTROL, JSON_RECORDS, TEXT_RECORDS, Gateway
from tests.support.topics import until_led

DIFFERENCES = Path(__file__).parents[4] / "docs" / "http-differences.md"
V2 = "application/vnd.kafka.v2+json"
JSON_V2 = "application/vnd.kafka.json.v2+json"
NO_TYPE: dict[str, str] = {}
ACCEPT = {"Accept": JSON_V2}
PLACE = {"partition": int, "offset": int}
ERROR = {"error_code": int, "message": str}
SCHEMA_ERROR = "Validation error on: Schema validation error"
EXCLUSIVE = {
    "error_code": 409, "message": "Subscriptions to topics, partitions, and patterns are mutually exclusive.",
}  # fmt: skip
NO_CONSUMER = {"error_code": 404, "message": "The specified consumer instance was not found."}
NOT_ASSIGNED = {"error_code": 404, "message": "No current assignment for partition SOURCE-2"}
REPLICA = {"broker": int, "leader": bool, "in_sync": bool}
PARTITION = {"partition": int, "leader": int, "replicas": [REPLICA]}
RECORD = {"topic": str, "key": None, "value": int, "partition": int, "offset": int, "timestamp": int, "headers": list}
NAMES = ("fresh", "subscribed", "assigned", "pattern", "deleted")
FRESH, SUBSCRIBED, ASSIGNED, PATTERN, DELETED = (f"/consumers/GROUP-{name}/instances/{name}" for name in NAMES)
NOBODY = "/consumers/GROUP/instances/nobody"
SETTINGS = {"format": "json", "auto.offset.reset": "earliest", "enable.auto.commit": False}
POSITIONS = {"offsets": [{"topic": "SOURCE", "partition": 0, "offset": 0}]}
PARTITIONS = {"partitions": [{"topic": "SOURCE", "partition": 0}]}
FOREIGN = {"partitions": [{"topic": "SOURCE", "partition": 2}]}


class Row(NamedTuple):
    operation: str
    outcome: str
    method: str
    path: str
    status: int
    body: Any = None  # as JSON, or bytes
    headers: dict[str, str] = NO_TYPE
    answer: Any = None  # a value, a type, or an object or list of such
    media: str | None = V2
    differs: str = ""  # Strimzi's answer, if it differs


def said(status: int, message: str, *lines: str) -> dict[str, Any]:
    """An error in the words that the bridge's own tests look for."""
    error = {"error_code": status, "message": message}
    return {**error, "validation_errors": list(lines)} if lines else error


def produced(*records: Any) -> dict[str, Any]:
    return {"records": list(records)}


SEND, SEND_1 = "/topics/TOPIC", "/topics/TOPIC/partitions/1"
B64 = "aGVsbG8="
ROWS = [
    Row("info", "version", "GET", "/", 200, answer={"bridge_version": str}, media="application/json"),
    Row(
        "info", "Accept of records", "GET", "/", 200,
        headers=ACCEPT, answer={"bridge_version": str}, media="application/json",
    ),
    Row("openapi", "the contract", "GET", "/openapi", 200, answer=dict, media="application/json"),
    Row("openapiV3", "the contract", "GET", "/openapi/v3", 200, answer=dict, media="application/json"),
    Row("openapiV2", "removed", "GET", "/openapi/v2", 404, answer={"error_code": 404, "message": "Not Found"}),
    Row("none", "unknown path", "GET", "/nothing", 404, answer={"error_code": 404, "message": "Not Found"}),
    Row("none", "wrong method", "DELETE", "/topics", 405, answer=ERROR),
    Row("none", "OPTIONS without CORS", "OPTIONS", "/topics", 405, answer=ERROR),
    # Producing
    Row(
        "send", "json", "POST", SEND, 200,
        produced({"key": "k", "value": {"a": 1}}), JSON_RECORDS, {"offsets": [PLACE]},
    ),
    Row(
        "send", "binary", "POST", SEND, 200,
        produced({"key": B64, "value": B64}), BINARY_RECORDS, {"offsets": [PLACE]},
    ),
    Row("send", "text", "POST", SEND, 200, produced({"key": "k", "value": "v"}), TEXT_RECORDS, {"offsets": [PLACE]}),
    Row(
        "send", "partition, timestamp, headers", "POST", SEND, 200,
        produced(
            {"value": 1, "partition": 2, "timestamp": 1700000000000, "headers": [{"key": "h", "value": B64}] * 2}
        ),
        JSON_RECORDS, {"offsets": [{"partition": 2, "offset": int}]},
    ),
    Row("send", "no records", "POST", SEND, 200, produced(), JSON_RECORDS, {"offsets": []}),
    Row("send", "async", "POST", SEND + "?async=true", 204, produced({"value": 1}), JSON_RECORDS, media=None),
    Row("send", "async is no boolean", "POST", SEND + "?async=maybe", 400, produced({"value": 1}), JSON_RECORDS, ERROR),
    Row("send", "no list", "POST", SEND, 422, {}, JSON_RECORDS, ERROR),
    Row("send", "no JSON", "POST", SEND, 400, b"{", JSON_RECORDS, ERROR),
    Row("send", "no value", "POST", SEND, 400, produced({"key": "k"}), JSON_RECORDS, ERROR),
    Row("send", "unknown field", "POST", SEND, 400, produced({"value": 1, "foo": 2}), JSON_RECORDS, ERROR),
    Row(
        "send", "header without value", "POST", SEND, 400,
        produced({"value": 1, "headers": [{"key": "a"}]}), JSON_RECORDS, ERROR,
    ),
    Row("send", "bad base64", "POST", SEND, 422, produced({"value": "!"}), BINARY_RECORDS, ERROR),
    Row(
        "send", "text that is none", "POST", SEND, 422, produced({"value": {"a": 1}}), TEXT_RECORDS,
        said(422, "Because the embedded format is 'text', the value must be a string"),
    ),
    Row(
        "send", "text key that is none", "POST", SEND, 422, produced({"key": [1], "value": "v"}), TEXT_RECORDS,
        said(422, "Because the embedded format is 'text', the key must be a string"),
    ),
    Row(
        "send", "partition below zero", "POST", SEND, 422,
        produced({"value": 1, "partition": -1}), JSON_RECORDS, ERROR,
    ),
    Row(
        "send", "timestamp below zero", "POST", SEND, 422,
        produced({"value": 1, "timestamp": -1}), JSON_RECORDS, ERROR,
    ),
    Row("send", "Content-Type of control", "POST", SEND, 400, produced({"value": 1}), CONTROL, ERROR),
    Row(
        "send", "Content-Type of no use", "POST", SEND, 400,
        produced({"value": 1}), {"Content-Type": "text/plain"}, ERROR,
    ),
    Row(
        "send", "one partition of two missing", "POST", SEND, 200, produced({"value": 1}, {"value": 1, "partition": 9}),
        JSON_RECORDS, {"offsets": [PLACE, {"error_code": 404, "message": str}]},
    ),
    Row(
        "send", "the only partition missing", "POST", SEND, 404,
        produced({"value": 1, "partition": 9}), JSON_RECORDS, ERROR,
        differs="200 with an error for each record",
    ),
    Row(
        "send", "tombstone as text", "POST", SEND, 200,
        produced({"value": None}), TEXT_RECORDS, {"offsets": [PLACE]}, differs="422",
    ),
    Row(
        "send", "a number", "POST", SEND, 200,
        produced({"value": 1.5}), JSON_RECORDS, {"offsets": [PLACE]}, differs="400",
    ),
    Row(
        "sendToPartition", "json", "POST", SEND_1, 200,
        produced({"value": "v"}), JSON_RECORDS, {"offsets": [{"partition": 1, "offset": int}]},
    ),
    Row(
        "sendToPartition", "async", "POST", SEND_1 + "?async=true", 204,
        produced({"value": "v"}), JSON_RECORDS, media=None,
    ),
    Row(
        "sendToPartition", "partition in the body too", "POST", SEND_1, 400,
        produced({"value": 1, "partition": 1}), JSON_RECORDS, ERROR,
    ),
    Row(
        "sendToPartition", "partition that is none", "POST", "/topics/TOPIC/partitions/x", 400,
        produced({"value": 1}), JSON_RECORDS, ERROR,
    ),
    Row(
        "sendToPartition", "partition below zero", "POST", "/topics/TOPIC/partitions/-1", 400,
        produced({"value": 1}), JSON_RECORDS, ERROR,
    ),
    Row(
        "sendToPartition", "no such partition", "POST", "/topics/TOPIC/partitions/9", 404,
        produced({"value": 1}), JSON_RECORDS, ERROR,
        differs="200 with an error for each record",
    ),
    # Topics
    Row("listTopics", "names", "GET", "/topics", 200, answer=list),
    Row(
        "getTopic", "found", "GET", "/topics/TOPIC", 200,
        answer={"name": "TOPIC", "configs": dict, "partitions": [PARTITION] * 3},
    ),
    Row("getTopic", "missing", "GET", "/topics/no-such-topic", 404, answer=ERROR),
    Row("listPartitions", "found", "GET", "/topics/TOPIC/partitions", 200, answer=[PARTITION] * 3),
    Row("listPartitions", "missing", "GET", "/topics/no-such-topic/partitions", 404, answer=ERROR),
    Row("getPartition", "found", "GET", "/topics/TOPIC/partitions/1", 200, answer=PARTITION),
    Row("getPartition", "missing", "GET", "/topics/TOPIC/partitions/9", 404, answer=ERROR),
    Row("getPartition", "no number", "GET", "/topics/TOPIC/partitions/x", 400, answer=ERROR),
    Row("getPartition", "below zero", "GET", "/topics/TOPIC/partitions/-1", 400, answer=ERROR),
    Row(
        "getOffsets", "found", "GET", "/topics/TOPIC/partitions/0/offsets", 200,
        answer={"beginning_offset": int, "end_offset": int},
    ),
    Row("getOffsets", "missing", "GET", "/topics/TOPIC/partitions/9/offsets", 404, answer=ERROR),
    Row(
        "createTopic", "created", "POST", "/admin/topics", 201,
        {"topic_name": "TOPIC-new", "partitions_count": 2, "replication_factor": 1}, JSON_RECORDS, {},
    ),
    Row(
        "createTopic", "there already", "POST", "/admin/topics", 409,
        {"topic_name": "TOPIC"}, JSON_RECORDS, ERROR, differs="500",
    ),
    Row(
        "createTopic", "name that is none", "POST", "/admin/topics", 422,
        {"topic_name": "a b"}, JSON_RECORDS, ERROR, differs="500",
    ),
    Row(
        "createTopic", "unknown field", "POST", "/admin/topics", 400,
        {"topic_name": "t", "foo": 1}, JSON_RECORDS, ERROR,
    ),
    Row("createTopic", "no name", "POST", "/admin/topics", 400, {}, JSON_RECORDS, ERROR),
    Row("createTopic", "no body", "POST", "/admin/topics", 400, None, JSON_RECORDS, ERROR),
    # Consumers
    Row(
        "createConsumer", "all settings", "POST", "/consumers/GROUP", 200,
        {"name": "made", "format": "json", "auto.offset.reset": "earliest", "enable.auto.commit": True,
         "fetch.min.bytes": 1, "consumer.request.timeout.ms": 30000, "isolation.level": "read_committed"},
        CONTROL, {"instance_id": "made", "base_uri": str},
    ),
    Row("createConsumer", "no body", "POST", "/consumers/GROUP", 200, answer={"instance_id": str, "base_uri": str}),
    Row(
        "createConsumer", "name that is there", "POST", "/consumers/GROUP-fresh", 409,
        {"name": "fresh"}, CONTROL,
        said(409, "A consumer instance with the specified name already exists in the Kafka Bridge."),
    ),
    Row(
        "createConsumer", "unknown format", "POST", "/consumers/GROUP", 422,
        {"format": "avro"}, CONTROL, said(422, "Invalid format type."),
    ),
    Row(
        "createConsumer", "unknown field", "POST", "/consumers/GROUP", 400, {"foo": 1}, CONTROL,
        said(400, SCHEMA_ERROR, 'Property "foo" does not match additional properties schema'),
    ),
    Row(
        "createConsumer", "quoted boolean", "POST", "/consumers/GROUP", 400,
        {"enable.auto.commit": "true"}, CONTROL,
        said(
            400, SCHEMA_ERROR, 'Property "enable.auto.commit" does not match schema',
            "Instance type string is invalid. Expected boolean",
        ),
    ),
    Row(
        "createConsumer", "quoted number", "POST", "/consumers/GROUP", 400, {"fetch.min.bytes": "100"}, CONTROL,
        said(
            400, SCHEMA_ERROR, 'Property "fetch.min.bytes" does not match schema',
            "Instance type string is invalid. Expected integer",
        ),
    ),
    Row(
        "createConsumer", "bad value", "POST", "/consumers/GROUP", 422, {"isolation.level": "foo"}, CONTROL,
        said(
            422,
            "Invalid value foo for configuration isolation.level: "
            "String must be one of: read_committed, read_uncommitted",
        ),
    ),
    Row(
        "createConsumer", "bad start", "POST", "/consumers/GROUP", 422, {"auto.offset.reset": "foo"}, CONTROL,
        said(
            422,
            "Invalid value foo for configuration auto.offset.reset: String must be one of: earliest, latest, none",
        ),
        differs="by_duration",
    ),
    Row(
        "createConsumer", "forwarded scheme", "POST", "/consumers/GROUP", 400, {},
        {**CONTROL, "Forwarded": "host=gate;proto=mqtt"}, said(400, "mqtt is not a valid schema/proto."),
        differs="500",
    ),
    Row("deleteConsumer", "missing", "DELETE", NOBODY, 404, answer=NO_CONSUMER),
    Row("deleteConsumer", "deleted", "DELETE", DELETED, 204, media=None),
    Row("subscribe", "topics", "POST", SUBSCRIBED + "/subscription", 204, {"topics": ["SOURCE"]}, CONTROL, media=None),
    Row(
        "subscribe", "pattern", "POST", PATTERN + "/subscription", 204,
        {"topic_pattern": "TOPI."}, CONTROL, media=None,
    ),
    Row(
        "subscribe", "both", "POST", FRESH + "/subscription", 409,
        {"topics": ["TOPIC"], "topic_pattern": "x"}, CONTROL, EXCLUSIVE,
    ),
    Row(
        "subscribe", "after an assignment", "POST", ASSIGNED + "/subscription", 409,
        {"topics": ["TOPIC"]}, CONTROL, EXCLUSIVE,
    ),
    Row(
        "subscribe", "neither", "POST", FRESH + "/subscription", 422, {}, CONTROL,
        said(422, "A list (of Topics type) or a topic_pattern must be specified."),
    ),
    Row("subscribe", "no body", "POST", FRESH + "/subscription", 400, None, CONTROL, ERROR),
    Row("subscribe", "no consumer", "POST", NOBODY + "/subscription", 404, {"topics": ["TOPIC"]}, CONTROL, NO_CONSUMER),
    Row(
        "listSubscriptions", "subscribed", "GET", SUBSCRIBED + "/subscription", 200,
        answer={"topics": ["SOURCE"], "partitions": [{"SOURCE": [0, 1, 2]}]},
    ),
    Row("listSubscriptions", "nothing", "GET", FRESH + "/subscription", 200, answer={"topics": [], "partitions": []}),
    Row("listSubscriptions", "no consumer", "GET", NOBODY + "/subscription", 404, answer=NO_CONSUMER),
    Row("assign", "partitions", "POST", ASSIGNED + "/assignments", 204, PARTITIONS, CONTROL, media=None),
    Row("assign", "after a subscription", "POST", SUBSCRIBED + "/assignments", 409, PARTITIONS, CONTROL, EXCLUSIVE),
    Row("assign", "no consumer", "POST", NOBODY + "/assignments", 404, PARTITIONS, CONTROL, NO_CONSUMER),
    Row(
        "poll", "records", "GET", ASSIGNED + "/records?timeout=20000", 200,
        headers=ACCEPT, answer=[RECORD], media=JSON_V2,
    ),
    Row("poll", "no more", "GET", ASSIGNED + "/records", 200, headers=ACCEPT, answer=[], media=JSON_V2),
    Row(
        "poll", "Accept of another format", "GET", ASSIGNED + "/records", 406,
        headers={"Accept": "application/vnd.kafka.binary.v2+json"},
        answer=said(406, "Consumer format does not match the embedded format requested by the Accept header."),
    ),
    Row(
        "poll", "no subscription", "GET", FRESH + "/records", 409, headers=ACCEPT, differs="500",
        answer=said(409, "Consumer is not subscribed to any topics or assigned any partitions"),
    ),
    Row("poll", "timeout that is no number", "GET", ASSIGNED + "/records?timeout=x", 400, headers=ACCEPT, answer=ERROR),
    Row("poll", "no consumer", "GET", NOBODY + "/records", 404, headers=ACCEPT, answer=NO_CONSUMER),
    Row("commit", "offsets", "POST", ASSIGNED + "/offsets", 204, POSITIONS, CONTROL, media=None),
    Row("commit", "what was delivered", "POST", ASSIGNED + "/offsets", 204, media=None),
    Row("commit", "no consumer", "POST", NOBODY + "/offsets", 404, POSITIONS, CONTROL, NO_CONSUMER),
    Row("seek", "offsets", "POST", ASSIGNED + "/positions", 204, POSITIONS, CONTROL, media=None),
    Row("seek", "not assigned", "POST", FRESH + "/positions", 404, POSITIONS, CONTROL, ERROR),
    Row("seek", "no consumer", "POST", NOBODY + "/positions", 404, POSITIONS, CONTROL, NO_CONSUMER),
    Row(
        "seekToBeginning", "partitions", "POST", ASSIGNED + "/positions/beginning", 204,
        PARTITIONS, CONTROL, media=None,
    ),
    Row(
        "seekToBeginning", "not assigned", "POST", ASSIGNED + "/positions/beginning", 404,
        FOREIGN, CONTROL, NOT_ASSIGNED,
    ),
    Row(
        "seekToBeginning", "no consumer", "POST", NOBODY + "/positions/beginning", 404,
        PARTITIONS, CONTROL, NO_CONSUMER,
    ),
    Row("seekToEnd", "partitions", "POST", ASSIGNED + "/positions/end", 204, PARTITIONS, CONTROL, media=None),
    Row("seekToEnd", "not assigned", "POST", ASSIGNED + "/positions/end", 404, FOREIGN, CONTROL, NOT_ASSIGNED),
    Row("seekToEnd", "no consumer", "POST", NOBODY + "/positions/end", 404, PARTITIONS, CONTROL, NO_CONSUMER),
    Row("assign", "none: unassigned", "POST", ASSIGNED + "/assignments", 204, {"partitions": []}, CONTROL, media=None),
    Row(
        "subscribe", "none: unsubscribed", "POST", SUBSCRIBED + "/subscription", 204,
        {"topics": []}, CONTROL, media=None,
    ),
    Row("unsubscribe", "unsubscribed", "DELETE", SUBSCRIBED + "/subscription", 204, media=None),
    Row("unsubscribe", "no consumer", "DELETE", NOBODY + "/subscription", 404, answer=NO_CONSUMER),
]  # fmt: skip


class Place(NamedTuple):
    topic: str
    source: str

    def named(self, text: str) -> str:
        for name, meant in (
            ("SOURCE", self.source), ("TOPI.", self.topic[:-1] + "."), ("TOPIC", self.topic), ("GROUP", self.source)
        ):  # fmt: skip
            text = text.replace(name, meant)
        return text


async def asked(http: aiohttp.ClientSession, row: Row, place: Place) -> tuple[int, str | None, bytes]:
    data = row.body
    if data is not None and not isinstance(data, bytes):
        data = place.named(json.dumps(data)).encode()
    async with http.request(
        row.method, place.named(row.path), data=data, headers=row.headers, skip_auto_headers=["Content-Type"]
    ) as response:
        return response.status, response.headers.get("Content-Type"), await response.read()


@pytest.fixture(scope="module")
async def place(gateway: Gateway, admin: AIOKafkaAdminClient) -> AsyncIterator[Place]:
    where = Place(*(f"t-{uuid.uuid4().hex[:12]}" for _ in range(2)))
    await admin.create_topics([NewTopic(name, 3, 1) for name in where])
    for name in where:
        await until_led(admin, name)
    setting_up = [
        *(
            Row("", "", "POST", f"/topics/SOURCE/partitions/{number}", 200, produced({"value": 1}), JSON_RECORDS)
            for number in range(3)
        ),
        *(
            Row("", name, "POST", f"/consumers/GROUP-{name}", 200, {"name": name, **SETTINGS}, CONTROL)
            for name in NAMES
        ),
        Row("", "", "POST", SUBSCRIBED + "/subscription", 204, {"topics": ["SOURCE"]}, CONTROL),
        Row("", "", "POST", ASSIGNED + "/assignments", 204, PARTITIONS, CONTROL),
    ]  # fmt: skip
    async with aiohttp.ClientSession(gateway.url) as http:
        for row in setting_up:
            status, _, raw = await asked(http, row, where)
            assert status == row.status, raw
        yield where
        for name in NAMES:
            await http.delete(where.named(f"/consumers/GROUP-{name}/instances/{name}"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.operation}: {row.outcome}")
async def test_strimzis_operations(http: aiohttp.ClientSession, place: Place, row: Row) -> None:
    status, media, raw = await asked(http, row, place)
    assert status == row.status, raw
    assert media == row.media
    if raw:
        content = json.loads(raw)
        check(content, json.loads(place.named(json.dumps(row.answer, default=named_type))))
        if status >= 400:
            assert content["error_code"] == status
    else:
        assert row.media is None


def named_type(kind: type) -> str:
    return f"<{kind.__name__}>"


KINDS = {named_type(kind): kind for kind in (int, str, bool, dict, list)}


def check(content: Any, wanted: Any) -> None:
    """Check `content` against a value or a type; objects must have exactly these fields."""
    if isinstance(wanted, str) and wanted in KINDS:
        assert isinstance(content, KINDS[wanted])
    elif isinstance(wanted, dict):
        assert content.keys() - {"validation_errors"} == wanted.keys() - {"validation_errors"}
        for name, value in wanted.items():
            check(content[name], value)
    elif isinstance(wanted, list):
        assert len(content) == len(wanted)
        for one, value in zip(content, wanted, strict=True):
            check(one, value)
    else:
        assert content == wanted


def test_every_operation_of_the_bridge_has_rows_and_every_difference_is_written_down() -> None:
    bridge = {
        "info", "openapi", "openapiV3", "listTopics", "getTopic", "createTopic", "listPartitions", "getPartition",
        "getOffsets", "send", "sendToPartition", "createConsumer", "deleteConsumer", "subscribe", "listSubscriptions",
        "unsubscribe", "assign", "poll", "commit", "seek", "seekToBeginning", "seekToEnd",
    }  # fmt: skip
    assert {row.operation for row in ROWS} >= bridge
    text = DIFFERENCES.read_text()
    for row in ROWS:
        if row.differs:
            assert re.search(rf"\| [^|]*{re.escape(row.differs)}[^|]*\|", text), row
