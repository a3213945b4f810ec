"""Changes valid values in schemathesis's requests to names that exist, so that these do not all end with a 404.

The environment names a topic with three partitions. Values that violate the contract are not changed.
"""

import json
import os
import re
from typing import Any

import schemathesis

TOPIC = os.environ["TRIVIUM_TEST_TOPIC"]
PARTITIONS = 3
LARGEST = 2**31 - 1
NEW_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
NEW_TOPICS = 4  # at most this many are created
POLL_MS = 20


def is_partition(value: Any) -> bool:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return whole and not isinstance(value, bool) and 0 <= value <= LARGEST


def redirected(entry: Any) -> Any:
    """Change an entry of a list of partitions, offsets or records to the test's topic and partitions."""
    if not isinstance(entry, dict):
        return entry
    entry = dict(entry)
    if isinstance(entry.get("topic"), str):
        entry["topic"] = TOPIC
    if is_partition(entry.get("partition")):
        entry["partition"] %= PARTITIONS
    return entry


@schemathesis.serializer("application/x-ndjson")
def lines(context: Any, value: Any) -> bytes:
    """Serialize any value, on several lines if it is nested."""
    return value if isinstance(value, bytes) else json.dumps(value, indent=0).encode()


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: dict[str, Any] | None) -> dict[str, Any] | None:
    name = path_parameters.get("topicname") if path_parameters else None
    if path_parameters and isinstance(name, str) and len(name) > 1:
        deleted = context.operation is not None and context.operation.method == "delete"
        path_parameters["topicname"] = f"{TOPIC}-{len(name) % NEW_TOPICS}" if deleted else TOPIC
    address = path_parameters.get("address") if path_parameters else None
    if path_parameters and isinstance(address, str) and len(address) > 1:
        path_parameters["address"] = f"{TOPIC}-nobody/there"  # a request to a real device would wait for its answer
    return path_parameters


@schemathesis.hook
def map_query(context: Any, query: dict[str, Any] | None) -> dict[str, Any] | None:
    for name in ("timeout", "wait", "duration"):
        if query and is_partition(query.get(name)):
            query[name] %= POLL_MS
    return query


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    for name in ("records", "partitions", "offsets"):
        if isinstance(body.get(name), list):
            body[name] = [redirected(entry) for entry in body[name]]
    if isinstance(body.get("topics"), list):
        body["topics"] = [TOPIC if isinstance(topic, str) and topic else topic for topic in body["topics"]]
    name = body.get("topic_name")
    if isinstance(name, str) and NEW_TOPIC.fullmatch(name):
        body["topic_name"] = f"{TOPIC}-{len(name) % NEW_TOPICS}"
        if is_partition(body.get("partitions_count")) and 1 <= body["partitions_count"] <= 10_000:
            body["partitions_count"] = body["partitions_count"] % PARTITIONS + 1
        if is_partition(body.get("replication_factor")) and 1 <= body["replication_factor"] <= 2**15 - 1:
            body["replication_factor"] = 1
    return body


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    if case.operation.path == "/topics/{topicname}/stream" and "duration" not in (case.query or {}):
        case.query["duration"] = POLL_MS  # otherwise the stream would not end
