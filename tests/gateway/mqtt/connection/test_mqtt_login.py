"""Authentication of MQTT clients: SCRAM over AUTH, with aiokafka's SCRAM client; and CONNECT without a method."""

from __future__ import annotations

import asyncio
import json
import signal
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.conn import ScramAuthenticator

from gateway.mqtt.connection.login import identify, login_refusal
from gateway.security.identity import ANONYMOUS, Identity
from gateway.security.login.authentication import Authenticator
from gateway.security.login.scram import derive
from gateway.security.login.user_files import argon2_line, scram_line
from gateway.settings.config import SecurityConfig
from protocols.mqtt import packets
from protocols.mqtt.packets import Version
from protocols.mqtt.properties import NONE, Properties
from protocols.mqtt.reasons import ReasonCode
from tests.support.gateway import GatewayProcess
from tests.support.listeners import entrance
from tests.support.mqtt import RawClient
from tests.support.topics import until_led
from tests.support.waiting import wait_until

METHOD = "SCRAM-SHA-256"
TOPIC = f"scram-login-{uuid.uuid4().hex[:8]}"
CONFIG = """
[log]
level = "debug"
[security]
allow_anonymous = false
scram_file = "{path}"
failed_attempt_delay_s = 0
[[security.access]]
principal = "ann"
topic = "{topic}"
"""


def line(user: str, password: str, method: str = METHOD) -> str:
    return scram_line(user, method, derive(method, password, b"0123456789abcdef", 4096)) + "\n"


@pytest.fixture(scope="module")
async def secured(
    bootstrap: str, admin: AIOKafkaAdminClient, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[GatewayProcess, Path]]:
    """A gateway that accepts only SCRAM logins, and its SCRAM file."""
    await admin.create_topics([NewTopic(TOPIC, 1, 1)])
    await until_led(admin, TOPIC)
    directory = tmp_path_factory.mktemp("scram")
    path = directory / "scram"
    path.write_text(line("ann", "secret") + line("ann", "secret", "SCRAM-SHA-512") + line("bob", "other"))
    config = CONFIG.format(path=path, topic=TOPIC)
    process = await GatewayProcess(directory, bootstrap, config=config).start()
    yield process, path
    await process.stop()


@pytest.fixture
async def open_client(secured: tuple[GatewayProcess, Path]) -> AsyncIterator[Callable[[], Awaitable[RawClient]]]:
    clients: list[RawClient] = []

    async def open_one() -> RawClient:
        clients.append(await RawClient.open(secured[0].address("mqtt")))
        return clients[-1]

    yield open_one
    for client in clients:
        client.drop()


def scram(user: str = "ann", password: str = "secret", method: str = METHOD) -> Any:
    return ScramAuthenticator(loop=None, sasl_plain_username=user, sasl_plain_password=password, sasl_mechanism=method)


def proof(data: bytes | None, method: str = METHOD) -> Properties:
    return Properties(authentication_method=method, authentication_data=data)


def said(packet: packets.Auth | packets.Connack) -> tuple[str | None, str]:
    """The method and the data of an AUTH or a CONNACK."""
    properties = packet.properties or NONE
    return properties.authentication_method, (properties.authentication_data or b"").decode()


async def log_in(client: RawClient, steps: Any, method: str = METHOD, **connect: Any) -> packets.Connack:
    first = proof(steps.first_message().encode(), method)
    client.send(packets.Connect(Version.V5, "", properties=first, **connect))
    return await answered(client, steps, packets.Connack, method)


async def answered(client: RawClient, steps: Any, verdict: type[Any], method: str = METHOD) -> Any:
    """Answer the server's challenge, and wait for the result."""
    auth = await client.expect(packets.Auth)
    assert auth.reason_code == ReasonCode.CONTINUE_AUTHENTICATION
    named, challenge = said(auth)
    assert named == method
    steps.process_server_first_message(challenge)
    last = proof(steps.final_message().encode(), method)
    client.send(packets.Auth(ReasonCode.CONTINUE_AUTHENTICATION, last))
    return await client.expect(verdict)


async def logged_in(client: RawClient) -> RawClient:
    assert (await log_in(client, scram())).reason_code == 0
    return client


@pytest.mark.clause("MQTT-4.12.0-2", "MQTT-4.12.0-5")
@pytest.mark.parametrize("method", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_a_login(open_client: Any, method: str) -> None:
    client, steps = await open_client(), scram(method=method)
    connack = await log_in(client, steps, method)
    assert connack.reason_code == 0
    named, last_word = said(connack)
    assert named == method
    steps.process_server_final_message(last_word)  # the server has the keys: mutual authentication
    assert await client.publish(f"{TOPIC}/a", b"by ann") == 0


async def test_the_identity_is_the_methods(open_client: Any) -> None:
    """With a method, CONNECT's user name and password are ignored; the access list gets the SCRAM user."""
    client = await open_client()
    connack = await log_in(client, scram("bob", "other"), username="ann", password=b"secret")
    assert connack.reason_code == 0
    assert await client.publish(f"{TOPIC}/a") == ReasonCode.NOT_AUTHORIZED


@pytest.mark.clause("MQTT-4.12.0-4")
@pytest.mark.parametrize(("user", "password"), [("ann", "wrong"), ("eve", "secret")])
async def test_a_refused_login(open_client: Any, user: str, password: str) -> None:
    """A wrong password and an unknown name look the same."""
    client = await open_client()
    connack = await log_in(client, scram(user, password))
    assert connack.reason_code == ReasonCode.NOT_AUTHORIZED
    assert connack.properties is not None
    assert connack.properties.reason_string == "authentication failed"
    assert await client.expect_end() == []


@pytest.mark.clause("MQTT-4.12.0-4")
@pytest.mark.parametrize("data", [b"", b"nonsense", b"p=tls-unique,,n=ann,r=c", b"\xff"])
async def test_data_that_is_no_scram(open_client: Any, data: bytes) -> None:
    client = await open_client()
    client.send(packets.Connect(Version.V5, "", properties=proof(data)))
    (connack,) = await client.expect_end()
    assert isinstance(connack, packets.Connack)
    assert connack.reason_code == ReasonCode.NOT_AUTHORIZED


@pytest.mark.clause("MQTT-4.12.0-1")
@pytest.mark.parametrize("method", ["SCRAM-SHA-1", "scram-sha-256", "PLAIN", "SCRAM-SHA-256-PLUS"])
async def test_a_method_that_is_not_served(open_client: Any, method: str) -> None:
    client = await open_client()
    client.send(packets.Connect(Version.V5, "", properties=proof(b"n,,n=ann,r=c", method)))
    (connack,) = await client.expect_end()
    assert isinstance(connack, packets.Connack)
    assert connack.reason_code == ReasonCode.BAD_AUTHENTICATION_METHOD


async def test_a_client_that_lets_the_server_begin(open_client: Any) -> None:
    client, steps = await open_client(), scram()
    client.send(packets.Connect(Version.V5, "", properties=proof(None)))
    auth = await client.expect(packets.Auth)
    assert (auth.reason_code, said(auth)) == (ReasonCode.CONTINUE_AUTHENTICATION, (METHOD, ""))
    client.send(packets.Auth(ReasonCode.CONTINUE_AUTHENTICATION, proof(steps.first_message().encode())))
    assert (await answered(client, steps, packets.Connack)).reason_code == 0


@pytest.mark.clause("MQTT-4.12.0-6")
@pytest.mark.parametrize(
    ("version", "credentials", "code"),
    [
        (5, {}, ReasonCode.NOT_AUTHORIZED),
        (5, {"username": "ann", "password": b"secret"}, ReasonCode.BAD_USER_NAME_OR_PASSWORD),
        (4, {}, 5),
        (4, {"username": "ann", "password": b"secret"}, 4),
    ],
)
async def test_without_a_method_nothing_is_proven(
    secured: tuple[GatewayProcess, Path], version: int, credentials: dict[str, Any], code: int
) -> None:
    client = await RawClient.connect(secured[0].address("mqtt"), version=version, **credentials)
    assert client.connack.reason_code == code
    assert client.granted.authentication_method is None
    assert await client.expect_end() == []
    client.drop()


async def test_a_log_at_level_debug_tells_why_a_connect_was_refused(secured: tuple[GatewayProcess, Path]) -> None:
    client_id = uuid.uuid4().hex * 2000  # 64,000 characters, of which the log has some
    client = await RawClient.connect(secured[0].address("mqtt"), client_id)
    client.drop()
    (line,) = [one for one in secured[0].log.read_text().splitlines() if client_id[:64] in one]
    logged = json.loads(line)
    assert logged["event"] == "connection refused"
    assert logged["peer"].startswith("127.0.0.1:")
    assert logged["reason"]
    assert len(line) < 4000


@pytest.mark.clause("MQTT-4.12.0-5", "MQTT-4.12.1-1")
async def test_re_authentication(open_client: Any) -> None:
    """During re-authentication the old identity publishes; afterwards the client continues, and may repeat it."""
    client = await logged_in(await open_client())
    for _ in range(2):
        steps = scram()
        client.send(packets.Auth(ReasonCode.RE_AUTHENTICATE, proof(steps.first_message().encode())))
        auth = await client.expect(packets.Auth)
        assert await client.publish(f"{TOPIC}/a", b"meanwhile") == 0
        steps.process_server_first_message(said(auth)[1])
        client.send(packets.Auth(ReasonCode.CONTINUE_AUTHENTICATION, proof(steps.final_message().encode())))
        success = await client.expect(packets.Auth)
        assert success.reason_code == ReasonCode.SUCCESS
        assert said(success)[0] == METHOD
        steps.process_server_final_message(said(success)[1])
        assert await client.publish(f"{TOPIC}/a", b"afterwards") == 0
    await client.disconnect()


@pytest.mark.clause("MQTT-4.12.1-2")
@pytest.mark.parametrize(("user", "password"), [("ann", "wrong"), ("bob", "other")])
async def test_a_re_authentication_that_fails(
    secured: tuple[GatewayProcess, Path], open_client: Any, user: str, password: str
) -> None:
    """A wrong password, or another user, who does not own the session; the log tells why the connection ended."""
    client, steps = await open_client(), scram(user, password)
    client_id = ((await log_in(client, scram())).properties or NONE).assigned_client_identifier
    client.send(packets.Auth(ReasonCode.RE_AUTHENTICATE, proof(steps.first_message().encode())))
    closing = await answered(client, steps, packets.Disconnect)
    assert closing.reason_code == ReasonCode.NOT_AUTHORIZED
    assert await client.expect_end() == []
    client.drop()

    def told() -> list[str]:
        lines = map(json.loads, secured[0].log.read_text().splitlines())
        return [
            one["reason"] for one in lines if (one["event"], one.get("client")) == ("client disconnected", client_id)
        ]

    await wait_until(told)
    assert told() == ["re-authentication failed"]


@pytest.mark.clause("MQTT-4.12.1-1")
@pytest.mark.parametrize(
    "auths",
    [
        [packets.Auth(ReasonCode.CONTINUE_AUTHENTICATION, proof(b"n,,n=ann,r=c"))],
        [packets.Auth(ReasonCode.RE_AUTHENTICATE, proof(b"n,,n=ann,r=c"))] * 2,
        [packets.Auth(ReasonCode.RE_AUTHENTICATE, proof(b"n,,n=ann,r=c", "SCRAM-SHA-512"))],
    ],
    ids=["without a beginning", "amid another", "another method"],
)
async def test_auth_out_of_turn(open_client: Any, auths: list[packets.Auth]) -> None:
    client = await logged_in(await open_client())
    for auth in auths:
        client.send(auth)
    *_, closing = await client.expect_end()
    assert isinstance(closing, packets.Disconnect)
    assert closing.reason_code == ReasonCode.PROTOCOL_ERROR


async def test_a_new_user_after_sighup(secured: tuple[GatewayProcess, Path], open_client: Any) -> None:
    process, path = secured
    path.write_text(path.read_text() + line("eve", "new"))
    process.process.send_signal(signal.SIGHUP)  # type: ignore[union-attr]
    found: list[int] = []
    async with asyncio.timeout(60):
        while 0 not in found:
            found.append((await log_in(await open_client(), scram("eve", "new"))).reason_code)


async def test_what_connect_alone_proves(tmp_path: Path) -> None:
    path = tmp_path / "passwords"
    path.write_text(argon2_line("ann", "secret") + "\n")
    certificate = {"subject": ((("commonName", "pump-7"),),)}
    authenticator = Authenticator(SecurityConfig(password_file=path, failed_attempt_delay_s=0))
    await authenticator.start()
    door = entrance(authenticator)

    async def who(peercert: Any = None, **fields: Any) -> Identity | None:
        return await identify(door, packets.Connect(Version.V5, "c", **fields), peer="", certificate=peercert)

    assert await who(username="ann", password=b"secret") == Identity("ann", "password")
    assert await who(username="ann", password=b"wrong") is None
    assert await who(certificate, username="ann", password=b"wrong") is None
    assert await who(certificate) == Identity("pump-7", "certificate")
    assert await who() == ANONYMOUS
    await authenticator.stop()
    assert login_refusal(packets.Connect(Version.V5, "c"))[0] == ReasonCode.NOT_AUTHORIZED
    wrong = packets.Connect(Version.V5, "c", username="ann")
    assert login_refusal(wrong)[0] == ReasonCode.BAD_USER_NAME_OR_PASSWORD
