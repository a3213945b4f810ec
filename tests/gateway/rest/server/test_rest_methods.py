"""HEAD on everything that has GET, and OPTIONS (RFC 9110 sections 9.3.2 and 9.3.7)."""

import json
from typing import Any

import aiohttp
import pytest

from gateway.rest.server.openapi_pages import load_contract
from tests.gateway.rest.conftest import CONTROL, JSON_RECORDS, Gateway, ask, raw_exchange

GETS = sorted(operation.template for operation in load_contract().operations.values() if operation.method == "GET")
CHANGING = {"date", "content-length", "transfer-encoding", "retry-after", "etag"}
"""Fields that may differ between two requests, or come from making the content (RFC 9110 section 9.3.2)."""


async def exchange(gateway: Gateway, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
    """Status, fields and body."""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    answer = await raw_exchange(gateway.listener.bound, f"{head}Accept: */*\r\n\r\n".encode())
    lines, _, body = answer.partition(b"\r\n\r\n")
    fields = (line.decode().split(": ", 1) for line in lines.splitlines()[1:])
    return int(lines.split()[1]), {name.lower(): value for name, value in fields}, body


@pytest.mark.part("confluent")
@pytest.mark.parametrize("template", GETS)
async def test_head_has_the_fields_of_get_and_consumes_nothing(gateway: Gateway, new_topic: Any, template: str) -> None:
    topic = await new_topic(partitions=1)
    async with aiohttp.ClientSession(gateway.url) as http:
        async with http.get("/v3/clusters") as clusters:
            cluster = (await clusters.json())["data"][0]["cluster_id"]
        assert (await ask(http, "POST", f"/topics/{topic}", {"records": [{"value": 1}]}, headers=JSON_RECORDS))[
            0
        ] == 200
        options = {"name": "one", "format": "json", "auto.offset.reset": "earliest"}
        assert (await ask(http, "POST", f"/consumers/{topic}", options, headers=CONTROL))[0] == 200
        consumer = f"/consumers/{topic}/instances/one"
        partitions = {"partitions": [{"topic": topic, "partition": 0}]}
        assert (await ask(http, "POST", f"{consumer}/assignments", partitions, headers=CONTROL))[0] == 204
        values = {"topicname": topic, "partitionid": "0", "groupid": topic, "name": "one", "cluster_id": cluster}
        path = template
        for name, value in values.items():
            path = path.replace(f"{{{name}}}", value)
        path = path.replace("{file}", "swagger-ui.css")
        if template.endswith("/stream"):
            path += "?limit=1&from=beginning"
        status, fields, body = await exchange(gateway, "HEAD", path)
        assert (status < 500, body) == (True, b"")
        assert "HEAD" in (await exchange(gateway, "PUT", path))[1]["allow"].split(", ")
        if template.endswith("/instances/{name}/records"):
            async with http.get(f"{path}?timeout=20000", headers={"Accept": JSON_RECORDS["Content-Type"]}) as records:
                assert [record["value"] for record in await records.json(content_type=None)] == [1]
        got, get_fields, _ = await exchange(gateway, "GET", path)
        assert status == got
        assert {name for name in fields if name not in CHANGING} <= get_fields.keys()
        if template != "/docs/{file}":
            assert fields.get("content-type") == get_fields.get("content-type")
        await ask(http, "DELETE", consumer)


async def test_the_methods_that_there_are(gateway: Gateway) -> None:
    status, fields, body = await exchange(gateway, "OPTIONS", "*")
    assert (status, body) == (204, b"")
    assert fields["allow"] == "DELETE, GET, HEAD, PATCH, POST"
    status, fields, body = await exchange(gateway, "OPTIONS", "/topics")
    assert (status, fields["allow"], json.loads(body)["error_code"]) == (405, "GET, HEAD", 405)
    status, _, body = await exchange(gateway, "HEAD", "/no/such/thing")
    assert (status, body) == (404, b"")
