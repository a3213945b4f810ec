"""How each library reports a refusal, and which clients may log in."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest
from pwdlib.hashers.argon2 import Argon2Hasher

from gateway.security.login.scram import derive
from gateway.security.login.user_files import scram_line
from tests.interop.mqtt.clients import AMQTT, EVERY, HIVEMQ, MQTTJS, PAHO, PAHO_311, VERSION_5, VERSION_311, Kind, each
from tests.interop.mqtt.conftest import NewClient
from tests.interop.mqtt.drivers import RefusedError
from tests.support.gateway import GatewayProcess

PASSWORD = "correct-horse-Tr1vium"
CLOSED = f"closed-{uuid.uuid4().hex[:8]}"  # a topic that no client may use
UNKNOWN = f"unknown-{uuid.uuid4().hex[:8]}"  # a Kafka topic that does not exist and is not created
ANN = {"user": "ann", "password": PASSWORD}
WRONG = {"user": "ann", "password": "wrong-battery-Tr1vium"}

CONFIG = """
[kafka]
create_topics = false
[security]
allow_anonymous = false
password_file = "{passwords}"
scram_file = "{scram}"
failed_attempt_delay_s = 0.001
[[security.access]]
principal = "ann"
topic = "{open}"
[[security.access]]
principal = "ann"
topic = "{unknown}"
"""


@pytest.fixture(scope="module")
async def strict(
    bootstrap: str, shared_topic: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[GatewayProcess]:
    """A gateway that requires authentication and allows little."""
    directory = tmp_path_factory.mktemp("strict")
    passwords, scram = directory / "passwords", directory / "scram"
    passwords.write_text(f"ann:{Argon2Hasher(time_cost=1, memory_cost=1024).hash(PASSWORD)}\n")
    credential = derive("SCRAM-SHA-256", PASSWORD, b"0123456789abcdef", 4096)
    scram.write_text(scram_line("ann", "SCRAM-SHA-256", credential) + "\n")
    config = CONFIG.format(passwords=passwords, scram=scram, open=shared_topic, unknown=UNKNOWN)
    process = await GatewayProcess(directory, bootstrap, config=config).start()
    yield process
    assert await process.stop() == 0


@pytest.mark.parametrize("kind", **each(EVERY))
async def test_passwords(new_client: NewClient, strict: GatewayProcess, kind: Kind) -> None:
    # paho translates 3.1.1's codes to those of 5.
    wrong, missing = (0x86, 0x87) if kind.version == 5 or kind == PAHO_311 else (4, 5)
    client = await new_client(kind, at=strict, connected=False)
    assert (await client.connect(**ANN)).reason == 0
    client = await new_client(kind, at=strict, connected=False)
    connack = await client.connect(**WRONG)
    assert connack.reason == wrong
    client = await new_client(kind, at=strict, connected=False)
    connack = await client.connect()
    assert connack.reason == missing
    if kind.version == 5:
        assert connack.properties["reason_string"]


@pytest.mark.parametrize("kind", **each(VERSION_5))
async def test_refused_with_a_code_and_a_reason_in_version_5(
    new_client: NewClient, strict: GatewayProcess, branch: str, kind: Kind
) -> None:
    client = await new_client(kind, at=strict, **ANN)
    assert await client.subscribe(f"{CLOSED}/#", f"{branch}/a", qos=1) == [0x87, 1]
    # paho ignores PUBREC's code and continues with PUBREL.
    for qos in (1,) if kind == PAHO else (1, 2):
        for topic, code in ((f"{CLOSED}/a", 0x87), (f"{UNKNOWN}/a", 0x90)):
            answer = await client.send(topic, b"", qos)
            assert answer["reason"] == code
            assert answer["properties"]["reason_string"]
        assert await client.publish(f"{branch}/a", b"fine", qos) == 0
    await client.received(qos)
    assert client.closed == []


@pytest.mark.parametrize("kind", **each(VERSION_311))
async def test_refused_without_a_reason_in_version_311(
    new_client: NewClient, strict: GatewayProcess, branch: str, kind: Kind
) -> None:
    client = await new_client(kind, at=strict, **ANN)
    assert await client.subscribe(f"{CLOSED}/#", f"{branch}/a", qos=1) == [0x80, 1]
    assert await client.publish(f"{branch}/a", b"fine") == 0
    await client.received(1)
    if kind == AMQTT:  # its publish waits for five seconds, even if the connection is closed
        client.send(f"{CLOSED}/a", b"")
        await client.ended()
    else:
        with pytest.raises(RefusedError):
            await client.publish(f"{CLOSED}/a", b"")


async def test_no_local_on_a_shared_subscription(new_client: NewClient, branch: str) -> None:
    client = await new_client(MQTTJS)
    with pytest.raises(RefusedError):
        await client.subscribe(f"$share/group/{branch}/#", no_local=True)
    assert client.closed[0]["reason"] == 0x82
    assert client.closed[0]["properties"]["reason_string"]


@pytest.mark.parametrize("kind", **each([MQTTJS, HIVEMQ]))
async def test_scram(new_client: NewClient, strict: GatewayProcess, branch: str, kind: Kind) -> None:
    """Both sides authenticate: the drivers check the gateway's signature."""
    client = await new_client(kind, at=strict, connected=False)
    connack = await client.connect(scram=WRONG)
    assert connack.reason == 0x87
    client = await new_client(kind, at=strict, scram=ANN)
    assert await client.publish(f"{branch}/a", b"proven") == 0
    if kind == HIVEMQ:  # the other library cannot start one
        await client.reauthenticate()
        assert await client.publish(f"{branch}/a", b"proven twice") == 0
    assert client.closed == []
