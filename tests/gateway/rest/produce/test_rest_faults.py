"""Kafka down, clients gone, the gateway stopping: only stored records are acknowledged, nothing is left behind."""

import asyncio
import os
import signal
from typing import Any

import aiohttp
import pytest

from gateway.embedded.broker import EmbeddedBroker
from gateway.kafka.driver.kafka_consumer import close_consumer
from gateway.kafka.groups import polled_member
from tests.gateway.rest.conftest import JSON_RECORDS, ask, raw_exchange, read_topic, running_gateway
from tests.support.frozen import freeze
from tests.support.waiting import wait_until

BODY = {"records": [{"value": 1}]}


def thaw(broker: EmbeddedBroker) -> None:
    os.kill(broker.pid, signal.SIGCONT)


async def test_no_200_leaves_while_the_broker_is_stopped(stoppable: EmbeddedBroker) -> None:
    async with running_gateway(stoppable.bootstrap_servers) as gateway, aiohttp.ClientSession(gateway.url) as http:
        assert (await ask(http, "POST", "/topics/stalled", BODY, headers=JSON_RECORDS))[0] == 200
        freeze(stoppable.pid)
        try:
            async with asyncio.TaskGroup() as group:
                waiting = [
                    group.create_task(ask(http, "POST", "/topics/stalled", BODY, headers=JSON_RECORDS))
                    for _ in range(20)
                ]
                await wait_until(lambda: gateway.listener.statistics().produce.active == 20)
                done, _ = await asyncio.wait(waiting, timeout=1.0)
                assert not done
                thaw(stoppable)
                async with asyncio.timeout(60):
                    answers = [await one for one in waiting]
        finally:
            thaw(stoppable)
        assert [status for status, _ in answers] == [200] * 20
        places = {(body["offsets"][0]["partition"], body["offsets"][0]["offset"]) for _, body in answers}
        assert len(places) == 20
        assert len(await read_topic(stoppable.bootstrap_servers, "stalled", 21)) == 21


async def test_after_the_delivery_timeout_the_request_is_a_503_with_retry_after(stoppable: EmbeddedBroker) -> None:
    kafka = {"delivery_timeout_s": 2.0, "request_timeout_s": 1.0}
    async with (
        running_gateway(stoppable.bootstrap_servers, kafka=kafka, wait=False) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        async with asyncio.timeout(60):
            while (await ask(http, "POST", "/topics/late", BODY, headers=JSON_RECORDS))[0] != 200:
                pass  # on a busy machine the topic does not exist before the delivery timeout
        freeze(stoppable.pid)
        try:
            async with http.post("/topics/late", json=BODY, headers=JSON_RECORDS) as response:
                assert response.status == 503
                assert response.headers["Retry-After"] == "1"
                assert (await response.json(content_type=None))["error_code"] == 503
        finally:
            thaw(stoppable)
        async with asyncio.timeout(60):
            while (await ask(http, "POST", "/topics/late", BODY, headers=JSON_RECORDS))[0] != 200:
                pass  # each round takes until Kafka answers, or the delivery timeout


async def test_clients_that_disconnect_while_they_wait_harm_no_others(stoppable: EmbeddedBroker) -> None:
    async with running_gateway(stoppable.bootstrap_servers) as gateway, aiohttp.ClientSession(gateway.url) as http:
        assert (await ask(http, "POST", "/topics/leavers", BODY, headers=JSON_RECORDS))[0] == 200
        freeze(stoppable.pid)
        try:
            host, _, port = gateway.listener.bound.rpartition(":")
            for _ in range(10):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(
                    b"POST /topics/leavers HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                    b'Content-Length: 25\r\n\r\n{"records":[{"value":2}]}'
                )
                writer.close()
            await wait_until(lambda: gateway.publisher.statistics().records_in_flight == 10)
            await wait_until(lambda: gateway.listener.statistics().produce.active == 0)
        finally:
            thaw(stoppable)
        await wait_until(lambda: gateway.publisher.statistics().records_in_flight == 0)
        assert (await ask(http, "POST", "/topics/leavers", BODY, headers=JSON_RECORDS))[0] == 200
        await wait_until(lambda: gateway.listener.statistics().connections == 1)


async def test_a_draining_gateway_answers_503_and_closes(bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    async with running_gateway(bootstrap) as gateway, aiohttp.ClientSession(gateway.url) as http:
        assert (await ask(http, "POST", f"/topics/{topic}", BODY, headers=JSON_RECORDS))[0] == 200
        gateway.listener.stop_receiving()
        async with http.post(f"/topics/{topic}", json=BODY, headers=JSON_RECORDS) as response:
            assert response.status == 503
            assert response.headers["Connection"] == "close"
            assert "Retry-After" in response.headers
        with pytest.raises(aiohttp.ClientConnectionError):
            await ask(http, "POST", f"/topics/{topic}", BODY, headers=JSON_RECORDS)


JSON_POST = b"POST /topics/t HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
HOSTILE = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),  # a TLS hello
    b"\x10\x10\x00\x04MQTT\x05\x02\x00\x3c\x00\x00\x03abc",  # an MQTT CONNECT
    b"AMQP\x00\x01\x00\x00",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nBad Header: 1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 40_000 + b"\r\n\r\n",
    b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"".join(b"H%d: 1\r\n" % number for number in range(500)) + b"\r\n",
    b"POST /topics/t HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /topics/t HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"POST /topics/t HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nhello",
    JSON_POST + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
    JSON_POST + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello",
    b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://elsewhere/nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"BREW /topics/t HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"GET /topics/%00%ff HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAccept: text/html\r\n\r\n",
    b"POST /consumers/%ff HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: 1\r\n\r\n[",
]


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: repr(data[:40]))
async def test_hostile_bytes_get_the_dialects_error_and_nothing_else(gateway: Any, data: bytes) -> None:
    before = gateway.listener.statistics().connections
    answer = await raw_exchange(gateway.listener.bound, data)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split(b" ")[1] in (b"400", b"404", b"405", b"414", b"417", b"431", b"505"), answer[:200]
    assert b"application/vnd.kafka.v2+json" in head
    assert b"error_code" in body
    assert b"<html" not in answer.lower()
    assert b"Traceback" not in answer
    await wait_until(lambda: gateway.listener.statistics().connections <= before)


async def test_a_consumer_outlives_a_stopped_broker_and_can_be_deleted_under_one(stoppable: EmbeddedBroker) -> None:
    async with running_gateway(stoppable.bootstrap_servers) as gateway, aiohttp.ClientSession(gateway.url) as http:
        kept, deleted = [await made_consumer(http, group) for group in ("kept", "deleted")]
        freeze(stoppable.pid)
        try:
            async with asyncio.timeout(60):
                assert await ask(http, "GET", f"{kept}/records?timeout=500") == (200, [])
                assert (await ask(http, "DELETE", deleted))[0] == 204
                assert (await ask(http, "GET", f"{deleted}/records"))[0] == 404
        finally:
            thaw(stoppable)
        assert (await ask(http, "POST", "/topics/outage", BODY, headers=JSON_RECORDS))[0] == 200
        async with asyncio.timeout(60):
            while (answer := await ask(http, "GET", f"{kept}/records?timeout=5000")) == (200, []):
                pass
        assert answer[0] == 200
        assert [record["value"] for record in answer[1]] == [1]


async def made_consumer(http: aiohttp.ClientSession, group: str) -> str:
    """The path of a new consumer."""
    control = {"Content-Type": "application/vnd.kafka.v2+json"}
    settings = {"name": "c", "format": "json", "auto.offset.reset": "earliest"}
    path = f"/consumers/{group}/instances/c"
    while (made := await ask(http, "POST", f"/consumers/{group}", settings, headers=control))[0] == 503:
        continue  # Kafka continues after a pause
    assert made[0] == 200
    assert (await ask(http, "POST", f"{path}/subscription", {"topics": ["outage"]}, headers=control))[0] == 204
    return path


async def test_a_repeated_deletion_is_the_same_one(stoppable: EmbeddedBroker) -> None:
    """As clients do whose connection broke while Kafka did not answer."""
    async with running_gateway(stoppable.bootstrap_servers) as gateway, aiohttp.ClientSession(gateway.url) as http:
        path = await made_consumer(http, "deleted-twice")
        freeze(stoppable.pid)
        try:
            answers = await asyncio.gather(ask(http, "DELETE", path), ask(http, "DELETE", path))
        finally:
            thaw(stoppable)
        assert answers == [(204, None)] * 2
        assert (await ask(http, "DELETE", path))[0] == 404


async def test_a_consumer_that_does_not_end_well_is_deleted_all_the_same(
    stoppable: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancelled(consumer: Any, timeout: float) -> None:
        """As aiokafka lets the cancellation of its own tasks escape."""
        await close_consumer(consumer, timeout)
        raise asyncio.CancelledError

    monkeypatch.setattr(polled_member, "close_consumer", cancelled)
    async with running_gateway(stoppable.bootstrap_servers) as gateway, aiohttp.ClientSession(gateway.url) as http:
        path = await made_consumer(http, "ends-badly")
        assert await ask(http, "DELETE", path) == (204, None)
        assert (await ask(http, "DELETE", path))[0] == 404
