"""The management listener over real HTTP."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import trustme
from aiohttp import web
from prometheus_client import start_http_server
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from gateway.kafka.cluster.topic_safety import TopicReport, TopicsReport
from gateway.kafka.contracts import Refused
from gateway.net.strangers import StrangersStatistics
from gateway.observe.client_pages import ClientPages
from gateway.observe.console import MOST
from gateway.observe.flow import FlowSnapshots
from gateway.observe.management import Management
from gateway.runtime.taps import taps
from gateway.security.origins import Hosts, Origins
from gateway.settings.config import Address, SecurityConfig
from gateway.trace.pages import TracePages
from gateway.trace.traces import AT_ONCE
from gateway.views.pauses import Pauses
from mapping.outcomes import Outcome
from spark_sinks.run.statistics import QueryStatistics
from telemetry.metrics import Metrics
from tests.support.waiting import wait_until

LOOPBACK = Address("127.0.0.1:0")
EVERYWHERE = Address("0.0.0.0:0")


NO_FLOW = FlowSnapshots([], lambda _: [], Pauses())


async def no_topics() -> TopicsReport:
    raise Refused(Outcome.BUSY, "Kafka does not answer")


class Gateway:
    """The readiness that the listener reports."""

    def __init__(self) -> None:
        self.ready = False
        self.asked: list[tuple[str, str]] = []

    def state(self) -> tuple[bool, dict[str, Any]]:
        return self.ready, {"missing": [] if self.ready else ["kafka"]}

    async def admit(self, user: str, password: str, peer: str) -> bool:
        assert peer.startswith("127.0.0.1:")
        self.asked.append((user, password))
        return (user, password) == ("ann", "se:cret")


Start = Callable[..., Awaitable[Management]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Opens a management listener and closes it in any case."""
    opened: list[Management] = []

    async def open_one(address: Address = LOOPBACK, metrics: Metrics | None = None, **options: Any) -> Management:
        ready = options.pop("ready", Gateway().state)
        security = options.pop("security", SecurityConfig())
        hosts = Hosts(security, login_needed=not (address.is_loopback or security.allow_anonymous))
        options = {"admit": Gateway().admit, "drain": lambda: None, "topics": no_topics, **options}
        management = Management(metrics or Metrics(), ready, NO_FLOW, hosts=hosts, origins=Origins(security), **options)
        opened.append(management)
        await management.start(address)
        return management

    yield open_one
    for management in opened:
        await management.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def get(http: aiohttp.ClientSession, url: str, **options: Any) -> tuple[int, str, str]:
    async with http.get(url, **options) as response:
        return response.status, response.headers["Content-Type"], await response.text()


async def test_its_paths_and_nothing_else(http: aiohttp.ClientSession, start: Start) -> None:
    gateway = Gateway()
    metrics = Metrics()
    metrics.add_source("fine", lambda: StrangersStatistics(1, 2, 3))
    management = await start(metrics=metrics, ready=gateway.state, admit=gateway.admit)
    base = f"http://127.0.0.1:{management.port}"
    assert (await get(http, f"{base}/healthy"))[0] == 200
    status, content_type, body = await get(http, f"{base}/ready")
    assert (status, content_type) == (503, "application/json")
    assert body == '{"ready":false,"missing":["kafka"]}'
    gateway.ready = True
    assert (await get(http, f"{base}/ready"))[0] == 200
    status, content_type, body = await get(http, f"{base}/metrics")
    assert status == 200
    assert content_type.startswith("text/plain; version=0.0.4")
    assert "trivium_fine_connections" in {family.name for family in text_string_to_metric_families(body)}
    assert gateway.asked == []  # on loopback nobody is asked
    openmetrics = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
    _, content_type, body = await get(http, f"{base}/metrics", headers=openmetrics)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert "trivium_fine_connections" in {family.name for family in openmetrics_families(body)}
    async with http.get(base, allow_redirects=False) as response:
        assert (response.status, response.headers["Location"]) == (302, "/console")
    for path in ("/other", "/metrics/x"):
        assert (await get(http, f"{base}{path}"))[0] == 404
    for limit in ("0", "1001", "-1", "x", "1e2", "²", "9" * 5000):
        assert (await get(http, f"{base}/flow?limit={limit}"))[0] == 400
    async with http.post(f"{base}/metrics") as response:
        assert response.status == 405
    await management.stop()
    with pytest.raises(aiohttp.ClientConnectionError):
        await get(http, f"{base}/healthy")
    with pytest.raises(RuntimeError):
        assert management.port


async def test_topics_are_told_by_whether_they_are_safe(http: aiohttp.ClientSession, start: Start) -> None:
    safe = TopicReport("a", 3, 3, 2, True, None)
    unsafe = TopicReport("b", 1, 1, 1, False, "topic b has 1 copy")

    async def topics() -> TopicsReport:
        return TopicsReport(3, True, [safe, unsafe])

    management = await start(topics=topics)
    url = f"http://127.0.0.1:{management.port}/topics"
    for query, told in (("", ["a", "b"]), ("?safe=true", ["a"]), ("?safe=false", ["b"])):
        answer = json.loads((await get(http, url + query))[2])
        assert (answer["brokers"], answer["required"]) == (3, True)
        assert [topic["name"] for topic in answer["topics"]] == told
    assert answer["topics"][0] == msgspec.to_builtins(unsafe)
    assert (await get(http, f"{url}?safe=1"))[0] == 400
    status, _, body = await get(http, f"http://127.0.0.1:{(await start()).port}/topics")
    assert (status, body) == (503, "Kafka does not answer\n")


async def test_pages_of_other_sites_may_not_look(http: aiohttp.ClientSession, start: Start) -> None:
    for security in (SecurityConfig(), SecurityConfig(allow_anonymous=False, password_file=Path("users"))):
        management = await start(security=security, ready=lambda: (True, {}))
        base = f"http://127.0.0.1:{management.port}"
        for path in ("/metrics", "/ready", "/healthy", "/flow", "/console"):
            for headers, status in (
                ({}, 200),
                ({"Host": "localhost"}, 200),
                ({"Host": "rebound.example"}, 421),
                ({"Host": "a b"}, 400),
                ({"Origin": "https://evil.example"}, 403),
                ({"Origin": "null"}, 403),
                ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
                ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200),
                ({"Sec-Fetch-Site": "none"}, 200),
                ({"Origin": f"http://127.0.0.1:{management.port}"}, 200),
            ):
                async with http.get(f"{base}{path}", headers=headers) as response:
                    assert (path, headers, response.status) == (path, headers, status)


async def test_seen_from_elsewhere_the_figures_need_a_password(http: aiohttp.ClientSession, start: Start) -> None:
    gateway = Gateway()
    more = [*ClientPages(None).routes(), *TracePages(None).routes()]
    management = await start(EVERYWHERE, ready=gateway.state, admit=gateway.admit, more=more)
    base = f"http://127.0.0.1:{management.port}"
    assert (await get(http, f"{base}/healthy"))[0] == 200
    status, _, body = await get(http, f"{base}/ready")
    assert (status, body) == (503, '{"ready":false}')
    for path in ("/metrics", "/flow", "/console", "/console.js", "/console.css", "/console/events"):
        async with http.get(f"{base}{path}") as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"].startswith("Basic ")
    for method, path in (("HEAD", "/metrics"), ("POST", "/drain"), ("DELETE", "/clients/mqtt/a"), ("POST", "/trace")):
        async with http.request(method, f"{base}{path}") as response:
            assert response.status == 401
    for header in ("Basic", "Basic !!!", "Bearer x", "Basic YW5u", "Basic /w==", "Basic é"):
        assert (await get(http, f"{base}/metrics", headers={"Authorization": header}))[0] == 401
    assert gateway.asked == []
    wrong = aiohttp.encode_basic_auth("ann", "wrong")
    assert (await get(http, f"{base}/metrics", headers={"Authorization": wrong}))[0] == 401
    right = aiohttp.encode_basic_auth("ann", "se:cret")
    assert (await get(http, f"{base}/metrics", headers={"Authorization": right}))[0] == 200
    status, content_type, body = await get(http, f"{base}/flow", headers={"Authorization": right})
    assert (status, content_type) == (200, "application/json")
    assert '"connections":[]' in body


@pytest.mark.parametrize(
    "request_bytes",
    [b"GET /ready HTTP/1.1\r\n\r\n", b"GET /ready HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"\x16\x03\x01\r\n\r\n"],
)
async def test_bytes_that_are_not_http_are_answered_and_not_logged(
    start: Start, caplog: pytest.LogCaptureFixture, request_bytes: bytes
) -> None:
    management = await start()
    reader, writer = await asyncio.open_connection("127.0.0.1", management.port)
    writer.write(b"GET /healthy HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
    await reader.readuntil(b'"}')
    writer.write(request_bytes)
    assert (await reader.readuntil(b"\r\n")).startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
    writer.close()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


class SlowClients:
    """`Clients` whose list does not end, as that of a trace whose reader reads slowly."""

    def __init__(self) -> None:
        self.asked = 0
        self.end = asyncio.Event()

    async def all(self) -> AsyncIterator[Any]:
        self.asked += 1
        await self.end.wait()
        for client in ():
            yield client


async def test_traces_that_have_all_their_lines_count_until_they_are_sent(
    http: aiohttp.ClientSession, start: Start
) -> None:
    clients: Any = SlowClients()
    management = await start(more=TracePages(clients).routes())
    url = f"http://127.0.0.1:{management.port}/trace"
    answers = [await http.post(url, json={"client": "mqtt/a"}) for _ in range(AT_ONCE)]
    await wait_until(lambda: clients.asked == AT_ONCE)
    for trace in taps.watchers:
        trace.end("lines")
    async with http.post(url, json={"client": "mqtt/a"}) as answer:
        assert answer.status == 429
    clients.end.set()
    for one in answers:
        assert b'"end":"lines"' in await one.read()
    async with http.post(url, json={"client": "mqtt/a", "seconds": 0.01}) as answer:
        assert answer.status == 200


async def test_a_client_that_leaves_amid_its_request_is_no_error(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    ended = asyncio.Event()

    async def read(request: web.Request) -> web.StreamResponse:
        try:
            return web.Response(body=await request.read())
        finally:
            ended.set()

    management = await start(more=[web.post("/trace", read)])
    _, writer = await asyncio.open_connection("127.0.0.1", management.port)
    writer.write(b"POST /trace HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{")
    await writer.drain()
    writer.close()
    await asyncio.wait_for(ended.wait(), 30)
    await management.stop()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_tls(http: aiohttp.ClientSession, start: Start) -> None:
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    management = await start(ssl_context=server)
    assert (await get(http, f"https://127.0.0.1:{management.port}/healthy", ssl=client))[0] == 200


async def test_a_taken_port_is_an_error(start: Start) -> None:
    first = await start()
    with pytest.raises(OSError, match="address already in use"):
        await start(Address(f"127.0.0.1:{first.port}"))


async def test_the_console_is_live_and_has_nothing_inline(http: aiohttp.ClientSession, start: Start) -> None:
    metrics = Metrics()
    metrics.add_source("mqtt", lambda: StrangersStatistics(1, 2, 3))
    management = await start(metrics=metrics, ready=lambda: (True, {"kafka": True}))
    base = f"http://127.0.0.1:{management.port}"
    for path, media in (("/console", "text/html"), ("/console.js", "text/javascript"), ("/console.css", "text/css")):
        async with http.get(f"{base}{path}") as response:
            assert (response.status, response.content_type) == (200, media)
            policy = response.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert response.headers["X-Content-Type-Options"] == "nosniff"
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(http.get(f"{base}/console/events?client=x")) for _ in range(MOST)]
        for _ in range(2):
            line = await streams[0].content.readline()
            event = msgspec.json.decode(line.removeprefix(b"data: "))
            assert event["ready"] == {"kafka": True}
            assert event["figures"]["trivium_mqtt_connections"] == [[{}, 2.0]]
            assert event["flow"]["connections"] == []
            assert await streams[0].content.readline() == b"\n"
        async with http.get(f"{base}/console/events") as response:
            assert response.status == 503
        await management.stop()  # it does not wait for pages that are looked at
        with pytest.raises(aiohttp.ClientError):
            await streams[0].content.read()


class Batches(Metrics):
    """The metrics of a Spark job."""

    def __init__(self) -> None:
        super().__init__()
        self.scrapes = 0
        told = dict.fromkeys(QueryStatistics.__struct_fields__)
        counted = {"trigger": {"real-time": 1}, "rows": 7, "batches": 2, "rows_per_second": 3.5, "late_rows": 0}
        places = {"position": {"a": {"0": 1}}, "lag": {"a": {"0": 40, "1": 2}}, "restarts": 1, "batch": 5}
        self._told = QueryStatistics(**{**told, **counted, **places})
        self.add_source("spark", self._read, labels={"job": "hall", "query": "<b>hall</b>"})

    def _read(self) -> QueryStatistics:
        self.scrapes += 1
        return self._told


async def test_the_console_shows_spark_jobs_and_asks_them_only_while_somebody_looks(
    http: aiohttp.ClientSession, start: Start
) -> None:
    job = Batches()
    server, thread = start_http_server(0, "127.0.0.1", job.registry)
    addresses = [Address(f"127.0.0.1:{server.server_port}"), Address("127.0.0.1:1")]
    try:
        management = await start(spark_jobs=addresses)
        assert job.scrapes == 0
        async with http.get(f"http://127.0.0.1:{management.port}/console/events") as response:
            told: list[Any] = []
            while not told:
                line = await response.content.readline()
                told = msgspec.json.decode(line.removeprefix(b"data: "))["spark"] if line != b"\n" else told
        [hall, nobody] = told
        assert (hall["address"], hall["error"]) == (addresses[0], "")
        [query] = hall["queries"]
        assert (query["job"], query["query"], query["trigger"]) == ("hall", "<b>hall</b>", "real-time")
        assert (query["rows"], query["lag"], query["rows_per_second"], query["state_rows"]) == (7, 42, 3.5, None)
        assert nobody == {"address": addresses[1], "queries": [], "error": "does not answer"}
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()
