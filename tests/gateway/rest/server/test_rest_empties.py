"""Every operation with empty lists, objects, strings and null in its body: never a 500."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.gateway.rest.conftest import CONTROL, JSON_RECORDS, Gateway, ask

V3 = {"Content-Type": "application/json"}
NAME = "/consumers/GROUP/instances/one"
PLACES = {"offsets": [{"topic": "TOPIC", "partition": 0, "offset": 0}]}
PARTITIONS = {"partitions": [{"topic": "TOPIC", "partition": 0}]}
RECORD = {"key": "k", "value": 1, "headers": [{"key": "h", "value": "aA=="}], "partition": 0, "timestamp": 0}
EVENT = {"specversion": "1.0", "id": "1", "source": "s", "type": "t", "data": {}, "datacontenttype": "application/json"}
OPERATIONS: list[tuple[str, str, dict[str, str], Any]] = [
    ("POST", "/topics/TOPIC", JSON_RECORDS, {"records": [RECORD]}),
    ("POST", "/topics/TOPIC/partitions/0", JSON_RECORDS, {"records": [{"value": 1}]}),
    ("POST", "/topics/TOPIC/events", {"Content-Type": "application/cloudevents+json"}, EVENT),
    ("POST", "/topics/TOPIC/events", {"Content-Type": "application/cloudevents-batch+json"}, [EVENT]),
    ("POST", "/topics/TOPIC/records", {"Content-Type": "application/x-ndjson"}, RECORD),
    ("POST", "/requests/TOPIC%2Fa?timeout=1", V3, {"a": 1}),
    ("POST", "/admin/topics", V3, {"topic_name": "TOPIC-new", "partitions_count": 1, "replication_factor": 1}),
    ("PATCH", "/admin/topics/TOPIC/configs", V3, {"configs": {"retention.ms": "1000"}}),
    ("POST", f"{NAME}/subscription", CONTROL, {"topics": ["TOPIC"]}),
    ("POST", f"{NAME}/subscription", CONTROL, {"topic_pattern": "TOPIC"}),
    ("POST", f"{NAME}/assignments", CONTROL, PARTITIONS),
    ("POST", f"{NAME}/offsets", CONTROL, PLACES),
    ("POST", f"{NAME}/positions", CONTROL, PLACES),
    ("POST", f"{NAME}/positions/beginning", CONTROL, PARTITIONS),
    ("POST", f"{NAME}/positions/end", CONTROL, PARTITIONS),
    ("POST", "/consumers/GROUP", CONTROL, {"name": "two", "format": "json", "auto.offset.reset": "earliest"}),
    ("POST", "/v2/topics/TOPIC", JSON_RECORDS, {"records": [RECORD], "key_schema": "", "value_schema_id": 1}),
    ("POST", f"/v2{NAME}/subscription", CONTROL, {"topics": ["TOPIC"]}),
    ("POST", f"/v2{NAME}/assignments", CONTROL, PARTITIONS),
    ("POST", f"/v2{NAME}/offsets", CONTROL, PLACES),
    ("GET", f"/v2{NAME}/offsets", CONTROL, PARTITIONS),
    ("POST", f"/v2{NAME}/positions", CONTROL, PLACES),
    ("POST", f"/v2{NAME}/positions/beginning", CONTROL, PARTITIONS),
    ("POST", f"/v2{NAME}/positions/end", CONTROL, PARTITIONS),
    ("POST", "/v2/consumers/GROUP", CONTROL, {"name": "two", "format": "json"}),
    ("POST", "/v3/clusters/CLUSTER/topics/TOPIC/records", V3, {"key": {"type": "STRING", "data": "k"},
        "value": {"type": "JSON", "data": {}}, "headers": [{"name": "h", "value": "aA=="}], "partition_id": 0}),
    ("POST", "/v3/clusters/CLUSTER/topics/TOPIC/records:batch", V3,
        {"entries": [{"id": "1", "value": {"type": "JSON", "data": 1}}]}),
]  # fmt: skip
EMPTY: tuple[Any, ...] = ([], {}, "", None, [None], [{}], [[]], 0, -1, False)


def emptied(whole: Any) -> Iterator[Any]:
    """Yield the body with each of its parts, or the whole, replaced by each empty value or left out."""
    yield from EMPTY
    parts = whole.items() if isinstance(whole, dict) else enumerate(whole) if isinstance(whole, list) else ()
    for place, part in parts:
        if isinstance(whole, dict):
            yield {name: value for name, value in whole.items() if name != place}
        for other in emptied(part):
            changed = whole.copy()
            changed[place] = other
            yield changed


@pytest.mark.part("confluent")
@pytest.mark.parametrize("number", range(len(OPERATIONS)))
async def test_nothing_where_there_is_something(gateway: Gateway, new_topic: Any, number: int) -> None:
    method, path, headers, body = OPERATIONS[number]
    topic = await new_topic(partitions=1)
    connector = aiohttp.TCPConnector(force_close=True)  # a refused request may close it after the answer
    async with aiohttp.ClientSession(gateway.url, connector=connector) as http:
        cluster = ""
        if "CLUSTER" in path:
            async with http.get("/v3/clusters") as clusters:
                cluster = (await clusters.json())["data"][0]["cluster_id"]
        path = path.replace("TOPIC", topic).replace("GROUP", topic).replace("CLUSTER", cluster)
        consumer = f"/consumers/{topic}/instances/one"
        assert (await ask(http, "POST", f"/consumers/{topic}", {"name": "one"}, headers=CONTROL))[0] == 200
        found = []
        for prepared in (None, ("subscription", {"topics": [topic]}), ("assignments", PARTITIONS)):
            if prepared is not None and consumer not in path:
                continue
            if prepared is not None:
                await ask(http, "DELETE", f"{consumer}/subscription")
                text = json.dumps(prepared[1]).replace("TOPIC", topic).encode()
                await ask(http, "POST", f"{consumer}/{prepared[0]}", text, headers=CONTROL)
            bodies = (json.dumps(one).replace("TOPIC", topic).encode() for one in emptied(body))
            for text in itertools.chain((b"", b"\n", b"\0"), bodies):
                async with http.request(method, path, data=text, headers=headers) as answer:
                    said = await answer.read()
                    if answer.status >= 500 and answer.status != 504:
                        found.append((text, answer.status, said))
        assert found == []
        await ask(http, "DELETE", consumer)
