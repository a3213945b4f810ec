"""Produce requests against a real broker; statuses and bodies are those of Strimzi's bridge where it is right."""

import asyncio
import base64
import json
import subprocess
from typing import Any

import aiohttp
import pytest

from gateway.settings.config import BudgetConfig
from tests.gateway.rest.conftest import (
    BINARY_RECORDS,
    JSON_RECORDS,
    TEXT_RECORDS,
    Gateway,
    ask,
    raw_exchange,
    read_topic,
    running_gateway,
)
from tests.support.waiting import wait_until


async def test_json_records_are_stored_in_order_and_answered_in_order(
    http: aiohttp.ClientSession, new_topic: Any, bootstrap: str
) -> None:
    topic = await new_topic()
    records = [
        {"key": "kitchen/temp", "value": {"celsius": 21.50}},
        {"value": None, "key": "gone"},
        {"value": "text", "partition": 2, "timestamp": 1700000000000},
        {"value": 7, "headers": [{"key": "correlation-id", "value": base64.b64encode(b"c-1").decode()}]},
    ]
    status, body = await ask(http, "POST", f"/topics/{topic}", {"records": records}, headers=JSON_RECORDS)
    assert status == 200
    results = body["offsets"]
    assert [set(result) for result in results] == [{"partition", "offset"}] * 4
    assert results[2]["partition"] == 2
    stored = {(record.partition, record.offset): record for record in await read_topic(bootstrap, topic, 4)}
    first, tombstone, third, fourth = (stored[result["partition"], result["offset"]] for result in results)
    assert (first.key, first.value) == (b"kitchen/temp", b'{"celsius":21.5}')
    assert (tombstone.key, tombstone.value) == (b"gone", None)
    assert (third.value, third.timestamp) == (b'"text"', 1700000000000)
    assert fourth.value == b"7"
    assert fourth.headers == (
        ("correlation-id", b"c-1"),
        ("content-type", b"application/json"),
        ("gw.protocol", b"http"),
        ("gw.client", b"anonymous"),
    )


async def test_binary_and_text_records(http: aiohttp.ClientSession, new_topic: Any, bootstrap: str) -> None:
    topic = await new_topic(partitions=1)
    binary = {"records": [{"key": "/w==", "value": base64.b64encode(bytes(range(256))).decode()}]}
    assert (await ask(http, "POST", f"/topics/{topic}", binary, headers=BINARY_RECORDS))[0] == 200
    text = {"records": [{"key": "ü", "value": "grüße"}]}
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    assert (await ask(http, "POST", f"/topics/{topic}", text, headers=TEXT_RECORDS | trace))[0] == 200
    first, second = await read_topic(bootstrap, topic, 2)
    assert (first.key, first.value) == (b"\xff", bytes(range(256)))
    assert first.headers[0] == ("content-type", b"application/octet-stream")
    assert (second.key, second.value) == ("ü".encode(), "grüße".encode())
    assert second.headers[0] == ("content-type", b"text/plain")
    assert second.headers[-1] == ("traceparent", trace["traceparent"].encode())


async def test_a_thousand_records_are_one_request(http: aiohttp.ClientSession, new_topic: Any, bootstrap: str) -> None:
    topic = await new_topic()
    records = [{"key": f"k{number % 10}", "value": number} for number in range(1000)]
    status, body = await ask(http, "POST", f"/topics/{topic}", {"records": records}, headers=JSON_RECORDS)
    assert status == 200
    by_place = {(one.partition, one.offset): one for one in await read_topic(bootstrap, topic, 1000)}
    for sent, result in zip(records, body["offsets"], strict=True):
        stored = by_place[result["partition"], result["offset"]]
        assert (stored.key, stored.value) == (sent["key"].encode(), str(sent["value"]).encode())  # type: ignore[attr-defined]


@pytest.mark.part("confluent")
async def test_records_of_a_request_without_keys_lie_in_one_partition_in_order(
    http: aiohttp.ClientSession, new_topic: Any
) -> None:
    """In JSON, of more than a batch, and in the other dialects."""
    topic = await new_topic(partitions=4)
    records = [{"value": "x" * 1000} for _ in range(300)]
    for path, headers in ((f"/topics/{topic}", JSON_RECORDS), (f"/v2/topics/{topic}", JSON_RECORDS)):
        status, body = await ask(http, "POST", path, {"records": records}, headers=headers)
        assert status == 200
        places = [(one["partition"], one["offset"]) for one in body["offsets"]]
        assert len({partition for partition, _ in places}) == 1
        assert [offset for _, offset in places] == list(range(places[0][1], places[0][1] + 300))


async def test_a_partition_in_the_path(http: aiohttp.ClientSession, new_topic: Any) -> None:
    topic = await new_topic()
    body = {"records": [{"value": 1}, {"value": 2}]}
    assert await ask(http, "POST", f"/topics/{topic}/partitions/1", body, headers=JSON_RECORDS) == (
        200,
        {"offsets": [{"partition": 1, "offset": 0}, {"partition": 1, "offset": 1}]},
    )
    both = {"records": [{"value": 1, "partition": 0}]}
    status, error = await ask(http, "POST", f"/topics/{topic}/partitions/1", both, headers=JSON_RECORDS)
    assert status == 400
    assert "partition" in error["validation_errors"][0]
    assert (await ask(http, "POST", f"/topics/{topic}/partitions/x", body, headers=JSON_RECORDS))[0] == 400


async def test_failures_of_some_records_stand_in_their_places(http: aiohttp.ClientSession, new_topic: Any) -> None:
    topic = await new_topic(partitions=2, max_message_bytes="2000")
    records = [{"value": 1}, {"value": 2, "partition": 9}, {"value": "x" * 5000}, {"value": 3}]
    status, body = await ask(http, "POST", f"/topics/{topic}", {"records": records}, headers=JSON_RECORDS)
    assert status == 200
    codes = [result.get("error_code") for result in body["offsets"]]
    assert codes == [None, 404, 413, None]
    assert body["offsets"][1]["message"]


@pytest.mark.parametrize(("record", "status"), [({"value": 2, "partition": 9}, 404), ({"value": "x" * 5000}, 413)])
async def test_one_failure_of_all_records_is_the_status_of_the_request(
    http: aiohttp.ClientSession, new_topic: Any, record: dict[str, Any], status: int
) -> None:
    topic = await new_topic(partitions=2, max_message_bytes="2000")
    answer = await ask(http, "POST", f"/topics/{topic}", {"records": [record] * 2}, headers=JSON_RECORDS)
    assert answer[0] == status
    assert (await ask(http, "POST", f"/topics/{topic}", {"records": [{"value": 1}]}, headers=JSON_RECORDS))[0] == 200


async def test_an_unknown_topic_is_an_immediate_404_if_it_may_not_be_created(bootstrap: str) -> None:
    async with running_gateway(bootstrap, create=False) as gateway, aiohttp.ClientSession(gateway.url) as http:
        for topic in ("no-such-topic", "bad name", "x" * 300):
            body = {"records": [{"value": 1}]}
            async with asyncio.timeout(60):
                assert (await ask(http, "POST", f"/topics/{topic}", body, headers=JSON_RECORDS))[0] == 404


async def test_internal_topics_are_not_reachable(http: aiohttp.ClientSession) -> None:
    body = {"records": [{"value": 1}]}
    assert (await ask(http, "POST", "/topics/__consumer_offsets", body, headers=JSON_RECORDS))[0] == 403
    assert (await ask(http, "GET", "/topics/__consumer_offsets"))[0] == 404
    assert "__consumer_offsets" not in (await ask(http, "GET", "/topics"))[1]


async def test_async_is_answered_without_waiting(http: aiohttp.ClientSession, new_topic: Any, bootstrap: str) -> None:
    topic = await new_topic(partitions=1)
    body = {"records": [{"value": 1}]}
    assert await ask(http, "POST", f"/topics/{topic}?async=true", body, headers=JSON_RECORDS) == (204, None)
    assert (await ask(http, "POST", f"/topics/{topic}?async=maybe", body, headers=JSON_RECORDS))[0] == 400
    assert [record.value for record in await read_topic(bootstrap, topic, 1)] == [b"1"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{}", 422),
        (b'{"records":[]}', 200),
        (b'{"records":[{"foo":1}]}', 400),
        (b'{"records":[{"value":1,"partition":-1}]}', 422),
        (b'{"records":[{"value":1,"timestamp":-1}]}', 422),
        (b'{"records":[{"value":1,"timestamp":1767225600000000000}]}', 422),
        (b"not json", 400),
        (b"", 400),
    ],
)
async def test_bad_bodies(http: aiohttp.ClientSession, new_topic: Any, body: bytes, status: int) -> None:
    topic = await new_topic(partitions=1)
    answer = await ask(http, "POST", f"/topics/{topic}", body, headers=JSON_RECORDS)
    assert answer[0] == status
    if status == 200:
        assert answer[1] == {"offsets": []}


async def test_a_body_over_the_limit_is_refused_before_it_is_read(bootstrap: str) -> None:
    async with running_gateway(bootstrap, http={"max_body_bytes": 1024}) as gateway:
        address = gateway.listener.bound
        head = (
            b"POST /topics/t HTTP/1.1\r\nHost: x\r\nContent-Type: application/vnd.kafka.json.v2+json\r\n"
            b"Content-Length: 1000000\r\nExpect: 100-continue\r\n\r\n"
        )
        answer = await raw_exchange(address, head)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"100 Continue" not in answer
        assert b"connection: close" in answer.lower()
        async with aiohttp.ClientSession(gateway.url) as http:

            async def pieces() -> Any:
                for _ in range(50):
                    yield b"x" * 1000

            async with http.post("/topics/t", data=pieces(), headers=JSON_RECORDS) as response:
                assert response.status == 413
                assert (await response.json(content_type=None))["error_code"] == 413
            many = {"records": [{"value": 1}]}
            assert (await ask(http, "POST", "/topics/after-413", many, headers=JSON_RECORDS))[0] == 200
        assert gateway.listener.statistics().produce.uploading_bytes == 0


async def test_a_client_that_expects_100_gets_it(gateway: Gateway, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    host, _, port = gateway.listener.bound.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"records":[{"value":1}]}'
    writer.write(
        f"POST /topics/{topic} HTTP/1.1\r\nHost: x\r\nContent-Type: application/vnd.kafka.json.v2+json\r\n"
        f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n".encode()
    )
    async with asyncio.timeout(60):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_a_body_that_comes_too_slowly_is_given_up(bootstrap: str) -> None:
    async with running_gateway(bootstrap, http={"header_timeout_s": 0.2}) as gateway:
        head = (
            b"POST /topics/t HTTP/1.1\r\nHost: x\r\nContent-Type: application/vnd.kafka.json.v2+json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
        assert (await raw_exchange(gateway.listener.bound, head)).startswith(b"HTTP/1.1 408 ")
        assert await raw_exchange(gateway.listener.bound, b"POST /topics/t HTTP/1.1\r\nHost: x") == b""


async def test_a_shut_gate_refuses_before_the_body(bootstrap: str) -> None:
    limits = BudgetConfig(process_bytes=1 << 20)
    async with running_gateway(bootstrap, budget=limits) as gateway:
        gateway.publisher.budget.take(1 << 20)
        head = (
            b"POST /topics/t HTTP/1.1\r\nHost: x\r\nContent-Type: application/vnd.kafka.json.v2+json\r\n"
            b"Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n"
        )
        answer = (await raw_exchange(gateway.listener.bound, head)).lower()
        assert answer.startswith(b"http/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in answer
        gateway.publisher.budget.give(1 << 20)
        async with aiohttp.ClientSession(gateway.url) as http:
            body = {"records": [{"value": 1}]}
            assert (await ask(http, "POST", "/topics/gate-open", body, headers=JSON_RECORDS))[0] == 200
        assert gateway.listener.statistics().produce.refused_total == 1


async def test_too_many_concurrent_requests_are_refused(bootstrap: str) -> None:
    async with running_gateway(bootstrap, http={"max_concurrent": 1}) as gateway:
        host, _, port = gateway.listener.bound.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = b"POST /topics/t HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 25\r\n\r\n"
        writer.write(head)  # its body is never sent
        await wait_until(lambda: gateway.listener.statistics().produce.active == 1)
        async with aiohttp.ClientSession(gateway.url) as http:
            body = {"records": [{"value": 1}]}
            assert (await ask(http, "POST", "/topics/one-slot", body, headers=JSON_RECORDS))[0] == 503
            writer.close()  # disconnected in the middle of its upload
            await wait_until(lambda: gateway.listener.statistics().produce.active == 0)
            assert (await ask(http, "POST", "/topics/one-slot", body, headers=JSON_RECORDS))[0] == 200


async def test_curl_sends_and_reads(gateway: Gateway, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)

    async def curl(*arguments: str) -> bytes:
        command = ["curl", "--silent", "--show-error", "--max-time", "20", *arguments]
        done = await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
        return done.stdout

    sent = await curl(
        "-X", "POST", f"{gateway.url}/topics/{topic}", "-H", "content-type: application/vnd.kafka.json.v2+json",
        "-d", '{"records":[{"key":"a","value":{"n":1}}]}',
    )  # fmt: skip
    assert json.loads(sent) == {"offsets": [{"partition": 0, "offset": 0}]}
    big = json.dumps({"records": [{"value": "y" * 100_000}]})  # curl asks to continue from 1 MiB, or 1 KiB before
    sent = await curl(
        f"{gateway.url}/topics/{topic}", "-H", "content-type: application/vnd.kafka.json.v2+json",
        "-H", "Expect: 100-continue", "-d", big,
    )  # fmt: skip
    assert json.loads(sent) == {"offsets": [{"partition": 0, "offset": 1}]}
    created = await curl(
        f"{gateway.url}/consumers/curl-{topic}", "-H", "content-type: application/vnd.kafka.v2+json",
        "-d", '{"name":"c","format":"json","auto.offset.reset":"earliest"}',
    )  # fmt: skip
    base = json.loads(created)["base_uri"]
    await curl(
        f"{base}/subscription", "-H", "content-type: application/vnd.kafka.v2+json", "-d", f'{{"topics":["{topic}"]}}'
    )
    records = json.loads(await curl(f"{base}/records?timeout=10000"))  # curl accepts */*
    assert [(one["key"], one["offset"]) for one in records] == [("a", 0), (None, 1)]
    await curl("-X", "DELETE", base)
