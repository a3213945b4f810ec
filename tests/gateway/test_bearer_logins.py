"""AMQP, MQTT and HTTP clients log in with tokens, and are disconnected when these expire; the keys come from a URL."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from gateway.security.throttle import REFUSALS_PER_ADDRESS
from protocols.mqtt import packets
from protocols.mqtt.packets import Version
from protocols.mqtt.properties import Properties
from protocols.mqtt.reasons import ReasonCode
from tests.support.amqp_frames import Frames, WireClient
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.oauth import AUDIENCE, ISSUER, key_set, token
from tests.support.topics import until_led

METHOD = "OAUTHBEARER"
TOPIC = f"bearer-{uuid.uuid4().hex[:8]}"
TIMEOUT = 60
LIFE_S = 6  # lifetime of a token that expires during a test
CONFIG = """
[security]
allow_anonymous = false
failed_attempt_delay_s = 0.01
[security.oauth]
jwks_url = "{url}"
issuer = "{issuer}"
audience = ["{audience}"]
groups_claim = "groups"
leeway_s = 0
[[security.access]]
principal = "group:writers"
action = "publish"
topic = "{topic}"
[[security.access]]
principal = "group:sited"
topic = "{topic}/{{claim:org.site}}/{{name}}/#"
"""

LOCKED = """
[security]
allow_anonymous = false
failed_attempt_delay_s = 60
[security.oauth]
jwks_file = "{path}"
issuer = "{issuer}"
audience = ["{audience}"]
"""


def bearer(good_for_s: float = 3600, kid: str = "ec", **claims: Any) -> str:
    return token(kid, expires_s=time.time() + good_for_s, **claims)


def message(text: str) -> bytes:
    return f"n,,\x01auth=Bearer {text}\x01\x01".encode()


@pytest.fixture(scope="module")
async def secured(
    bootstrap: str, admin: AIOKafkaAdminClient, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[GatewayProcess]:
    """A gateway that accepts only tokens, and the issuer of its keys."""

    async def serve(_request: web.BaseRequest) -> web.Response:
        return web.Response(body=key_set())

    await admin.create_topics([NewTopic(TOPIC, 1, 1)])
    await until_led(admin, TOPIC)
    runner = web.ServerRunner(web.Server(serve))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/jwks"
    config = CONFIG.format(url=url, issuer=ISSUER, audience=AUDIENCE, topic=TOPIC)
    process = await GatewayProcess(tmp_path_factory.mktemp("bearer"), bootstrap, config=config).start()
    yield process
    assert await process.stop() == 0
    await runner.cleanup()


SASL = b"AMQP\x03\x01\x00\x00"


def sasl(code: int, *fields: bytes) -> bytes:
    return Frames.frame(Frames.performative(code, *fields), kind=1)


async def begin_sasl(gateway: GatewayProcess, response: bytes, mechanism: str = METHOD) -> WireClient:
    """Connect by AMQP and send SASL's init."""
    client = await WireClient.connect(gateway.address("amqp"))
    client.say(SASL)
    assert await client.header() == SASL
    assert b"OAUTHBEARER\x07XOAUTH2" in await client.until(0x40)
    client.say(sasl(0x41, Frames.symbol(mechanism), Frames.binary(response)))
    return client


async def open_amqp(client: WireClient) -> None:
    """Open the connection after a successful login."""
    assert (await client.until(0x44))[-1] == 0
    client.say(Frames.begin())
    assert await client.header() == Frames.HEADER
    await client.until(0x11)


@pytest.mark.parametrize("mechanism", ["OAUTHBEARER", "XOAUTH2"])
@pytest.mark.parametrize("kid", ["rsa", "ec", "ed"])
async def test_amqp(secured: GatewayProcess, mechanism: str, kid: str) -> None:
    text = bearer(kid=kid)
    first = message(text) if mechanism == METHOD else f"user=ann\x01auth=Bearer {text}\x01\x01".encode()
    async with asyncio.timeout(TIMEOUT):
        peer = await begin_sasl(secured, first, mechanism)
        await open_amqp(peer)
        await peer.close()


async def test_amqp_refused(secured: GatewayProcess) -> None:
    async with asyncio.timeout(TIMEOUT):
        peer = await begin_sasl(secured, message(bearer(-1)))
        challenge = await peer.until(0x42)
        assert json.loads(challenge[challenge.index(b"{") :]) == {"status": "invalid_token"}
        peer.say(sasl(0x43, Frames.binary(b"\x01")))
        assert (await peer.until(0x44))[-1] == 1
        assert await peer.end() == b""
        await peer.close()


async def test_mqtt(secured: GatewayProcess) -> None:
    client = await RawClient.open(secured.address("mqtt"))
    writer = bearer(groups=["writers"])
    client.send(packets.Connect(Version.V5, "", properties=proof(message(writer))))
    connack = await client.expect(packets.Connack)
    assert connack.reason_code == 0
    assert await client.publish(f"{TOPIC}/a", b"1") == 0
    client.drop()
    other = await RawClient.open(secured.address("mqtt"))
    other.send(packets.Connect(Version.V5, "", properties=proof(message(bearer(groups=["readers"])))))
    assert (await other.expect(packets.Connack)).reason_code == 0
    assert await other.publish(f"{TOPIC}/a", b"1") == ReasonCode.NOT_AUTHORIZED
    other.drop()


async def test_a_re_authenticated_mqtt_client_has_the_rights_of_its_new_token(secured: GatewayProcess) -> None:
    client = await RawClient.open(secured.address("mqtt"))
    client.send(packets.Connect(Version.V5, "", properties=proof(message(bearer(groups=["writers"])))))
    assert (await client.expect(packets.Connack)).reason_code == 0
    results = [await client.publish(f"{TOPIC}/a", b"1")]
    for groups in (["readers"], ["readers", "writers"]):
        client.send(packets.Auth(ReasonCode.RE_AUTHENTICATE, proof(message(bearer(groups=groups)))))
        assert (await client.expect(packets.Auth)).reason_code == 0
        results.append(await client.publish(f"{TOPIC}/a", b"1"))
    assert results == [0, ReasonCode.NOT_AUTHORIZED, 0]
    client.drop()


def proof(data: bytes) -> Properties:
    return Properties(authentication_method=METHOD, authentication_data=data)


async def test_mqtt_refused(secured: GatewayProcess) -> None:
    client = await RawClient.open(secured.address("mqtt"))
    client.send(packets.Connect(Version.V5, "", properties=proof(message(bearer(aud="others")))))
    auth = await client.expect(packets.Auth)
    assert auth.properties is not None
    assert json.loads(auth.properties.authentication_data or b"") == {"status": "invalid_token"}
    client.send(packets.Auth(ReasonCode.CONTINUE_AUTHENTICATION, proof(b"\x01")))
    assert (await client.expect(packets.Connack)).reason_code == ReasonCode.NOT_AUTHORIZED
    client.drop()


async def test_http(secured: GatewayProcess) -> None:
    records = {"records": [{"value": 1}]}
    headers = {"Content-Type": "application/vnd.kafka.json.v2+json"}
    url = f"http://{secured.addresses['http']}/topics/{TOPIC}"
    statuses = []
    async with aiohttp.ClientSession(headers=headers) as http:
        for authorization in (
            f"Bearer {bearer(groups=['writers'])}",
            f"bearer  {bearer(groups=['writers'])}",
            f"Bearer {bearer()}",
            f"Bearer {bearer(-1, groups=['writers'])}",
            "Bearer",
            "Digest x",
            None,
        ):
            fields = {} if authorization is None else {"Authorization": authorization}
            async with http.post(url, json=records, headers=fields) as response:
                statuses.append(response.status)
                challenges = response.headers.getall("WWW-Authenticate", [])
                if response.status == 401:
                    assert challenges[0].startswith("Basic ")
                    fault = authorization is not None and authorization.startswith("Bearer")
                    assert challenges[1] == 'Bearer realm="trivium"' + (', error="invalid_token"' if fault else "")
    assert statuses == [200, 200, 403, 401, 401, 401, 401]


async def test_a_claim_in_a_rule(secured: GatewayProcess) -> None:
    """By MQTT and by HTTP, a client reaches its own site and name, and nothing else."""
    expected = {"oslo/ann/a": True, "oslo/bob/a": False, "rome/ann/a": False, "{claim:org.site}/ann/a": False}
    shown = bearer(groups=["sited"], org={"site": "oslo"})
    client = await RawClient.open(secured.address("mqtt"))
    client.send(packets.Connect(Version.V5, "", properties=proof(message(shown))))
    assert (await client.expect(packets.Connack)).reason_code == 0
    assert {name: await client.publish(f"{TOPIC}/{name}", b"1") == 0 for name in expected} == expected
    client.drop()
    url = f"http://{secured.addresses['http']}/topics/{TOPIC}"
    headers = {"Content-Type": "application/vnd.kafka.json.v2+json", "Authorization": f"Bearer {shown}"}
    records = {"records": [{"key": name, "value": 1} for name in expected]}
    async with aiohttp.ClientSession(headers=headers) as http, http.post(url, json=records) as response:
        results = (await response.json(content_type=None))["offsets"]
    assert {name: "offset" in result for name, result in zip(expected, results, strict=True)} == expected


async def test_an_http_consumer_keeps_its_owner_when_the_groups_change(secured: GatewayProcess) -> None:
    base = f"http://{secured.addresses['http']}/consumers/bearer"
    path = f"{base}/instances/mine"
    control = {"Content-Type": "application/vnd.kafka.v2+json"}
    statuses = []
    async with aiohttp.ClientSession(headers=control) as http:
        for method, url, body, claims in (
            ("POST", base, {"name": "mine"}, {"groups": ["a"]}),
            ("GET", f"{path}/subscription", None, {"sub": "bob", "groups": ["a"]}),
            ("GET", f"{path}/subscription", None, {"groups": ["b"]}),
            ("DELETE", path, None, {"groups": ["a", "b"]}),
        ):
            headers = {"Authorization": f"Bearer {bearer(**claims)}"}
            async with http.request(method, url, json=body, headers=headers) as response:
                statuses.append(response.status)
    assert statuses == [200, 403, 200, 204]


async def test_a_client_is_disconnected_when_its_token_expires(secured: GatewayProcess) -> None:
    """AMQP and MQTT clients with tokens of a few seconds; one MQTT client renews its token in time."""
    async with asyncio.timeout(TIMEOUT):
        short = bearer(LIFE_S)
        peer = await begin_sasl(secured, message(short))
        await open_amqp(peer)
        gone, stays = [await RawClient.open(secured.address("mqtt")) for _ in range(2)]
        for client in (gone, stays):
            client.send(packets.Connect(Version.V5, "", properties=proof(message(short))))
            assert (await client.expect(packets.Connack)).reason_code == 0
        stays.send(packets.Auth(ReasonCode.RE_AUTHENTICATE, proof(message(bearer()))))
        assert (await stays.expect(packets.Auth)).reason_code == 0
        close = await peer.until(0x18)
        assert b"amqp:unauthorized-access" in close
        disconnect = await gone.expect(packets.Disconnect)
        assert disconnect.reason_code == ReasonCode.NOT_AUTHORIZED
        stays.send(packets.Pingreq())
        await stays.expect(packets.Pingresp)
        await peer.close()
        gone.drop()
        stays.drop()


async def test_bad_tokens_do_not_lock_out_good_ones_of_their_address(bootstrap: str, tmp_path: Path) -> None:
    """One client behind a NAT or a balancer guesses; those whose tokens were valid before work on and may reconnect."""
    keys = tmp_path / "jwks"
    keys.write_bytes(key_set())
    config = LOCKED.format(path=keys, issuer=ISSUER, audience=AUDIENCE)
    gateway = await GatewayProcess(tmp_path, bootstrap, config=config).start()
    good = bearer()

    async def ask(http: aiohttp.ClientSession, said: str) -> int:
        async with http.get("/topics", headers={"Authorization": f"Bearer {said}"}) as answer:
            return answer.status

    url = f"http://{gateway.addresses['http']}"
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as http:
        assert await ask(http, good) == 200
        guesses = [asyncio.create_task(ask(http, f"bad{number}")) for number in range(2 * REFUSALS_PER_ADDRESS)]
        try:
            async with asyncio.timeout(TIMEOUT):
                while await ask(http, bearer(jti=uuid.uuid4().hex)) != 503:
                    pass
            assert await ask(http, good) == 200
            client = await begin_sasl(gateway, message(good))
            await open_amqp(client)
            await client.close()
        finally:
            for one in guesses:
                one.cancel()
            await asyncio.wait(guesses)
    assert await gateway.stop() == 0
