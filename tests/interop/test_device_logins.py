"""Devices log in with generated secrets in all three protocols, with foreign clients; as devices of a tenant, too."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from proton import ConnectionException, Message
from proton.utils import BlockingConnection

from gateway.security.login.device_secrets import new_secret
from gateway.security.login.user_files import new_device
from tests.support.amqp import TIMEOUT
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import PahoClient
from tests.support.waiting import wait_until

TENANT, TOPIC = (f"{name}-{uuid.uuid4().hex[:8]}" for name in ("plant", "readings"))
DEVICE, SENDER = f"{TENANT}/pump 7", f"{TENANT}/meter"
SECRETS = {name: new_device(name) for name in (DEVICE, SENDER)}
SECRET = SECRETS[DEVICE][0]
CONFIG = """
[kafka]
create_topics = true
[security]
allow_anonymous = false
password_file = "{path}"
failed_attempt_delay_s = 0.001
[security.tenants]
sources = ["user"]
"""
LogIn = Callable[[GatewayProcess, str], Awaitable[bool]]


@pytest.fixture(scope="module")
async def gateway(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcess]:
    """A gateway that knows devices only."""
    directory: Path = tmp_path_factory.mktemp("devices")
    path = directory / "passwords"
    path.write_text("".join(f"{line}\n" for _, line in SECRETS.values()))
    process = GatewayProcess(directory, bootstrap, config=CONFIG.format(path=path))
    yield await process.start()
    assert await process.stop() == 0
    log = process.log.read_text()
    assert not any(secret in log for secret, _ in SECRETS.values())


async def by_mqtt(gateway: GatewayProcess, secret: str) -> bool:
    """Return whether a device may log in and publish; False if its password is wrong."""
    client = await PahoClient(gateway.address("mqtt"), user=DEVICE, password=secret).connect()
    if client.connack.value:
        assert client.connack.value == 0x86
        await wait_until(lambda: client.disconnected is not None)
        await client.close()
        return False
    assert await client.publish(f"{TOPIC}/mqtt", b"1") == 0
    await client.close()
    return True


async def by_amqp(gateway: GatewayProcess, secret: str) -> bool:
    """Like `by_mqtt`, with SASL PLAIN."""

    def work() -> bool:
        try:
            connection = BlockingConnection(
                f"amqp://{gateway.addresses['amqp']}", timeout=TIMEOUT, user=DEVICE, password=secret,
                allowed_mechs="PLAIN", allow_insecure_mechs=True,
            )  # fmt: skip
        except ConnectionException as error:
            if "amqp:unauthorized-access" not in str(error):
                raise
            return False
        connection.create_sender(TOPIC).send(Message(body=b"2", annotations={"x-opt-bridge.key": "amqp"}))
        connection.close()
        return True

    return await asyncio.to_thread(work)


async def by_http(gateway: GatewayProcess, secret: str) -> bool:
    """Like `by_mqtt`, with Basic."""
    url = f"http://{gateway.addresses['http']}/topics/{TOPIC}"
    fields = {"Content-Type": "application/vnd.kafka.json.v2+json"}
    fields["Authorization"] = aiohttp.encode_basic_auth(DEVICE, secret)
    body = {"records": [{"key": "http", "value": 3}]}
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=fields) as answer:
        assert answer.status in (200, 401)
        return answer.status == 200


@pytest.mark.parametrize("log_in", [by_mqtt, by_amqp, by_http])
async def test_a_device_logs_in_with_its_secret_only(gateway: GatewayProcess, log_in: LogIn) -> None:
    assert await log_in(gateway, SECRET)
    assert not await log_in(gateway, new_secret())
    assert not await log_in(gateway, SECRETS[SENDER][0]), "another device's secret"
    assert await log_in(gateway, SECRET)


async def test_what_the_devices_of_a_tenant_send_reaches_its_devices(gateway: GatewayProcess) -> None:
    reader = await PahoClient(gateway.address("mqtt"), user=SENDER, password=SECRETS[SENDER][0]).connect()
    assert await reader.subscribe(f"{TOPIC}/#", 1) == 1
    for log_in in (by_mqtt, by_amqp, by_http):
        assert await log_in(gateway, SECRET)
    await wait_until(lambda: {message.topic for message in reader.messages} == {
        f"{TOPIC}/mqtt", f"{TOPIC}/amqp", f"{TOPIC}/http"
    })  # fmt: skip
    await reader.close()
