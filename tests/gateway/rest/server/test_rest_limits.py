"""The limits of one client, and the answers over a limit; mostly over raw sockets."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from flowcontrol.bucket import RateLimit
from gateway.limits.brakes import Brake, Pace
from gateway.rest.server.client_limits import RequestLimits
from gateway.rest.server.concurrency import ConcurrencyLimit
from gateway.security.identity import Identity, share_of
from gateway.settings.config import SecurityConfig
from gateway.views.pauses import RATES, pauses
from protocols.rest.errors import RestError
from tests.gateway.rest.conftest import CONTROL, JSON_RECORDS, Gateway, ask, raw_exchange, running_gateway
from tests.support.waiting import wait_until

HEAD = b"POST /topics/t HTTP/1.1\r\nHost: x\r\nContent-Type: application/vnd.kafka.json.v2+json\r\n"


def status_of(answer: bytes) -> int:
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    assert json.loads(body)["error_code"] == status
    return status


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * 2000), 414),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: %s\r\n\r\n" % (b"a" * 2000), 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: /%s\r\n\r\n" % (b"a" * 2000), 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\n%s: 1\r\n\r\n" % (b"a" * 2000), 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\n%s\r\n" % b"".join(b"X-%d: 1\r\n" % n for n in range(20)), 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX Y: 1\r\n\r\n", 400),
    ],
)
async def test_heads_that_are_too_large(bootstrap: str, request_head: bytes, status: int) -> None:
    async with running_gateway(bootstrap, http={"max_header_bytes": 1024, "max_headers": 20}) as gateway:
        assert status_of(await raw_exchange(gateway.listener.bound, request_head)) == status
        fits = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Long: %s\r\n\r\n" % (b"a" * 1000)
        assert (await raw_exchange(gateway.listener.bound, fits)).startswith(b"HTTP/1.1 200 ")


async def test_a_body_that_trickles_is_given_up(bootstrap: str) -> None:
    """Each byte comes in time, but all of them are too slow: the average counts."""
    limits = {"header_timeout_s": 0.3, "min_upload_rate": 1000}
    async with running_gateway(bootstrap, http=limits) as gateway:
        host, _, port = gateway.listener.bound.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(HEAD + b"Content-Length: 5000\r\n\r\n")
        # To the answer's end, not the connection's: a byte that crosses with the answer resets the connection.
        answer = asyncio.create_task(reader.readuntil(b"}"))
        async with asyncio.timeout(60):
            while not answer.done():
                writer.write(b" ")
                await asyncio.wait([answer], timeout=0.05)
        assert status_of(answer.result()) == 408
        writer.close()


async def test_a_head_that_trickles_is_given_up(bootstrap: str) -> None:
    async with running_gateway(bootstrap, http={"header_timeout_s": 0.3}) as gateway:
        host, _, port = gateway.listener.bound.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        closed = asyncio.create_task(reader.read())
        async with asyncio.timeout(60):
            while not closed.done():
                writer.write(b"a")
                await asyncio.wait([closed], timeout=0.05)
        assert not isinstance(closed.exception(), AssertionError)
        writer.close()


@pytest.mark.parametrize("framing", [b"Content-Length: 3000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\nbb8\r\n"])
async def test_a_body_that_is_too_large(bootstrap: str, framing: bytes) -> None:
    async with running_gateway(bootstrap, http={"max_body_bytes": 2000}) as gateway:
        assert status_of(await raw_exchange(gateway.listener.bound, HEAD + framing + b" " * 3000)) == 413


async def test_too_many_records_in_a_request(bootstrap: str) -> None:
    limit = {"max_records": 2}
    async with running_gateway(bootstrap, http=limit) as gateway, aiohttp.ClientSession(gateway.url) as http:
        body = {"records": [{"value": 1}] * 3}
        assert (await ask(http, "POST", "/topics/too-many-records", body, headers=JSON_RECORDS))[0] == 413


async def hold(gateway: Gateway, count: int, fields: bytes = b"") -> list[asyncio.StreamWriter]:
    """Requests that stay in progress, because their bodies do not come."""
    host, _, port = gateway.listener.bound.rpartition(":")
    held = []
    before = gateway.listener.statistics().load.active
    for _ in range(count):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(HEAD + fields + b"Content-Length: 25\r\n\r\n")
        held.append(writer)
    await wait_until(lambda: gateway.listener.statistics().load.active == before + count)
    return held


async def test_a_client_has_its_share_and_no_more(bootstrap: str) -> None:
    security = SecurityConfig(allow_anonymous=True)
    async with running_gateway(bootstrap, http={"max_active_per_client": 2}, security=security) as gateway:
        held = await hold(gateway, 2)
        async with aiohttp.ClientSession(gateway.url) as http:
            async with http.get("/") as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
            for writer in held:
                writer.close()
            await wait_until(lambda: gateway.listener.statistics().load.active == 0)
            assert (await ask(http, "GET", "/"))[0] == 200
        load = gateway.listener.statistics().load
        assert (load.clients, load.refused_clients_total, load.refused_total) == (0, 1, 0)


async def test_all_clients_together_have_a_limit(bootstrap: str) -> None:
    async with running_gateway(bootstrap, http={"max_active": 2}) as gateway:
        held = await hold(gateway, 2)
        async with aiohttp.ClientSession(gateway.url) as http:
            async with http.get("/") as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            for writer in held:
                writer.close()
            await wait_until(lambda: gateway.listener.statistics().load.active == 0)
            assert (await ask(http, "GET", "/"))[0] == 200
        assert gateway.listener.statistics().load.refused_total == 1


async def test_consumers_have_limits_in_a_group_and_altogether(bootstrap: str) -> None:
    limits = {"max_consumers_per_group": 1, "max_consumers": 2}
    async with running_gateway(bootstrap, http=limits) as gateway, aiohttp.ClientSession(gateway.url) as http:

        async def create(group: str) -> tuple[int, Any, str | None]:
            async with http.post(f"/consumers/{group}", data=b"{}", headers=CONTROL) as answer:
                return answer.status, await answer.json(content_type=None), answer.headers.get("Retry-After")

        status, first, _ = await create("one")
        assert status == 200
        status, error, retry = await create("one")
        assert (status, retry) == (429, "1")
        assert "group" in error["message"]
        assert (await create("two"))[0] == 200
        status, _, retry = await create("three")
        assert (status, retry) == (429, "1")
        assert (await ask(http, "DELETE", f"/consumers/one/instances/{first['instance_id']}"))[0] == 204
        assert (await create("three"))[0] == 200


async def test_a_client_over_its_rate_costs_one_timer_however_often_it_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    pace = Pace((Brake(RateLimit(1.0, 0.0, 1.0, loop.time()), RATES[0], 0.05, loop.time),), loop.time)
    pace.spend(1000, 0)
    ends: list[Any] = []
    monkeypatch.setattr(loop, "call_later", lambda _delay, *work: ends.append(work))
    limits = RequestLimits(cast("Any", SimpleNamespace(refused=0)))
    connection = cast("Any", SimpleNamespace(limits=SimpleNamespace(incoming=pace)))
    for _ in range(2):
        for _ in range(100):
            with pytest.raises(RestError):
                limits.check_publishing(connection, "greedy")
        ((end, *arguments),) = ends
        end(*arguments)
        assert pauses.since(RATES[0], "greedy") is None
        ends.clear()


def test_clients_of_two_tenants_may_have_the_same_name() -> None:
    limit = ConcurrencyLimit(10, 1)
    clients = [share_of(Identity("ann", "token", tenant=tenant), "::1") for tenant in ("one", "other", None)]
    for client in clients:
        limit.enter(client)
    with pytest.raises(RestError, match="too many requests in progress"):
        limit.enter(clients[0])
    for client in clients:
        limit.leave(client)
    assert limit.statistics().clients == 0
