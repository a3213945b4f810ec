"""Logins over HTTP, and the rights of clients."""

import json
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from pwdlib.hashers.argon2 import Argon2Hasher

from gateway.audit.trail import AuditTrail
from gateway.net.listener import ListenError
from gateway.runtime.audited import audit
from gateway.runtime.secret import Redactor
from gateway.settings.config import AccessRule, Address, SecurityConfig
from tests.gateway.rest.conftest import CONTROL, JSON_RECORDS, Gateway, ask, read_topic, running_gateway

CHEAP = Argon2Hasher(time_cost=1, memory_cost=64, parallelism=1)
ANN = {"Authorization": aiohttp.encode_basic_auth("ann", "secret")}
BOB = {"Authorization": aiohttp.encode_basic_auth("bob", "other")}
BODY = {"records": [{"key": "public/a", "value": 1}]}


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "passwords"
    path.write_text(f"ann:{CHEAP.hash('secret')}\nbob:{CHEAP.hash('other')}\n")
    return path


@pytest.fixture
async def guarded(bootstrap: str, password_file: Path) -> AsyncIterator[Gateway]:
    """ann may do everything; bob may publish keys below `public/`, and nothing else; groups are shared."""
    access = (
        AccessRule(principal="bob", action="publish", topic="+/public/#"),
        AccessRule(principal="bob", allow=False),
        AccessRule(principal="ann"),
        AccessRule(group="g-*", action="read"),
    )
    security = SecurityConfig(
        allow_anonymous=False, password_file=password_file, access=access, failed_attempt_delay_s=0
    )
    async with running_gateway(bootstrap, security=security) as gateway:
        yield gateway


async def test_a_name_and_password_are_needed(guarded: Gateway, new_topic: Any, bootstrap: str) -> None:
    topic = await new_topic(partitions=1)
    async with aiohttp.ClientSession(guarded.url) as http:
        for user, password in (("", ""), ("ann", "wrong"), ("eve", "secret")):
            wrong = {"Authorization": aiohttp.encode_basic_auth(user, password)} if user else {}
            async with http.post(f"/topics/{topic}", json=BODY, headers=JSON_RECORDS | wrong) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"].startswith("Basic realm=")
                assert (await response.json(content_type=None))["error_code"] == 401
        for malformed in ("Basic", "Basic !!!", "Basic YW5u", "Bearer abc", "Basic /w=="):
            answer = await ask(http, "GET", "/topics", headers={"Authorization": malformed})
            assert answer[0] == 401
        for _ in range(2):
            status, _ = await ask(http, "POST", f"/topics/{topic}", BODY, headers=JSON_RECORDS | ANN)
            assert status == 200
    record = (await read_topic(bootstrap, topic, 2))[0]
    assert ("gw.client", b"ann") in record.headers


async def test_the_access_list_is_checked_for_every_record(guarded: Gateway, new_topic: Any, bootstrap: str) -> None:
    topic = await new_topic(partitions=1)
    async with aiohttp.ClientSession(guarded.url, headers=BOB) as http:
        mixed = {"records": [{"key": "public/a", "value": 1}, {"key": "secret", "value": 2}, {"value": 3}]}
        status, body = await ask(http, "POST", f"/topics/{topic}", mixed, headers=JSON_RECORDS)
        assert status == 200
        assert [result.get("error_code") for result in body["offsets"]] == [None, 403, 403]
        denied = {"records": [{"key": "secret", "value": 2}]}
        assert (await ask(http, "POST", f"/topics/{topic}", denied, headers=JSON_RECORDS))[0] == 403
        assert (await ask(http, "POST", f"/topics/{topic}?async=true", mixed, headers=JSON_RECORDS))[0] == 403
    assert [record.value for record in await read_topic(bootstrap, topic, 1)] == [b"1"]
    async with aiohttp.ClientSession(guarded.url, headers=ANN) as http:
        offsets = await ask(http, "GET", f"/topics/{topic}/partitions/0/offsets")
        assert offsets == (200, {"beginning_offset": 0, "end_offset": 1})


class AuditLines:
    """A sink of the audit trail."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []

    def __call__(self, line: bytes) -> bool:
        self.all.append(json.loads(line))
        return True


@pytest.mark.parametrize("version", ["lines", "v3", "v3 batch"])
async def test_a_denied_record_of_a_stream_or_batch_is_in_the_audit_trail(
    guarded: Gateway, new_topic: Any, version: str
) -> None:
    topic, lines = await new_topic(partitions=1), AuditLines()
    audit.trail = trail = AuditTrail("gateway", Redactor())
    trail.sinks = (lines,)
    try:
        async with aiohttp.ClientSession(guarded.url, headers=BOB) as http:
            cluster = (await ask(http, "GET", "/v3/clusters"))[1]["data"][0]["cluster_id"]
            path, media = f"/v3/clusters/{cluster}/topics/{topic}/records", "application/json"
            body: dict[str, Any] = {
                "key": {"type": "STRING", "data": "secret"},
                "value": {"type": "STRING", "data": "x"},
            }
            if version == "lines":
                path, media, body = f"/topics/{topic}/records", "application/x-ndjson", {"key": "secret", "value": 1}
            elif version == "v3 batch":
                path, body = f"{path}:batch", {"entries": [{"id": "1", **body}]}
            async with http.post(path, data=json.dumps(body), headers={"Content-Type": media}) as response:
                assert f"publish to {topic} with this key" in await response.text()
    finally:
        audit.trail = None
        trail.end()
    denied = [(line["principal"], line["what"], line["on"]) for line in lines.all if line["event"] == "right"]
    assert denied == [("bob", "publish", topic)]


async def test_a_subscription_needs_the_whole_topic_and_a_consumer_belongs_to_its_owner(
    guarded: Gateway, new_topic: Any
) -> None:
    topic = await new_topic(partitions=1)
    async with aiohttp.ClientSession(guarded.url) as http:
        for owner, auth, expected in (("ann", ANN, 204), ("bob", BOB, 403)):
            settings = {"name": owner}
            created = await ask(http, "POST", f"/consumers/g-{topic}", settings, headers=CONTROL | auth)
            assert created[0] == 200
            path = f"/consumers/g-{topic}/instances/{owner}/subscription"
            answer = await ask(http, "POST", path, {"topics": [topic]}, headers=CONTROL | auth)
            assert answer[0] == expected
        path = f"/consumers/g-{topic}/instances/ann"
        assert (await ask(http, "GET", f"{path}/records", headers=BOB))[0] == 403
        assert (await ask(http, "DELETE", path, headers=BOB))[0] == 403
        assert (await ask(http, "DELETE", path, headers=ANN))[0] == 204
        assert (await ask(http, "GET", f"/consumers/g-{topic}", headers=ANN))[0] == 405
        assert topic in (await ask(http, "GET", "/topics", headers=ANN))[1]


async def test_a_client_certificate_is_an_identity(bootstrap: str, tmp_path: Path, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    authority = trustme.CA()
    server = authority.issue_cert("127.0.0.1")
    client = authority.issue_cert("device@example", common_name="device-7")
    certificate, key, ca = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem"
    certificate.write_bytes(b"".join(blob.bytes() for blob in server.cert_chain_pems))
    key.write_bytes(server.private_key_pem.bytes())
    authority.cert_pem.write_to_path(str(ca))
    security = SecurityConfig(
        allow_anonymous=False, tls_cert=certificate, tls_key=key, tls_client_ca=ca, tls_require_client_cert=False
    )
    async with running_gateway(bootstrap, security=security) as gateway:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        url = f"https://{gateway.listener.bound}"
        async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(ssl=context)) as http:
            assert (await ask(http, "POST", f"/topics/{topic}", BODY, headers=JSON_RECORDS))[0] == 401
        client.configure_cert(context)
        async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(ssl=context)) as http:
            assert (await ask(http, "POST", f"/topics/{topic}", BODY, headers=JSON_RECORDS))[0] == 200
            _, created = await ask(http, "POST", "/consumers/tls", {"name": topic}, headers=CONTROL)
            assert created["base_uri"].startswith("https://")
            assert (await ask(http, "DELETE", f"/consumers/tls/instances/{topic}"))[0] == 204
    (record,) = await read_topic(bootstrap, topic, 1)
    assert ("gw.client", b"device-7") in record.headers


async def test_an_address_in_use_is_named(bootstrap: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ListenError, match=f"http.address: {address} is in use"):
            async with running_gateway(bootstrap, http={"address": Address(address)}):
                raise AssertionError("it listens")
