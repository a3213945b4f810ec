"""`/clients`, `trivium clients` and `kick`: one list of all protocols' clients; closing one of them."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from typer.testing import CliRunner

from gateway.observe.clients import ClientList, Query
from gateway.process.cli import app
from gateway.runtime.turns import SLICE_S
from gateway.views.clients import ClientView
from gateway.views.pauses import Pauses
from protocols.mqtt import packets
from protocols.mqtt.packets import Subscription
from tests.support.amqp import ThreadedSender
from tests.support.amqp_frames import Frames
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import PahoClient, RawClient
from tests.support.waiting import wait_until

ADMINISTRATIVE_ACTION = 0x98
KEPT: dict[str, Any] = {"clean_start": False, "session_expiry_interval": 3600}
LIVE = "trivium.v1"


class Somebody:
    """A minimal `gateway.views.clients.Connected`, for large numbers."""

    socket = None
    subject = ""

    def __init__(self, number: int) -> None:
        self.identifier = f"mqtt/s-{number * 7_919 % 50_000:05}" if number % 10 else ""  # a tenth has not logged in
        self.principal = "even" if number % 2 == 0 else "odd"

    def view(self, *, whole: bool) -> ClientView:
        return ClientView(id=self.identifier, protocol="mqtt", kind="connection", principal=self.principal)


async def test_fifty_thousand_are_listed_in_pages_and_others_are_served_meanwhile() -> None:
    everybody = [Somebody(number) for number in range(50_000)]
    ids = sorted(one.identifier for one in everybody if one.identifier)
    clients = ClientList([lambda: everybody[::2], lambda: everybody[1::2]], SimpleNamespace(), Pauses())
    gc.disable()  # a look for cycles among all that other tests have made is a long turn, and nobody's fault here
    try:
        turns = [time.thread_time()]
        asking = asyncio.ensure_future(clients.page(Query(limit=1000)))
        while not asking.done():
            await asyncio.sleep(0)
            turns.append(time.thread_time())
    finally:
        gc.enable()
    assert max(after - before for before, after in itertools.pairwise(turns)) < 10 * SLICE_S
    page = await asking
    assert [view.id for view in page.clients] == ids[:1000]
    assert page.next == ids[999]
    found = [view.id for view in page.clients]
    while page.next is not None:
        page = await clients.page(Query(limit=1000, after=page.next, protocol="mqtt", prefix="s-0"))
        found += [view.id for view in page.clients]
    assert found == [one for one in ids if one.startswith("mqtt/s-0")]
    odd = await clients.page(Query(principal="odd", prefix="s-123", limit=1000))
    assert [view.id for view in odd.clients] == sorted(
        one.identifier for one in everybody if one.principal == "odd" and one.identifier.startswith("mqtt/s-123")
    )


@pytest.fixture
def name() -> str:
    return f"listed-{uuid.uuid4().hex[:8]}"


@pytest.fixture
async def operator(gateway: GatewayProcess) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://{gateway.addresses['management']}") as session:
        yield session


async def listed(operator: aiohttp.ClientSession, **query: Any) -> list[dict[str, Any]]:
    async with operator.get("/clients", params=query) as answer:
        assert answer.status == 200, await answer.text()
        return list((await answer.json())["clients"])


async def looked_at(operator: aiohttp.ClientSession, client: str) -> list[dict[str, Any]]:
    async with operator.get(f"/clients/{quote(client, safe='')}") as answer:
        return list((await answer.json())["clients"]) if answer.status == 200 else []


async def kick(operator: aiohttp.ClientSession, client: str) -> int:
    async with operator.delete(f"/clients/{quote(client, safe='')}") as answer:
        return int((await answer.json())["closed"]) if answer.status == 200 else 0


async def command(gateway: GatewayProcess, *arguments: str) -> str:
    """Run a command as an operator does."""
    url = f"http://{gateway.addresses['management']}"
    done = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--url", url])
    assert done.exit_code == 0, done.output
    return done.output


async def test_mqtt_is_listed_looked_at_and_kicked_with_the_code_for_it(
    gateway: GatewayProcess, operator: aiohttp.ClientSession, name: str
) -> None:
    client_id = f"{name}/hall 1/ü%2F"
    paho = await PahoClient(gateway.address("mqtt"), client_id=client_id).connect()
    old = await RawClient.connect(gateway.address("mqtt"), f"{name}-old", version=4)
    try:
        await paho.subscribe(f"{name}/#", 1)
        shown = await listed(operator, protocol="mqtt", prefix=name)
        assert [one["id"] for one in shown] == sorted([f"mqtt/{client_id}", f"mqtt/{name}-old"])
        first = next(one for one in shown if one["id"] == f"mqtt/{client_id}")
        assert (first["protocol"], first["kind"], first["principal"]) == ("mqtt", "connection", "anonymous")
        assert first["address"].startswith("127.0.0.1:")
        assert 0 <= time.time() - first["since"] < 60
        assert "subscriptions" not in first
        [whole] = await looked_at(operator, f"mqtt/{client_id}")
        assert whole["version"] == "5.0"
        assert whole["subscriptions"] == [{"name": f"{name}/#", "qos": 1}]
        assert whole["session"] == {"kept": False}
        assert whole["flow"]["windows"][0]["name"] == "PUBLISH from the client"
        assert client_id in await command(gateway, "clients", "--prefix", name)
        told = json.loads(await command(gateway, "clients", f"mqtt/{client_id}", "--json"))
        assert told["clients"][0]["id"] == f"mqtt/{client_id}"
        assert f"{name}/#" in await command(gateway, "clients", f"mqtt/{client_id}")
        assert await command(gateway, "kick", f"mqtt/{client_id}") == "1 closed\n"
        await wait_until(lambda: paho.disconnected is not None)
        assert paho.disconnected.value == ADMINISTRATIVE_ACTION
        assert await kick(operator, f"mqtt/{name}-old") == 1
        assert await old.expect_end() == []  # 3.1.1 has no words for it
        assert await kick(operator, f"mqtt/{client_id}") == 0
        assert await looked_at(operator, f"mqtt/{client_id}") == []
    finally:
        await paho.close()
        old.drop()


async def test_a_kept_session_is_told_of_with_and_without_its_connection(
    gateway: GatewayProcess, operator: aiohttp.ClientSession, name: str
) -> None:
    other = await PahoClient(gateway.address("mqtt")).connect()
    assert await other.publish(f"{name}/x") == 0  # the topic is there
    client = await RawClient.connect(gateway.address("mqtt"), name, **KEPT)
    client.send(packets.Subscribe(7, (Subscription(f"{name}/#", 1),)))
    await client.expect(packets.Suback)
    [connected] = await looked_at(operator, f"mqtt/{name}")
    assert (connected["session"]["kept"], connected["session"]["expiry_s"]) == (True, 3600)
    assert "gone_at" not in connected["session"]
    assert await kick(operator, f"mqtt/{name}") == 1
    assert (await client.expect(packets.Disconnect)).reason_code == ADMINISTRATIVE_ACTION
    client.drop()
    for number in range(3):
        assert await other.publish(f"{name}/x", b"%d" % number) == 0
    await other.close()

    async def behind() -> bool:
        [away] = await looked_at(operator, f"mqtt/{name}")
        return away["session"].get("lag") == 3

    await wait_until(behind)
    [away] = await looked_at(operator, f"mqtt/{name}")
    assert away["kind"] == "session"
    assert "since" not in away
    assert "address" not in away
    assert away["subscriptions"] == [{"name": f"{name}/#", "qos": 1}]
    assert time.time() - away["session"]["gone_at"] < 60
    assert await kick(operator, f"mqtt/{name}") == 0  # there is nothing to close
    assert await listed(operator, prefix=name) == []
    again = await RawClient.connect(gateway.address("mqtt"), name)
    again.drop()


async def test_amqp_is_kicked_by_its_container_or_by_one_of_its_connections(
    gateway: GatewayProcess, operator: aiohttp.ClientSession, name: str
) -> None:
    address = f"{gateway.address('amqp')[0]}:{gateway.address('amqp')[1]}"
    proton = await ThreadedSender(address, name).connect()
    [mine] = [
        view
        for one in await listed(operator, protocol="amqp", limit=1000)
        for view in await looked_at(operator, one["id"])
        if any(link.get("topic") == name for link in view["subscriptions"])
    ]
    assert (mine["version"], mine["subscriptions"][0]["to_kafka"]) == ("1.0", True)
    assert mine["id"].endswith(f"@{mine['address']}")
    assert mine["flow"]["windows"][0]["granted"] > 0
    container = mine["id"].rpartition("@")[0]
    assert await kick(operator, container + "-other") == 0
    assert await kick(operator, container) == 1
    assert await proton.end() == "amqp:connection:forced"


async def raw_amqp(gateway: GatewayProcess, container_id: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*gateway.address("amqp"))
    opened = Frames.performative(0x10, b"\xb1" + len(container_id.encode()).to_bytes(4) + container_id.encode())
    writer.write(Frames.HEADER + Frames.frame(opened))
    await reader.readexactly(8)
    await reader.readexactly(int.from_bytes(await reader.readexactly(4)) - 4)
    return reader, writer


async def test_ids_may_be_anything(gateway: GatewayProcess, operator: aiohttp.ClientSession, name: str) -> None:
    """Two connections of one container; one whose id is the id of another; control characters, markup, slashes."""
    hostile = f"{name}/../a\n\x1b[31m\u202e<b>[bold]{'é' * 50}@?x=%41"
    pair = [await raw_amqp(gateway, f"{name}-pair") for _ in range(2)]
    odd = await raw_amqp(gateway, hostile)
    one, other = await listed(operator, protocol="amqp", prefix=f"{name}-pair")
    thief = await raw_amqp(gateway, one["id"].removeprefix("amqp/"))
    try:
        [shown] = await listed(operator, protocol="amqp", prefix=f"{name}/")
        assert shown["id"] == f"amqp/{hostile}@{shown['address']}"
        printed = await command(gateway, "clients", "--prefix", name)
        assert "\x1b" not in printed
        assert "\u202e" not in printed
        assert "[bold]" in printed
        page = json.loads(await command(gateway, "clients", "--prefix", name, "--json"))
        assert shown["id"] in [view["id"] for view in page["clients"]]
        assert "\x1b" not in await command(gateway, "clients", shown["id"])
        assert await command(gateway, "kick", shown["id"]) == "1 closed\n"
        assert b"amqp:connection:forced" in await asyncio.wait_for(odd[0].read(), 60)
        assert await kick(operator, one["id"]) == 1  # not the one that has taken its name
        there = "{}:{}".format(*thief[1].get_extra_info("sockname"))
        assert [view["id"] for view in await listed(operator, prefix=f"{name}-pair")] == sorted(
            [other["id"], f"{one['id']}@{there}"]
        )
        again = await raw_amqp(gateway, f"{name}-pair")
        assert await kick(operator, f"amqp/{name}-pair") == 2
        again[1].close()
        async with operator.get("/clients/mqtt/no\x1bbody") as answer:
            assert (answer.status, "\x1b" in await answer.text()) == (404, False)
    finally:
        for _, writer in (*pair, odd, thief):
            writer.close()


@pytest.mark.part("live websockets")
async def test_http_has_connections_streams_websockets_and_consumers(
    gateway: GatewayProcess, operator: aiohttp.ClientSession, name: str, new_topic: Any
) -> None:
    topic = await new_topic(1)
    base = f"http://{gateway.addresses['http']}"
    json_type = {"Content-Type": "application/vnd.kafka.v2+json"}
    async with aiohttp.ClientSession(base) as http:
        async with http.post(f"/consumers/{name}%2F%25", json={"name": "c/1"}, headers=json_type) as answer:
            assert answer.status == 200, await answer.text()
        consumer = f"http/consumer/{name}%2F%25/c/1"
        path = f"/consumers/{name}%2F%25/instances/c%2F1"
        async with http.post(f"{path}/subscription", json={"topics": [topic]}, headers=json_type) as answer:
            assert answer.status == 204, await answer.text()
        mine = await listed(operator, protocol="http", prefix=f"consumer/{name}")
        assert [(view["id"], view["kind"]) for view in mine] == [(consumer, "consumer")]
        [whole] = await looked_at(operator, consumer)
        assert whole["subscriptions"] == [{"name": topic}]
        assert await kick(operator, consumer) == 1
        async with http.get(f"{path}/records", headers={"Accept": "application/vnd.kafka.json.v2+json"}) as answer:
            assert answer.status == 404
            connection = answer.connection
            assert connection is None or connection.transport is not None

        async with http.get(f"/topics/{topic}/stream") as stream:
            assert stream.connection is not None
            assert stream.connection.transport is not None
            at = "{}:{}".format(*stream.connection.transport.get_extra_info("sockname"))
            [view] = await looked_at(operator, f"http/{at}")
            assert (view["kind"], view["subscriptions"]) == ("stream", [{"name": topic}])
            assert await kick(operator, f"http/{at}") == 1
            assert b"retry" in await asyncio.wait_for(stream.content.read(), 60)  # ended as an answer ends

        async with http.ws_connect("/stream", protocols=[LIVE]) as websocket:
            at = "{}:{}".format(*websocket.get_extra_info("sockname"))
            [view] = await looked_at(operator, f"http/{at}")
            assert view["kind"] == "websocket"
            assert await kick(operator, f"http/{at}") == 1
            closed = await websocket.receive(timeout=60)
            assert (closed.type, closed.data) == (aiohttp.WSMsgType.CLOSE, 1008)

    reader, writer = await asyncio.open_connection(*gateway.address("http"))
    at = "{}:{}".format(*writer.get_extra_info("sockname"))
    assert await looked_at(operator, f"http/{at}") == []  # nobody yet
    writer.write(b"GET /topics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    [view] = await looked_at(operator, f"http/{at}")
    assert (view["kind"], view["principal"]) == ("connection", "anonymous")
    assert await kick(operator, f"http/{at}") == 1
    await asyncio.wait_for(reader.read(), 60)  # to its end
    writer.close()


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=x", "protocol=coap", "page=2", "limit=%C2%B2", "protocol=mqtt&who=x"]
)
async def test_what_cannot_be_asked_for_is_said(operator: aiohttp.ClientSession, query: str) -> None:
    async with operator.get(f"/clients?{query}") as answer:
        assert answer.status == 400
        assert query.rpartition("&")[2].partition("=")[0] in await answer.text()


async def test_pages_of_other_sites_may_not_kick(operator: aiohttp.ClientSession) -> None:
    for method, path in (("DELETE", "/clients/mqtt/x"), ("POST", "/trace"), ("GET", "/clients")):
        async with operator.request(method, path, headers={"Origin": "https://evil.example"}) as answer:
            assert answer.status == 403
