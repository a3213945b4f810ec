"""Stateless reads: pages from any position, each with the position of the next, and no state in between."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
from aiokafka import AIOKafkaProducer

from gateway.security.identity import Identity
from gateway.security.rights.access_rules import ListedRules
from gateway.settings.config import AccessRule, SecurityConfig
from tests.conftest import NewTopicFactory
from tests.gateway.rest.conftest import JSON_RECORDS, Gateway, ask, running_gateway
from tests.support.waiting import wait_until

LINES = {"Accept": "application/x-ndjson"}


async def store(http: aiohttp.ClientSession, topic: str, records: list[dict[str, Any]]) -> None:
    status, answer = await ask(http, "POST", f"/topics/{topic}", {"records": records}, headers=JSON_RECORDS)
    assert status == 200
    assert all("offset" in place for place in answer["offsets"])


async def page(http: aiohttp.ClientSession, address: str, **headers: str) -> tuple[aiohttp.ClientResponse, list[Any]]:
    async with http.get(address, headers=headers) as response:
        body = await response.read()
        assert response.status == 200, body
        if response.content_type == "application/x-ndjson":
            return response, [json.loads(line) for line in body.splitlines()]
        return response, json.loads(body)


async def test_pages_follow_each_other_to_the_end(http: aiohttp.ClientSession, new_topic: NewTopicFactory) -> None:
    topic = await new_topic(partitions=2)
    await store(http, topic, [{"value": number, "partition": number % 2} for number in range(25)])
    seen: list[tuple[int, int, int]] = []
    address = f"/topics/{topic}/records?limit=4"
    for _ in range(7):
        response, records = await page(http, address)
        seen += [(record["partition"], record["offset"], record["value"]) for record in records]
        assert response.headers["End-Position"] == "0:13,1:12"
        link = response.headers["Link"]
        assert link.endswith('>; rel="next"')
        address = f"/topics/{topic}/records" + link[1:].partition(">")[0]
    assert sorted(seen) == [(number % 2, number // 2, number) for number in sorted(range(25), key=lambda n: n % 2)]
    assert response.headers["Next-Position"] == "0:13,1:12"
    response, records = await page(http, address)
    assert records == []
    assert "ETag" not in response.headers


async def test_any_page_size_and_any_number_of_bytes_bring_every_record(
    http: aiohttp.ClientSession, new_topic: NewTopicFactory
) -> None:
    topic = await new_topic(partitions=1)
    await store(http, topic, [{"value": "x" * size} for size in (1, 500, 3, 0, 2000, 7)])
    for limits in ("max_bytes=0", "max_bytes=600", "limit=1", "limit=5&max_bytes=1200"):
        for media in ("application/json", "application/x-ndjson", "application/vnd.kafka.text.v2+json"):
            position, offsets = "0:0", []
            while position != "0:6":
                response, records = await page(http, f"/topics/{topic}/records?from={position}&{limits}", Accept=media)
                assert records, "a page brings something"
                offsets += [record["offset"] for record in records]
                position = response.headers["Next-Position"]
            assert offsets == list(range(6)), (limits, media)


async def test_a_full_page_is_revalidated_with_304(
    gateway: Gateway, http: aiohttp.ClientSession, new_topic: NewTopicFactory
) -> None:
    topic = await new_topic(partitions=1)
    await store(http, topic, [{"value": number} for number in range(10)])
    address = f"/topics/{topic}/records?partition=0&offset=2&limit=3"
    response, _ = await page(http, address)
    tag = response.headers["ETag"]
    await store(http, topic, [{"value": 10}])
    again, _ = await page(http, address)
    assert again.headers["ETag"] == tag
    assert again.headers["Cache-Control"] == "private, no-cache"
    assert again.headers["Vary"] == "Accept"
    before = gateway.counts("reads").unchanged_total
    for known in (tag, f'"other", W/{tag}', "*"):
        async with http.get(address, headers={"If-None-Match": known}) as unchanged:
            assert unchanged.status == 304
            assert await unchanged.read() == b""
            assert unchanged.headers["Next-Position"] == "0:5"
    assert gateway.counts("reads").unchanged_total == before + 3
    for unknown in ('"other"', '"*"'):
        async with http.get(address, headers={"If-None-Match": unknown}) as changed:
            assert changed.status == 200
    other, _ = await page(http, f"/topics/{topic}/records?partition=0&offset=3&limit=3")
    assert other.headers["ETag"] != tag


async def test_filters_skip_other_records(http: aiohttp.ClientSession, new_topic: NewTopicFactory) -> None:
    topic = await new_topic(partitions=1)
    red = [{"key": "colour", "value": "cmVk"}]
    await store(
        http, topic, [{"key": f"k{n % 4}", "value": n, "headers": red if n % 3 == 0 else []} for n in range(24)]
    )
    _, records = await page(http, f"/topics/{topic}/records?key=k1&key=k3&header=colour:red")
    assert [record["value"] for record in records] == [3, 9, 15, 21]
    response, records = await page(http, f"/topics/{topic}/records?key=none&limit=2")
    assert records == []
    assert response.headers["Next-Position"] == "0:24", "what was passed over is behind us"


async def test_a_read_at_the_end_waits_for_a_record_without_polling_kafka(
    gateway: Gateway, http: aiohttp.ClientSession, new_topic: NewTopicFactory
) -> None:
    topic = await new_topic(partitions=2)
    await store(http, topic, [{"value": 0, "partition": 1}])
    waiting = asyncio.create_task(page(http, f"/topics/{topic}/records?from=end&wait=60000&key=wanted"))
    await wait_until(lambda: gateway.counts("reads").waiting == 1)
    await store(http, topic, [{"key": "other", "value": 1}])
    await wait_until(lambda: waiting.done() or gateway.counts("reads").waiting == 1)
    await store(http, topic, [{"key": "wanted", "value": 2, "partition": 0}])
    response, records = await waiting
    assert [record["value"] for record in records] == [2]
    response, records = await page(http, f"/topics/{topic}/records?from=end&wait=1")
    assert records == []
    assert response.headers["Next-Position"] == response.headers["End-Position"]


async def test_a_client_that_leaves_while_it_waits_is_not_waited_for(
    gateway: Gateway, new_topic: NewTopicFactory
) -> None:
    topic = await new_topic(partitions=1)
    async with aiohttp.ClientSession(gateway.url) as http:
        waiting = asyncio.create_task(page(http, f"/topics/{topic}/records?from=end&wait=60000"))
        await wait_until(lambda: gateway.counts("reads").waiting == 1)
        waiting.cancel()
    await wait_until(lambda: gateway.counts("reads").waiting == 0)


async def test_a_right_that_is_revoked_during_the_wait_shows_no_record(
    bootstrap: str, new_topic: NewTopicFactory
) -> None:
    topic = await new_topic(partitions=1)
    async with running_gateway(bootstrap) as gateway, aiohttp.ClientSession(gateway.url) as http:
        access = gateway.listener._dispatcher.login._access_list
        access.use(ListedRules([AccessRule(topic=topic)]))
        waiting = asyncio.create_task(ask(http, "GET", f"/topics/{topic}/records?from=end&wait=60000"))
        await wait_until(lambda: gateway.counts("reads").waiting == 1)
        access.use(_Changed([AccessRule(topic=topic, action="publish")]))
        await store(http, topic, [{"value": 1}])
        assert (await waiting)[0] == 403


class _Changed(ListedRules):
    """Rules that replace others, as Kafka's ACLs do."""

    def may_change_for(self, identity: Identity) -> bool:
        return True


async def test_places(http: aiohttp.ClientSession, new_topic: NewTopicFactory) -> None:
    topic = await new_topic(partitions=2)
    await store(http, topic, [{"value": n, "partition": n % 2, "timestamp": 1000 + n} for n in range(6)])
    path = f"/topics/{topic}/records"
    for query, values in (
        ("from=beginning&partition=1", [1, 3, 5]),
        ("partition=0&offset=1", [2, 4]),
        ("timestamp=1003", [3, 4, 5]),
        ("timestamp=99999", []),
        ("from=0:2,1:1", [3, 4, 5]),
        ("from=1:2", [0, 2, 4, 5]),
        ("from=end", []),
        ("partition=1&offset=3", []),
    ):
        _, records = await page(http, f"{path}?{query}")
        assert sorted(record["value"] for record in records) == values, query
    for query, status in (
        ("partition=0&offset=4", 416),
        ("from=0:4", 416),
        ("from=7:0", 416),
        ("partition=7", 404),
        ("offset=1", 422),
        ("from=end&timestamp=1", 422),
        ("from=0:1,0:2", 422),
        ("from=x", 400),
        ("limit=0", 400),
        ("header=novalue", 400),
    ):
        assert (await ask(http, "GET", f"{path}?{query}"))[0] == status, query
    assert (await ask(http, "GET", "/topics/__internal/records"))[0] == 403
    assert (await ask(http, "GET", path, headers={"Accept": "image/png"}))[0] == 406


async def test_values_that_are_not_json_are_marked_and_deleted_records_are_skipped(
    bootstrap: str, http: aiohttp.ClientSession, new_topic: NewTopicFactory
) -> None:
    topic = await new_topic(partitions=1)
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        await producer.send_and_wait(topic, b"\xff", key=b"k")
        await producer.send_and_wait(topic, b'{"a":\n 1}', key=b"k")
        await producer.send_and_wait(topic, None, key=b"k")
    _, records = await page(http, f"/topics/{topic}/records", **LINES)
    assert [(record["value"], record.get("value_format")) for record in records] == [
        ("/w==", "binary"), ({"a": 1}, None), (None, None),
    ]  # fmt: skip
    _, records = await page(http, f"/topics/{topic}/records?format=binary", **LINES)
    assert [record["value"] for record in records] == ["/w==", "eyJhIjoKIDF9", None]


async def test_keys_that_are_not_allowed_are_not_seen(bootstrap: str, new_topic: NewTopicFactory) -> None:
    topic = await new_topic(partitions=1)
    rules = (
        AccessRule(action="subscribe", topic=f"{topic}/open/#"),
        AccessRule(action="publish", topic=f"{topic}/#"),
    )
    security = SecurityConfig(access=rules)
    async with (
        running_gateway(bootstrap, security=security) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        await store(http, topic, [{"key": key, "value": key} for key in ("open/a", "shut/a", "open/b")])
        _, records = await page(http, f"/topics/{topic}/records")
        assert [record["value"] for record in records] == ["open/a", "open/b"]
        assert (await ask(http, "GET", "/topics/other/records"))[0] == 403


async def test_a_gateway_that_stops_answers_waiting_reads(bootstrap: str, new_topic: NewTopicFactory) -> None:
    topic = await new_topic(partitions=1)
    async with running_gateway(bootstrap) as gateway, aiohttp.ClientSession(gateway.url) as http:
        waiting = asyncio.create_task(page(http, f"/topics/{topic}/records?from=end&wait=60000"))
        await wait_until(lambda: gateway.counts("reads").waiting == 1)
        gateway.listener.stop_receiving()
        async with asyncio.timeout(60):
            _, records = await waiting
        assert records == []


async def test_a_read_that_waits_ends_with_its_right(bootstrap: str, new_topic: NewTopicFactory) -> None:
    topic = await new_topic(partitions=1)
    both = [AccessRule(action=action, kafka=topic) for action in ("publish", "subscribe")]
    async with running_gateway(bootstrap) as gateway, aiohttp.ClientSession(gateway.url) as http:
        gateway.use_rules(*both)
        await store(http, topic, [{"value": "before"}])
        reading = ask(http, "GET", f"/topics/{topic}/records?from=end&wait=60000")
        waiting = asyncio.create_task(reading)
        await wait_until(lambda: gateway.counts("reads").waiting == 1)
        gateway.use_rules(both[0])
        await store(http, topic, [{"value": "after"}])
        async with asyncio.timeout(60):
            assert (await waiting)[0] == 403
