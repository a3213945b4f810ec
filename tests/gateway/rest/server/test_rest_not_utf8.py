"""Header fields that are not UTF-8: refused or passed on, never a failure of the gateway."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from tests.gateway.rest.conftest import Gateway, ask, raw_exchange

RECORDS = "application/vnd.kafka.json.v2+json"


async def answer(gateway: Gateway, head: str, body: bytes = b"") -> tuple[int, Any]:
    data = f"{head}\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode("latin-1") + body
    async with asyncio.timeout(60):
        sent, _, content = (await raw_exchange(gateway.listener.bound, data)).partition(b"\r\n\r\n")
    return int(sent.split()[1]), content


@pytest.mark.parametrize("field", ["X-Forwarded-Path", "X-Forwarded-Prefix"])
@pytest.mark.parametrize("page", ["openapi", "openapi.yaml"])
async def test_a_forwarded_path_is_shown_percent_encoded(gateway: Gateway, field: str, page: str) -> None:
    status, content = await answer(gateway, f"GET /{page} HTTP/1.1\r\n{field}: /a\xff")
    assert status == 200
    assert b"/a%FF" in content


@pytest.mark.part("confluent")
async def test_a_consumers_address_has_the_forwarded_path_and_no_host_that_is_not_text(gateway: Gateway) -> None:
    create = "POST /consumers/g-latin HTTP/1.1\r\nContent-Type: application/vnd.kafka.v2+json\r\n"
    before = gateway.counts("consumers").created_total
    for forwarded in ("X-Forwarded-Host: \xff\r\nX-Forwarded-Proto: http", "Forwarded: host=\xff;proto=https"):
        assert (await answer(gateway, create + forwarded, b"{}"))[0] == 400
    assert (await answer(gateway, "GET /v3/clusters HTTP/1.1\r\nForwarded: host=\xff;proto=http"))[0] == 400
    assert gateway.counts("consumers").created_total == before, "a refused request leaves no consumer"
    status, content = await answer(gateway, f"{create}X-Forwarded-Path: /a\xff", b'{"name":"one"}')
    assert status == 200
    assert json.loads(content)["base_uri"].endswith("/a%FF/instances/one")
    async with aiohttp.ClientSession(gateway.url) as http:
        assert (await ask(http, "DELETE", "/consumers/g-latin/instances/one"))[0] == 204


async def test_a_last_event_id_that_is_not_text_is_a_bad_position(gateway: Gateway, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    status, content = await answer(gateway, f"GET /topics/{topic}/stream HTTP/1.1\r\nLast-Event-ID: \xff")
    assert (status, json.loads(content)["validation_errors"]) == (
        400,
        ["It is not UTF-8 - at header parameter `Last-Event-ID`"],
    )


async def test_a_keyed_request_may_have_any_content_type(gateway: Gateway, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    head = f"POST /topics/{topic} HTTP/1.1\r\nContent-Type: {RECORDS}; x=\xff\r\nIdempotency-Key: k"
    for _ in range(2):
        status, content = await answer(gateway, head, b'{"records":[{"value":1}]}')
        assert (status, json.loads(content)) == (200, {"offsets": [{"partition": 0, "offset": 0}]})
