"""TLS over real sockets: versions, client certificates, a new certificate without a restart."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import structlog
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from gateway.security.identity import Identity
from gateway.security.login.authentication import Authenticator
from gateway.security.tls import Certificates
from gateway.settings.config import ConfigError, SecurityConfig
from gateway.settings.listeners import TlsConfig
from tests.support.listeners import entrance

HOST = "127.0.0.1"
AUTHORITY = trustme.CA()
CLIENTS = trustme.CA()


class Files:
    """The server's files in a directory."""

    def __init__(self, directory: Path) -> None:
        self.cert = directory / "server.pem"
        self.key = directory / "server.key"
        self.ca = directory / "clients.pem"
        self.serial = 0
        self.renew()
        CLIENTS.cert_pem.write_to_path(str(self.ca))

    def renew(self, ends: datetime | None = None) -> trustme.LeafCert:
        leaf = AUTHORITY.issue_cert(HOST, not_after=ends)
        self.cert.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        self.key.write_bytes(leaf.private_key_pem.bytes())
        return leaf

    def config(self, **options: Any) -> TlsConfig:
        config = SecurityConfig(tls_cert=self.cert, tls_key=self.key, **options).tls
        assert config is not None
        return config


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def client_context(leaf: trustme.LeafCert | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    AUTHORITY.configure_trust(context)
    if leaf is not None:
        leaf.configure_cert(context)
    return context


Seen = list[dict[str, Any] | None]
Serve = Callable[[TlsConfig], Awaitable[tuple[int, Seen]]]


@pytest.fixture
def certificates() -> Certificates:
    return Certificates()


@pytest.fixture
async def serve(certificates: Certificates) -> AsyncIterator[Serve]:
    """Starts a server that sends one line to each client and records the client certificates."""
    servers: list[asyncio.Server] = []

    async def start(config: TlsConfig) -> tuple[int, Seen]:
        seen: Seen = []

        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append(writer.get_extra_info("peercert"))
            writer.write(b"welcome\n")
            await reader.read()
            writer.close()

        server = await asyncio.start_server(greet, HOST, 0, ssl=certificates.context(config))
        servers.append(server)
        return server.sockets[0].getsockname()[1], seen

    yield start
    for server in servers:
        server.close()
        await server.wait_closed()


async def visit(port: int, context: ssl.SSLContext) -> tuple[bytes, bytes, str]:
    """Connect; the greeting, the server's certificate (DER) and the TLS version."""
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
        try:
            greeting = await reader.readline()
            tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
            der = tls.getpeercert(binary_form=True) or b""
            return greeting, der, tls.version() or ""
        finally:
            writer.close()
            await writer.wait_closed()


async def test_a_handshake(files: Files, serve: Serve) -> None:
    port, seen = await serve(files.config())
    greeting, _, version = await visit(port, client_context())
    assert greeting == b"welcome\n"
    assert version == "TLSv1.3"
    assert seen in ([{}], [None])


async def test_nothing_older_than_1_2(files: Files, certificates: Certificates, serve: Serve) -> None:
    context = certificates.context(files.config())
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    port, _ = await serve(files.config())
    newest = client_context()
    newest.maximum_version = ssl.TLSVersion.TLSv1_2
    assert (await visit(port, newest))[2] == "TLSv1.2"


async def test_no_alpn_is_forced(files: Files, serve: Serve) -> None:
    port, _ = await serve(files.config())
    context = client_context()
    context.set_alpn_protocols(["mqtt", "http/1.1"])
    assert (await visit(port, context))[0] == b"welcome\n"


async def test_a_client_certificate_is_an_identity(files: Files, serve: Serve) -> None:
    port, seen = await serve(files.config(tls_client_ca=files.ca))
    leaf = CLIENTS.issue_cert("pump-7.example", common_name="pump-7")
    assert (await visit(port, client_context(leaf)))[0] == b"welcome\n"
    unnamed = CLIENTS.issue_cert("pump-8.example")
    assert (await visit(port, client_context(unnamed)))[0] == b"welcome\n"
    assert (await visit(port, client_context()))[0] == b"welcome\n"
    authenticator = Authenticator(SecurityConfig())
    assert [entrance(authenticator).identify_certificate(one) for one in seen] == [
        Identity("pump-7", "certificate"),
        Identity("pump-8.example", "certificate"),
        None,
    ]


async def test_a_certificate_of_somebody_else_is_refused(files: Files, serve: Serve) -> None:
    port, seen = await serve(files.config(tls_client_ca=files.ca))
    stranger = trustme.CA().issue_cert("pump-7.example", common_name="pump-7")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        assert (await visit(port, client_context(stranger)))[0] == b"welcome\n" or raise_reset()
    assert seen == []


async def test_a_required_certificate(files: Files, serve: Serve) -> None:
    port, seen = await serve(files.config(tls_client_ca=files.ca, tls_require_client_cert=True))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        assert (await visit(port, client_context()))[0] == b"welcome\n" or raise_reset()
    assert seen == []
    leaf = CLIENTS.issue_cert("pump-7.example")
    assert (await visit(port, client_context(leaf)))[0] == b"welcome\n"


def raise_reset() -> bool:
    """With TLS 1.3 the refusal may come after the client's handshake: the connection closes without a greeting."""
    raise ConnectionResetError


def reload(certificates: Certificates) -> list[str]:
    """The levels of the log lines of a reload."""
    with structlog.testing.capture_logs() as lines:
        certificates.reload()
    return [line["log_level"] for line in lines]


async def test_reload_serves_the_new_certificate_at_once(
    files: Files, certificates: Certificates, serve: Serve
) -> None:
    port, _ = await serve(files.config())
    before = (await visit(port, client_context()))[1]
    assert (await visit(port, client_context()))[1] == before
    files.renew()
    assert reload(certificates) == ["info"]
    after = (await visit(port, client_context()))[1]
    assert after != before


def test_the_first_end_of_a_chain_is_told_and_follows_a_reload(files: Files, certificates: Certificates) -> None:
    config = files.config()
    for year in (2040, 2035):
        files.renew(datetime(year, 1, 2, tzinfo=UTC))
        certificates.context(config)
        certificates.reload()
        assert certificates.end(config) == datetime(year, 1, 2, tzinfo=UTC).timestamp()


@pytest.mark.parametrize("breakage", ["key of another", "no PEM", "gone", "half"])
async def test_a_broken_file_keeps_the_old_certificate(
    files: Files, certificates: Certificates, serve: Serve, breakage: str
) -> None:
    port, _ = await serve(files.config())
    before = (await visit(port, client_context()))[1]
    spoil(files, breakage)
    assert reload(certificates) == ["error"]
    assert (await visit(port, client_context()))[1] == before


def spoil(files: Files, breakage: str) -> None:
    match breakage:
        case "key of another":
            key = files.key.read_bytes()
            files.renew()
            files.key.write_bytes(key)
        case "no PEM":
            files.cert.write_text("hello")
        case "gone":
            files.key.unlink()
        case "half":
            files.cert.write_bytes(files.cert.read_bytes()[:300])


def test_the_key_of_the_configuration_is_named(files: Files, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^security\.tls_client_ca: cannot read .*No such file"):
        Certificates().context(files.config(tls_client_ca=tmp_path / "none"))
    empty = tmp_path / "empty"
    empty.write_text("")
    with pytest.raises(ConfigError, match=r"^security\.tls_client_ca: "):
        Certificates().context(files.config(tls_client_ca=empty))
    files.cert.write_text("hello")
    with pytest.raises(ConfigError, match=r"^security\.tls_cert, security\.tls_key: "):
        Certificates().context(files.config())


def test_an_encrypted_key_is_refused_and_not_asked_for(files: Files) -> None:
    key = load_pem_private_key(files.key.read_bytes(), None)
    encrypted = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"hunter2"))
    files.key.write_bytes(encrypted)
    with pytest.raises(ConfigError, match=r"^security\.tls_key: the key is encrypted"):
        Certificates().context(files.config())


def test_no_certificate_no_tls(files: Files) -> None:
    assert SecurityConfig().tls is None
    assert Certificates().context(None) is None


def test_listeners_with_the_same_files_share_what_is_loaded(files: Files) -> None:
    certificates = Certificates()
    one, other = (certificates.context(files.config()) for _ in range(2))
    asking = certificates.context(files.config(tls_client_ca=files.ca))
    assert one is other is not asking is not None
    with pytest.raises(ConfigError, match=r"^listeners\.mqtts\.tls\.cert: cannot read .*No such file"):
        certificates.context(TlsConfig(cert=files.cert.parent / "none", key=files.key), "listeners.mqtts.tls.")
