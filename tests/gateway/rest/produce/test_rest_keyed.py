"""Requests with an Idempotency-Key: stored once, whatever happens between the first and the last attempt."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiokafka import AIOKafkaProducer

from gateway.rest.produce.idempotency import KEY_FIELD, KeyedRequests
from gateway.rest.produce.idempotency_table import KeptRequest, RequestTable
from mapping.record import Received
from tests.gateway.rest.conftest import JSON_RECORDS, ask, read_topic, running_gateway
from tests.support.waiting import wait_until

RECORDS = {"records": [{"key": "a", "value": 1}, {"value": 2}, {"key": "b", "value": 3}]}


def keyed(key: str) -> dict[str, str]:
    return {**JSON_RECORDS, KEY_FIELD: key}


async def test_a_repeated_request_is_answered_from_the_first_also_by_another_process(
    bootstrap: str, new_topic: Any, tmp_path: Path
) -> None:
    topic = await new_topic()
    key = 'the key, with "quotes"'
    async with running_gateway(bootstrap, data_dir=tmp_path) as gateway, aiohttp.ClientSession(gateway.url) as http:
        first = await ask(http, "POST", f"/topics/{topic}", RECORDS, headers=keyed(key))
        assert first[0] == 200
        assert await ask(http, "POST", f"/topics/{topic}", RECORDS, headers=keyed(f'"{key}"')) == first
        other = {"records": [{"value": 9}]}
        assert (await ask(http, "POST", f"/topics/{topic}", other, headers=keyed(key)))[0] == 422
        assert (await ask(http, "POST", f"/topics/{topic}/partitions/1", other, headers=keyed(key)))[0] == 200
        assert gateway.listener.statistics().keyed.replayed_total == 1
    async with (
        running_gateway(bootstrap, data_dir=tmp_path / "another") as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        body = json.dumps(RECORDS).encode()
        async with http.post(f"/topics/{topic}", data=body, headers=keyed(key)) as answer:
            assert answer.headers["Idempotency-Replayed"] == "true"
            assert (answer.status, await answer.json(content_type=None)) == first
    assert len(await read_topic(bootstrap, topic, 4)) == 4


async def test_the_answer_to_a_request_that_kafka_refuses_is_kept_too(
    bootstrap: str, new_topic: Any, tmp_path: Path
) -> None:
    topic = await new_topic(partitions=1)
    async with running_gateway(bootstrap, data_dir=tmp_path) as gateway, aiohttp.ClientSession(gateway.url) as http:
        body = {"records": [{"value": 1, "partition": 7}]}
        for _ in range(2):
            assert (await ask(http, "POST", f"/topics/{topic}", body, headers=keyed("k1")))[0] == 404
        assert gateway.listener.statistics().keyed.replayed_total == 1


@pytest.mark.parametrize("stored", [0, 2, 3])
async def test_an_unfinished_attempt_is_completed(
    bootstrap: str, new_topic: Any, tmp_path: Path, stored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway crashes when `stored` records are stored, before its answer is."""
    topic = await new_topic(partitions=2)
    body = json.dumps(RECORDS).encode()
    send = KeyedRequests._send
    died = asyncio.Event()

    async def die(self: KeyedRequests, name: str, grant: Any, records: Any, found: Any) -> Any:
        if stored:
            await send(self, name, grant, records[:stored], found)
        died.set()
        raise asyncio.CancelledError

    with monkeypatch.context() as patched:
        patched.setattr(KeyedRequests, "_send", die)
        async with running_gateway(bootstrap, data_dir=tmp_path) as gateway:
            head = f"POST /topics/{topic} HTTP/1.1\r\nHost: h\r\n" + "".join(
                f"{field}: {value}\r\n" for field, value in keyed("k").items()
            )
            host, _, port = gateway.listener.bound.rpartition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            async with asyncio.timeout(60):
                await died.wait()
            writer.close()
            await wait_until(lambda: gateway.listener.statistics().connections == 0)
    async with (
        running_gateway(bootstrap, data_dir=tmp_path / "another") as gateway,
        aiohttp.ClientSession(gateway.url) as http,
        http.post(f"/topics/{topic}", data=body, headers=keyed("k")) as waiting,
    ):
        assert waiting.status == 409  # the first attempt may still run
        assert int(waiting.headers["Retry-After"]) > 60
    async with running_gateway(bootstrap, data_dir=tmp_path) as gateway, aiohttp.ClientSession(gateway.url) as http:
        status, answer = await ask(http, "POST", f"/topics/{topic}", body, headers=keyed("k"))
        assert status == 200
        assert gateway.listener.statistics().keyed.resumed_total == 1
        assert (await ask(http, "POST", f"/topics/{topic}", {"records": [{"value": 4}]}, headers=JSON_RECORDS))[
            0
        ] == 200
    records = await read_topic(bootstrap, topic, 4)
    assert sorted(int(one.value or b"") for one in records) == [1, 2, 3, 4]
    places = {(one.partition, one.offset): one.value for one in records}
    assert [places[place["partition"], place["offset"]] for place in answer["offsets"]] == [b"1", b"2", b"3"]


async def test_headers_that_another_kafka_client_copied_are_not_believed(
    bootstrap: str, new_topic: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third record is missing. Then a Kafka client writes records that carry the name of the request."""
    topic = await new_topic(partitions=1)
    send = KeyedRequests._send

    async def die(self: KeyedRequests, name: str, grant: Any, records: Any, found: Any) -> Any:
        await send(self, name, grant, records[:2], found)
        raise RuntimeError("died")

    with monkeypatch.context() as patched:
        patched.setattr(KeyedRequests, "_send", die)
        async with running_gateway(bootstrap, data_dir=tmp_path) as gateway, aiohttp.ClientSession(gateway.url) as http:
            assert (await ask(http, "POST", f"/topics/{topic}", RECORDS, headers=keyed("k")))[0] == 500
    first, _ = await read_topic(bootstrap, topic, 2)
    copied = dict(first.headers)["gw.request"].partition(b"/")[0]
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all") as other:
        for place in (b"x", b"", b"-1", b"1_0", b" 2", b"99", b"9" * 5000, b"2"):
            headers = [("gw.request", copied + b"/" + place)]
            await other.send_and_wait(topic, b"forged", key=b"b", headers=headers, partition=0)
    async with running_gateway(bootstrap, data_dir=tmp_path) as gateway, aiohttp.ClientSession(gateway.url) as http:
        status, answer = await ask(http, "POST", f"/topics/{topic}", RECORDS, headers=keyed("k"))
        assert gateway.listener.statistics().keyed.resumed_total == 1
    assert status == 200
    records = {one.offset: one.value for one in await read_topic(bootstrap, topic, 11)}
    assert [records[place["offset"]] for place in answer["offsets"]] == [b"1", b"2", b"3"]


async def test_a_second_request_while_the_first_is_under_way(
    bootstrap: str, new_topic: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await new_topic(partitions=1)
    begun, go_on = asyncio.Event(), asyncio.Event()
    send = KeyedRequests._send

    async def wait(self: KeyedRequests, *arguments: Any) -> Any:
        begun.set()
        await go_on.wait()
        return await send(self, *arguments)

    monkeypatch.setattr(KeyedRequests, "_send", wait)
    async with running_gateway(bootstrap, data_dir=tmp_path) as gateway, aiohttp.ClientSession(gateway.url) as http:
        first = asyncio.create_task(ask(http, "POST", f"/topics/{topic}", RECORDS, headers=keyed("k")))
        async with asyncio.timeout(60):
            await begun.wait()
        async with http.post(f"/topics/{topic}", json=RECORDS, headers=keyed("k")) as second:
            assert (second.status, second.headers["Retry-After"]) == (409, "1")
        go_on.set()
        assert (await first)[0] == 200


async def test_two_gateways_with_the_same_key_store_once(bootstrap: str, new_topic: Any, tmp_path: Path) -> None:
    topic = await new_topic(partitions=1)
    async with (
        running_gateway(bootstrap, data_dir=tmp_path) as left,
        running_gateway(bootstrap, data_dir=tmp_path / "b") as right,
        aiohttp.ClientSession() as http,
    ):
        for number in range(5):
            body = {"records": [{"value": number}]}
            headers = keyed(f"k{number}")
            urls = [f"{gateway.url}/topics/{topic}" for gateway in (left, right)]
            statuses = [
                status
                for status, _ in await asyncio.gather(*(ask(http, "POST", url, body, headers=headers) for url in urls))
            ]
            assert 200 in statuses
            assert set(statuses) <= {200, 409}
        assert (await ask(http, "POST", urls[0], {"records": [{"value": 9}]}, headers=JSON_RECORDS))[0] == 200
    assert [one.value for one in await read_topic(bootstrap, topic, 6)] == [b"0", b"1", b"2", b"3", b"4", b"9"]


async def test_keys_that_are_no_use(bootstrap: str, new_topic: Any, tmp_path: Path) -> None:
    topic = await new_topic(partitions=1)
    async with (
        running_gateway(bootstrap, data_dir=tmp_path) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        for key in ("", "x" * 256):
            assert (await ask(http, "POST", f"/topics/{topic}", RECORDS, headers=keyed(key)))[0] == 400
        assert (await ask(http, "POST", f"/topics/{topic}?async=true", RECORDS, headers=keyed("k")))[0] == 422
        headers = [("Content-Type", "application/json"), (KEY_FIELD, "k"), (KEY_FIELD, "l")]
        assert (await ask(http, "POST", f"/topics/{topic}", RECORDS, headers=headers))[0] == 400


async def test_no_more_keys_than_can_be_kept(bootstrap: str, new_topic: Any, tmp_path: Path) -> None:
    topic = await new_topic(partitions=1)
    async with running_gateway(bootstrap, data_dir=tmp_path) as gateway, aiohttp.ClientSession(gateway.url) as http:
        assert (await ask(http, "POST", f"/topics/{topic}", RECORDS, headers=keyed("k")))[0] == 200
    async with (
        running_gateway(bootstrap, data_dir=tmp_path, http={"max_idempotency_keys": 1}) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        assert (await ask(http, "POST", f"/topics/{topic}", RECORDS, headers=keyed("k")))[0] == 200
        assert (await ask(http, "POST", f"/topics/{topic}", RECORDS, headers=keyed("l")))[0] == 503


def test_the_first_attempt_in_the_log_counts_until_it_is_taken_over_or_its_window_ends() -> None:
    now = 1000
    table = RequestTable(gateway="g", window_s=1, max_keys=9, wall_clock=lambda: now)

    def apply(kept: KeptRequest | bytes, at: int) -> None:
        value = kept if isinstance(kept, bytes) else msgspec.json.encode(kept)
        table.apply(Received("t", b"k", value, (), at, 0, 0))

    first = KeptRequest("d", "one", "g", until_ms=2000, lease_ms=1500, scan={0: 7})
    second = KeptRequest("d", "two", "h", until_ms=2000, lease_ms=1500, scan={0: 9})
    for foreign in (b"{}", msgspec.json.encode(first).replace(b'"one"', b'"\xff"'), b'{"x":' + b"[" * 100_000):
        apply(foreign, now)
    apply(first, now)
    apply(second, now)
    assert table.find("k") == first
    third = msgspec.structs.replace(second, after="one")
    apply(third, now)
    assert table.find("k") == third
    answer = msgspec.structs.replace(third, status=200, body="x" * 100)
    apply(msgspec.structs.replace(answer, attempt="one", after=""), now)  # too late: it was taken over
    apply(answer, now)
    apply(first, now)
    assert table.find("k") == answer
    assert (table.count, table.undecodable) == (1, 3)
    assert not table.full
    assert table.bytes > 100
    now = 2000
    assert table.find("k") is None
    assert (table.count, table.bytes) == (0, 0)
    apply(msgspec.structs.replace(first, until_ms=3000), now)
    assert table.find("k") is not None
    table.restarted(0)
    assert (table.count, table.bytes) == (0, 0)


def test_the_offsets_of_a_topic_with_many_partitions_count_in_the_memory_of_its_keys() -> None:
    table = RequestTable(gateway="g", window_s=1, max_keys=10**6, wall_clock=lambda: 1000)
    scan = dict.fromkeys(range(10_000), 2**40)
    kept = KeptRequest("d", "one", "g", until_ms=2000, lease_ms=1500, scan=scan)
    for number in range(150):
        table.apply(Received("t", b"%d" % number, msgspec.json.encode(kept), (), 1000, 0, 0))
    assert table.full


async def test_requests_whose_clients_have_left_are_bounded(
    bootstrap: str, new_topic: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request with a key goes on without its client, and so do its records in memory."""
    topic = await new_topic(partitions=1)
    go_on = asyncio.Event()
    send = KeyedRequests._send

    async def wait(self: KeyedRequests, *arguments: Any) -> Any:
        await go_on.wait()
        return await send(self, *arguments)

    monkeypatch.setattr(KeyedRequests, "_send", wait)
    async with (
        running_gateway(bootstrap, data_dir=tmp_path, http={"max_concurrent": 2}) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        for number in range(2):
            left = asyncio.create_task(ask(http, "POST", f"/topics/{topic}", RECORDS, headers=keyed(f"k{number}")))
            await wait_until(lambda: gateway.listener.statistics().produce.active == 1)
            left.cancel()
            await wait_until(lambda: gateway.listener.statistics().produce.active == 0)
        assert (await ask(http, "POST", f"/topics/{topic}", RECORDS, headers=keyed("k2")))[0] == 503
        assert (await ask(http, "POST", f"/topics/{topic}", RECORDS, headers=JSON_RECORDS))[0] == 200
        go_on.set()
        await wait_until(lambda: not gateway.listener._storing.keyed._running)
        assert (await ask(http, "POST", f"/topics/{topic}", RECORDS, headers=keyed("k2")))[0] == 200
