"""Tenants from a token's claim, beside clients without a tenant: neither can use the names of the other."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from proton import ConnectionException, Message
from proton.reactor import Container
from proton.utils import BlockingConnection, LinkDetached

from gateway.process.listeners import make_servers
from protocols.mqtt import packets
from protocols.mqtt.packets import Suback, Subscribe, Subscription, Version
from protocols.mqtt.properties import Properties
from protocols.mqtt.reasons import ReasonCode
from tests.support.amqp import TIMEOUT
from tests.support.assembled import assembled
from tests.support.mqtt import RawClient
from tests.support.oauth import oauth_options, token

LOCAL = "127.0.0.1:0"
TENANT = f"t-{uuid.uuid4().hex[:8]}"
METHOD = "OAUTHBEARER"
JSON, V2 = "application/vnd.kafka.json.v2+json", "application/vnd.kafka.v2+json"


class Running(NamedTuple):
    """The addresses of the three protocols."""

    mqtt: tuple[str, int]
    amqp: str
    http: str


@pytest.fixture
async def gateway(bootstrap: str, tmp_path: Path) -> AsyncIterator[Running]:
    """A gateway in this process: tokens name tenants, and anonymous clients have none."""
    security = {
        "oauth": oauth_options(tmp_path / "jwks.json"),
        "tenants": {"sources": ["claim:org"], "required": False},
    }
    addresses = {name: {"address": LOCAL} for name in ("mqtt", "amqp", "http")}
    async with assembled(bootstrap, create=True, security=security, **addresses) as made:
        servers = make_servers(made.process, made.security, made.log, made.state)
        for server in servers:
            await server.start()
        try:
            mqtt, amqp, http = (server.bound for server in servers[:3])
            host, _, port = mqtt.rpartition(":")
            yield Running((host, int(port)), f"amqp://{amqp}", f"http://{http}")
        finally:
            for server in servers:
                server.stop_receiving()
                await server.stop(4.0)


def proof(**claims: Any) -> Properties:
    text = token(expires_s=time.time() + 3600, **claims)
    return Properties(authentication_method=METHOD, authentication_data=f"n,,\x01auth=Bearer {text}\x01\x01".encode())


async def of_tenant(gateway: Running, **claims: Any) -> RawClient:
    client = await RawClient.open(gateway.mqtt)
    client.send(packets.Connect(Version.V5, "", properties=proof(org=TENANT, **claims)))
    assert (await client.expect(packets.Connack)).reason_code == 0
    return client


async def test_clients_with_and_without_a_tenant(gateway: Running) -> None:
    topic = f"beside-{uuid.uuid4().hex[:8]}"
    whole = f"{TENANT}.{topic}"
    member = await of_tenant(gateway)
    await member.subscribe("#")
    outside = await RawClient.connect(gateway.mqtt)
    outside.send(
        Subscribe(9, tuple(Subscription(one, 1) for one in (f"{topic}/#", f"{whole}/#", f"$tenants/{TENANT}/#")))
    )
    codes = (await outside.answer(Suback, 9, timeout=90)).reason_codes
    assert codes == (1, 1, ReasonCode.NOT_AUTHORIZED)
    assert await member.publish(f"{topic}/a", b"tenant's") == 0
    assert await outside.publish(f"$tenants/{TENANT}/{topic}/a", b"stranger's") == ReasonCode.NOT_AUTHORIZED
    assert await outside.publish(f"{whole}/a", b"stranger's") == 0, "it is a name like any other, and not Kafka's"
    assert await outside.publish(f"{topic}/a", b"stranger's") == 0
    assert await member.publish(f"{topic}/end", b"end") == 0
    assert [message.payload for message in await member.messages(2)] == [b"tenant's", b"end"]
    seen = await outside.messages(2)
    assert {(message.topic, message.payload) for message in seen} == {
        (f"{whole}/a", b"stranger's"),
        (f"{topic}/a", b"stranger's"),
    }
    for client in (member, outside):
        await client.disconnect()

    refused = await RawClient.connect(gateway.mqtt, f"$tenants/{TENANT}/x")
    assert refused.connack.reason_code == ReasonCode.CLIENT_IDENTIFIER_NOT_VALID
    refused.drop()

    def reserved_container() -> None:
        with pytest.raises(ConnectionException, match="reserved for a tenant"):
            BlockingConnection(gateway.amqp, timeout=TIMEOUT, container=Container(container_id=f"$tenants/{TENANT}/x"))

    await asyncio.to_thread(reserved_container)

    def by_amqp() -> None:
        connection = BlockingConnection(gateway.amqp, timeout=TIMEOUT)
        for attach in (connection.create_sender, connection.create_receiver):
            for address in (whole, f"queue://{whole}"):
                with pytest.raises(LinkDetached, match=r"unauthorized-access"):
                    attach(address)
        with pytest.raises(LinkDetached, match=r"unauthorized-access"):
            connection.create_receiver(f"{topic}/group.id/{TENANT}.g")
        relay = connection.create_sender(None)
        delivery = relay.link.send(Message(address=whole, body=b"stranger's", inferred=True))
        connection.wait(lambda: delivery.settled, timeout=TIMEOUT)
        assert delivery.remote.condition.name == "amqp:unauthorized-access"
        connection.close()

    await asyncio.to_thread(by_amqp)
    async with aiohttp.ClientSession(gateway.http) as session:
        for path in (f"/topics/{whole}", f"/topics/{whole}/records", f"/topics/{whole}/stream", f"/groups/{TENANT}.g"):
            async with session.get(path) as answer:
                assert answer.status == 403, path
        async with session.get("/topics") as answer:
            assert not [name for name in await answer.json(content_type=None) if TENANT in name]
        body = {"topic_name": f"{whole}-made", "partitions_count": 1}
        async with session.post("/admin/topics", json=body) as answer:
            assert answer.status == 403


async def test_one_principal_in_two_tenants_is_two_clients(gateway: Running) -> None:
    """Tokens with one name: neither an idempotency key nor a consumer of one tenant exists in the other."""
    topic = f"keyed-{uuid.uuid4().hex[:8]}"
    seen = []
    for tenant in (TENANT, f"{TENANT}-2"):
        text = token(expires_s=time.time() + 3600, org=tenant)
        fields = {"Authorization": f"Bearer {text}", "Idempotency-Key": topic, "Content-Type": JSON}
        async with aiohttp.ClientSession(gateway.http, headers=fields) as session:
            async with session.post(f"/topics/{topic}", data=b'{"records":[{"value":1}]}') as answer:
                assert answer.status == 200
                seen.append(answer.headers.get("Idempotency-Replayed"))
            async with session.get(f"/consumers/{topic}/instances/c/subscription") as answer:
                assert answer.status == 404
            async with session.post(f"/consumers/{topic}", data=b'{"name":"c"}', headers={"Content-Type": V2}) as made:
                assert made.status == 200
    assert seen == [None, None]


async def test_re_authenticating_for_another_tenant_disconnects_the_client(gateway: Running) -> None:
    """Its session, subscriptions and in-flight messages belong to the tenant with which it connected."""
    client = await of_tenant(gateway)
    client.send(packets.Auth(ReasonCode.RE_AUTHENTICATE, proof(org=TENANT)))
    assert (await client.expect(packets.Auth)).reason_code == 0
    client.send(packets.Auth(ReasonCode.RE_AUTHENTICATE, proof(org="another")))
    assert (await client.expect(packets.Auth)).reason_code == 0, "it is who it says"
    assert (await client.expect(packets.Disconnect)).reason_code == ReasonCode.NOT_AUTHORIZED
    client.drop()
