"""Foreign AMQP clients that log in with a token: SASL XOAUTH2, which three of the libraries support."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator

import pytest

from tests.interop.amqp.clients import GO, RHEA, Kind, each
from tests.interop.amqp.conftest import NewClient, NewJms
from tests.interop.amqp.drivers import ACCEPTED, bodies, text
from tests.interop.amqp.jms import bodies as jms_bodies
from tests.interop.driver import RefusedError
from tests.support.gateway import GatewayProcess
from tests.support.oauth import AUDIENCE, ISSUER, key_set, token

OPEN, SHUT = (f"tokens-{uuid.uuid4().hex[:8]}" for _ in range(2))
CONFIG = f"""
[kafka]
create_topics = true
[security]
allow_anonymous = false
failed_attempt_delay_s = 0.001
[security.oauth]
jwks_file = "{{keys}}"
issuer = "{ISSUER}"
audience = ["{AUDIENCE}"]
groups_claim = "roles"
[[security.access]]
principal = "group:testers"
topic = "{OPEN}"
"""


@pytest.fixture(scope="module")
async def token_gateway(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcess]:
    """A gateway that accepts only tokens."""
    directory = tmp_path_factory.mktemp("tokens")
    keys = directory / "jwks.json"
    keys.write_bytes(key_set())
    process = await GatewayProcess(directory, bootstrap, config=CONFIG.format(keys=keys)).start()
    yield process
    assert await process.stop() == 0


def of_ann(life_s: float = 3600) -> dict[str, str]:
    """Return the fields of a login with a token for ann."""
    return {"user": "ann", "password": token("rsa", expires_s=time.time() + life_s, roles=["testers"])}


@pytest.mark.parametrize("kind", **each([RHEA, GO]))
async def test_a_token(new_client: NewClient, token_gateway: GatewayProcess, kind: Kind) -> None:
    client = await new_client(kind, at=token_gateway, mechanism="XOAUTH2", **of_ann())
    receiver, sender = await client.receiver(OPEN), await client.sender(OPEN)
    word = uuid.uuid4().hex
    assert await sender.send(text(word)) == [ACCEPTED]
    assert word in bodies(await receiver.receive(1))
    with pytest.raises(RefusedError) as refused:
        await client.sender(SHUT)
    assert "amqp:unauthorized-access" in str(refused.value)
    stranger = await new_client(kind, at=token_gateway, connected=False)
    for wrong in (of_ann(-60), {**of_ann(), "user": "bob"}):
        with pytest.raises(RefusedError):
            await stranger.connect(mechanism="XOAUTH2", **wrong)


async def test_a_token_of_jms(new_jms: NewJms, token_gateway: GatewayProcess) -> None:
    mechanism = "amqp.saslMechanisms=XOAUTH2"
    client = await new_jms(mechanism, at=token_gateway, **of_ann())
    session = await client.session()
    consumer = await session.consumer(f"topic:{OPEN}")
    word = uuid.uuid4().hex
    await (await session.producer(f"topic:{OPEN}")).texts(word)
    assert word in jms_bodies(await consumer.receive(1))
    with pytest.raises(RefusedError) as refused:
        await new_jms(mechanism, at=token_gateway, **of_ann(-60))
    assert "JMSSecuritySaslException" in str(refused.value)
