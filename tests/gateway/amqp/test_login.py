"""Logins: SASL with proton's own client, and TLS client certificates."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiokafka.conn import ScramAuthenticator
from argon2 import PasswordHasher
from proton import ConnectionException, Message
from proton.utils import BlockingConnection

from gateway.amqp.login import AmqpLogin
from gateway.security.identity import Identity
from gateway.security.login.authentication import Authenticator
from gateway.security.login.exchange import Done, Failed
from gateway.security.login.scram import derive
from gateway.security.login.user_files import scram_line
from gateway.settings.config import AccessRule, SecurityConfig
from mapping.amqp.addresses import AddressError, SourceAddress, TargetAddress, parse_source, parse_target
from protocols.amqp import outcomes
from protocols.amqp.events import SaslInitReceived, SaslResponseReceived
from tests.support.listeners import entrance

TIMEOUT = 60


@pytest.fixture(scope="module")
def password_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("passwords") / "passwords"
    path.write_text(f"ann:{PasswordHasher().hash('secret')}\n")
    return path


@pytest.fixture
def secured(password_file: Path) -> Callable[..., SecurityConfig]:
    def make(**options: Any) -> SecurityConfig:
        return SecurityConfig(
            **{"allow_anonymous": False, "password_file": password_file, "failed_attempt_delay_s": 0.0, **options}
        )

    return make


async def raw(listener: Any, data: bytes, size: int) -> bytes:
    host, port = listener.bound.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    async with asyncio.timeout(TIMEOUT):
        found = await reader.read(size) if size else await reader.read()
    writer.close()
    return found


def sasl_init(mechanism: bytes, response: bytes) -> bytes:
    items = b"\xa3" + bytes([len(mechanism)]) + mechanism + b"\xa0" + bytes([len(response)]) + response
    body = b"\x00\x53\x41\xc0" + bytes([len(items) + 1, 2]) + items
    return b"AMQP\x03\x01\x00\x00" + (len(body) + 8).to_bytes(4, "big") + b"\x02\x01\x00\x00" + body


@pytest.mark.parametrize(
    ("response", "code"),
    [
        (b"\0ann\0secret", 0),
        (b"ann\0ann\0secret", 0),
        (b"\0ann\0wrong", 1),
        (b"\0bob\0secret", 1),
        (b"bob\0ann\0secret", 1),  # acting for another user
        (b"ann", 1),
        (b"\0\xff\0secret", 1),
        (b"", 1),
    ],
)
@pytest.mark.clause("AMQP-5.3.3.6")
async def test_sasl_plain(start_listener: Any, secured: Any, response: bytes, code: int) -> None:
    listener = await start_listener(security=secured())
    host, port = listener.bound.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sasl_init(b"PLAIN", response))
    found = b""
    async with asyncio.timeout(TIMEOUT):
        while b"\x00\x53\x44" not in found:
            part = await reader.read(1000)
            assert part, found
            found += part
    writer.close()
    await writer.wait_closed()
    assert found.endswith(b"\x00\x53\x44\xc0\x03\x01\x50" + bytes([code]))
    assert listener.statistics().refused_logins == code


def sasl_frame(code: int, data: bytes) -> bytes:
    body = b"\x00\x53" + bytes([code, 0xC0, len(data) + 3, 1, 0xA0, len(data)]) + data
    return (len(body) + 8).to_bytes(4, "big") + b"\x02\x01\x00\x00" + body


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await reader.readexactly(4), "big")
    return (await reader.readexactly(size - 4))[4:]


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
@pytest.mark.parametrize("begins", ["client", "server"])
@pytest.mark.parametrize("password", ["secret", "wrong"])
@pytest.mark.clause("AMQP-5.3.2")
async def test_sasl_scram(start_listener: Any, tmp_path: Path, mechanism: str, begins: str, password: str) -> None:
    """The SCRAM messages are from aiokafka's client, which also verifies the server; the frames are hand-written."""
    path = tmp_path / "scram"
    path.write_text(scram_line("ann", mechanism, derive(mechanism, "secret", b"0123456789abcdef", 4096)))
    listener = await start_listener(
        security=SecurityConfig(allow_anonymous=False, scram_file=path, failed_attempt_delay_s=0.0)
    )
    client = ScramAuthenticator(
        loop=None, sasl_plain_username="ann", sasl_plain_password=password, sasl_mechanism=mechanism
    )
    host, port = listener.bound.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(TIMEOUT):
        writer.write(b"AMQP\x03\x01\x00\x00")
        assert await reader.readexactly(8) == b"AMQP\x03\x01\x00\x00"
        assert mechanism.encode() in await read_frame(reader)
        first = client.first_message().encode()
        if begins == "client":
            writer.write(sasl_init(mechanism.encode(), first)[8:])
        else:  # an init without a response: the server asks for it by an empty challenge
            body = b"\x00\x53\x41\xc0" + bytes([len(mechanism) + 3, 1, 0xA3, len(mechanism)]) + mechanism.encode()
            writer.write((len(body) + 8).to_bytes(4, "big") + b"\x02\x01\x00\x00" + body)
            assert await read_frame(reader) == b"\x00\x53\x42\xc0\x03\x01\xa0\x00"
            writer.write(sasl_frame(0x43, first))
        challenge = await read_frame(reader)
        assert challenge[:3] == b"\x00\x53\x42"
        client.process_server_first_message(challenge[challenge.index(b"r=") :].decode())
        writer.write(sasl_frame(0x43, client.final_message().encode()) + b"AMQP\x00\x01\x00\x00")
        outcome = await read_frame(reader)
        if password == "secret":
            assert outcome[:3] == b"\x00\x53\x44"
            client.process_server_final_message(outcome[outcome.index(b"v=") :].decode())
            assert await reader.readexactly(8) == b"AMQP\x00\x01\x00\x00"
        else:
            assert outcome == b"\x00\x53\x44\xc0\x03\x01\x50\x01"
            assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    assert listener.statistics().refused_logins == (password == "wrong")


async def test_anonymous_is_refused_where_it_is_not_allowed(start_listener: Any, secured: Any) -> None:
    listener = await start_listener(security=secured())
    assert await raw(listener, b"AMQP\x00\x01\x00\x00", 0) == b"AMQP\x03\x01\x00\x00"
    answer = await raw(listener, sasl_init(b"ANONYMOUS", b""), 0)
    assert answer.endswith(b"\x00\x53\x44\xc0\x03\x01\x50\x01")

    def client() -> None:
        with pytest.raises(ConnectionException):
            BlockingConnection(f"amqp://{listener.bound}", timeout=TIMEOUT)

    await asyncio.to_thread(client)


async def test_other_protocols_are_told_ours(listener: Any) -> None:
    for first in (b"GET / HTTP/1.1\r\n\r\n", b"AMQP\x00\x00\x09\x01", b"\x10\x0c\x00\x04MQTT\x05\x02\x00\x3c\x00\x00"):
        assert await raw(listener, first, 0) == b"AMQP\x00\x01\x00\x00"


async def test_external_by_certificate(start_listener: Any, secured: Any, new_topic: Any, tmp_path: Path) -> None:
    topic = await new_topic()
    authority = trustme.CA()
    server, client = authority.issue_cert("localhost"), authority.issue_cert("device@x", common_name="device-7")
    server.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    files = {
        "tls_cert": tmp_path / "server.pem",
        "tls_key": tmp_path / "server.pem",
        "tls_client_ca": tmp_path / "ca.pem",
    }
    rules = (AccessRule(principal="device-7", action="publish", topic=topic),)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    listener = await start_listener(security=secured(access=rules, **files))
    client.private_key_pem.write_to_path(tmp_path / "key.pem")
    client.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    trusted = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    trusted.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    host, port = listener.bound.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port), ssl=trusted, server_hostname="localhost")
    writer.write(sasl_init(b"EXTERNAL", b""))
    found = b""
    async with asyncio.timeout(TIMEOUT):
        while b"\x00\x53\x44" not in found:
            part = await reader.read(1000)
            assert part, found
            found += part
    assert b"\x08EXTERNAL" in found
    assert found.endswith(b"\x00\x53\x44\xc0\x03\x01\x50\x00")
    writer.close()
    await writer.wait_closed()


async def test_authentication_by_each_mechanism(secured: Any) -> None:
    authenticator = Authenticator(secured(allow_anonymous=True))
    await authenticator.start()
    certificate = {"subject": ((("commonName", "device-7"),),)}

    async def who(mechanism: str, response: bytes | None, peercert: Any = None) -> Identity | None:
        verdict = await AmqpLogin(entrance(authenticator), peer="127.0.0.1:1", certificate=peercert).step(
            SaslInitReceived(mechanism, response)
        )
        assert isinstance(verdict, Done | Failed)
        return verdict.identity if isinstance(verdict, Done) else None

    try:
        assert await who("ANONYMOUS", b"trace") == Identity("anonymous", "anonymous")
        assert await who("EXTERNAL", b"", certificate) == Identity("device-7", "certificate")
        assert await who("EXTERNAL", b"device-7", certificate) == Identity("device-7", "certificate")
        assert await who("EXTERNAL", b"other", certificate) is None
        assert await who("EXTERNAL", None) is None
        assert await who("PLAIN", b"\0ann\0secret") == Identity("ann", "password")
        assert await who("PLAIN", None) is None
        assert await who("SCRAM-SHA-256", b"n,,n=ann,r=nonce") is None  # no file with such users is configured
        verdict = await AmqpLogin(entrance(authenticator), peer="127.0.0.1:1", certificate=None).step(
            SaslResponseReceived(b"")
        )
        assert isinstance(verdict, Failed)
    finally:
        await authenticator.stop()


async def test_plain_by_proton_needs_cyrus_so_the_user_comes_by_the_url(listener: Any, new_topic: Any) -> None:
    """proton's client without Cyrus falls back to ANONYMOUS, which the listener accepts where it is allowed."""
    topic = await new_topic()

    def client() -> None:
        connection = BlockingConnection(f"amqp://{listener.bound}", timeout=TIMEOUT, allowed_mechs="ANONYMOUS")
        connection.create_sender(topic).send(Message(body=b"x", inferred=True))
        connection.close()

    await asyncio.to_thread(client)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("t", TargetAddress("t")),
        ("topic://t", TargetAddress("t")),
        ("queue://t", TargetAddress("t")),
        ("/topics/t", TargetAddress("t")),
        ("/queues/t/partitions/3", TargetAddress("t", 3)),
        ("t/partitions/x", TargetAddress("t", None, b"partitions/x")),
        ("t/a/b", TargetAddress("t", None, b"a/b")),
        ("t/", TargetAddress("t")),
    ],
)
def test_target_addresses(address: str, expected: TargetAddress) -> None:
    assert parse_target(address) == expected


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("t", SourceAddress("t")),
        ("queue://t/group.id/g", SourceAddress("t", "g")),
        ("t/group.id/a/b", SourceAddress("t", "a/b")),
    ],
)
def test_source_addresses(address: str, expected: SourceAddress) -> None:
    assert parse_source(address) == expected


@pytest.mark.parametrize("address", [None, "", "/", "a b", "__x", "..", "t/group.id/g", "x" * 250])
def test_targets_that_are_none(address: str | None) -> None:
    with pytest.raises(AddressError) as caught:
        parse_target(address)
    assert caught.value.error.condition in (
        outcomes.NOT_IMPLEMENTED,
        outcomes.NOT_FOUND,
        outcomes.UNAUTHORIZED_ACCESS,
        outcomes.INVALID_FIELD,
    )
