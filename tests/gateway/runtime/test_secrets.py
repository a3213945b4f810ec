"""Every secret in the configuration is a canary, which must not appear in anything that the gateway writes."""

from __future__ import annotations

import asyncio
import base64
import os
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from pwdlib.hashers.argon2 import Argon2Hasher

from gateway.runtime.secret import Redactor, SecretUrl, secrets_in
from gateway.settings.config import ConfigError, load
from protocols.mqtt.packets import Connect, Version
from tests.support.amqp_frames import Frames
from tests.support.gateway import GatewayProcess
from tests.support.mqtt_packets import encode_packet
from tests.support.waiting import wait_until

CANARY = "ca/nary+7"
WRITTEN = "ca%2Fnary%2B7"
PLUGIN = "tests.gateway.runtime.test_secrets.Talkative"

# All values are valid; each place holds the canary.
WHOLE = f"""
[log]
level = "debug"
[kafka]
sasl_username = "u"
sasl_password = "{CANARY}"
ssl_key_password = "{CANARY}"
[kafka.oauth]
token_url = "http://u:{WRITTEN}@127.0.0.1:1/token?key={WRITTEN}"
client_id = "c"
client_secret = "{CANARY}"
[observe]
otlp_endpoint = "http://u:{WRITTEN}@127.0.0.1:1/?key={WRITTEN}"
[security.oauth]
jwks_url = "http://user:{WRITTEN}@127.0.0.1:1/keys?apikey={WRITTEN}"
issuer = "i"
audience = ["a"]
[security.plugins."amqtt.contrib.auth_db.UserAuthDBPlugin"]
connection = "postgresql://u:{WRITTEN}@127.0.0.1/x"
anything = {{ list = ["{CANARY}"], deeper = {{ password = "{CANARY}" }} }}
"""


BASIC = base64.b64encode(f"ann:{CANARY}".encode()).decode()


def has_secret(text: str) -> bool:
    return any(form in text for form in (CANARY, WRITTEN, "ca/nary", BASIC))


async def trivium(*arguments: str, **environment: str) -> str:
    """Return the whole output of a command."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *arguments, env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    return out.decode()


async def test_config_show_has_every_key_and_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "trivium.toml"
    file.write_text(WHOLE)
    shown = await trivium("config", "show", "--config", str(file))
    assert not has_secret(shown)
    for word in ("sasl_password", "***@127.0.0.1:1/keys?apikey=***", "auth_db", "connection", "**********"):
        assert word in shown
    config = load(file)
    assert not has_secret(f"{config} {config!r} {config.kafka!r} {config.security!r} {config.observe!r}")
    assert {CANARY, WRITTEN} <= set(secrets_in(config))


@pytest.mark.parametrize(
    "text",
    [
        f'[kafka]\nsasl_pasword = "{CANARY}"',
        f'[kafka]\nsasl_password = ["{CANARY}"]',
        f'[kafka.oauth]\ntoken_url = "ftp://u:{CANARY}@h"\nclient_id = "c"\nclient_secret = "{CANARY}"',
        f'[kafka.oauth]\nclient_secret = ["{CANARY}"]',
        f'[kafka.sasl_password]\na = "{CANARY}"',
        f'[observe]\notlp_endpoint = "ftp://u:{CANARY}@h"',
        f'[security.oauth]\njwks_url = "ftp://u:{CANARY}@h"\nissuer = "i"\naudience = ["a"]',
        f'[security]\nplugins = "{CANARY}"',
        f'[security.plugins]\nx = "{CANARY}"',
        f'[security.plugins."amqtt.contrib.auth_db.UserAuthDBPlugin"]\nnonsense = "{CANARY}"',
        f'[security.plugins."amqtt.plugins.authentication.FileAuthPlugin"]\npassword_file = ["{CANARY}"]',
        f'[kafka]\nsasl_password = "{CANARY}\n',
    ],
)
async def test_no_error_of_the_configuration_repeats_a_secret(tmp_path: Path, text: str) -> None:
    file = tmp_path / "trivium.toml"
    file.write_text(text)
    said = await trivium("config", "check", "--config", str(file))
    assert said.startswith("trivium: ")
    assert not has_secret(said)


def test_no_error_in_the_environment_repeats_a_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("TRIVIUM_KAFKA__SASL_PASSWORT", "TRIVIUM_SECURITY__PLUGINS", "TRIVIUM_KAFKA"):
        with monkeypatch.context() as patch:
            patch.setenv(name, CANARY)
            with pytest.raises(ConfigError) as caught:
                load()
            assert not has_secret(str(caught.value))
            assert not has_secret("".join(traceback.format_exception(caught.value)))


async def test_log_metrics_and_ready_file_of_a_gateway_hold_no_secret(
    bootstrap: str, new_gateway: Callable[..., GatewayProcess]
) -> None:
    whole = WHOLE.partition("[security.plugins")[0].replace("[observe]", "").replace("otlp_endpoint", "#")
    gateway = await new_gateway(bootstrap, config=whole).start()
    await wait_until(lambda: "token keys cannot be fetched" in gateway.log.read_text())
    async with aiohttp.ClientSession(f"http://{gateway.addresses['management']}") as session:
        for path in ("/metrics", "/ready", "/healthy", "/flow"):
            async with session.get(path) as response:
                assert not has_secret(await response.text())
        async with session.get("/console/events") as response:
            assert not has_secret((await response.content.readline()).decode())
    assert not has_secret(gateway.ready_file.read_text())
    assert await gateway.stop() == 0
    assert not has_secret(gateway.log.read_text())


class Collector:
    """A collector of spans that is busy at first, then accepts them, and keeps all requests."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[tuple[str, dict[str, str]]] = []  # path with query, header fields
        self.taken: list[ExportTraceServiceRequest] = []

    async def take(self, request: web.Request) -> web.Response:
        self.asked.append((request.path_qs, dict(request.headers)))
        if len(self.asked) == 1:
            return web.Response(status=503)
        self.taken.append(ExportTraceServiceRequest.FromString(await request.read()))
        return web.Response()

    def spans(self) -> list[Any]:
        return [
            span for one in self.taken for resource in one.resource_spans for scope in resource.scope_spans
            for span in scope.spans
        ]  # fmt: skip


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    collector.url = site.name.removeprefix("http://")
    yield collector
    await runner.cleanup()


async def last_words(address: tuple[str, int], said: bytes) -> str:
    """Return everything that a server sends until it closes."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(said)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return answer.decode("latin-1")


async def test_spans_answers_and_log_hold_no_secret(
    bootstrap: str, new_gateway: Callable[..., GatewayProcess], collector: Collector, tmp_path: Path, new_topic: Any
) -> None:
    """With a real exporter and its collector; the canary is a client's password and the collector's."""
    topic = await new_topic(1)
    passwords = tmp_path / "passwords"
    hasher = Argon2Hasher(time_cost=1, memory_cost=1024, parallelism=1)
    passwords.write_text(f"ann:{hasher.hash(CANARY)}\n")
    config = f"""
[log]
level = "debug"
[observe]
otlp_endpoint = "http://u:{WRITTEN}@{collector.url}/in/?key={WRITTEN}"
[security]
allow_anonymous = false
password_file = "{passwords}"
"""
    gateway = await new_gateway(bootstrap, config=config).start()
    body = {"records": [{"key": "k", "value": 1}]}
    right = {"Authorization": f"Basic {BASIC}"}
    told: list[str] = []
    refusals = []
    async with aiohttp.ClientSession(f"http://{gateway.addresses['http']}") as http:
        for method, path, login in (
            ("POST", f"/topics/{topic}", right),
            ("POST", f"/topics/{topic}/partitions/9", right),
            ("POST", "/topics/a%20b", right),
            ("POST", f"/topics/{topic}", {"Authorization": f"Basic {base64.b64encode(CANARY.encode()).decode()}"}),
            ("POST", f"/topics/{topic}", {"Authorization": f"Bearer {CANARY}"}),
            ("POST", f"/topics/{topic}", {"Authorization": CANARY}),
            ("POST", f"/topics/{topic}?access_token={WRITTEN}", {}),
            ("GET", "/topics", {"Cookie": f"session={CANARY}"}),
            ("GET", f"/nothing?password={WRITTEN}", right),
            ("PUT", f"/topics?password={WRITTEN}", right),
        ):
            headers = {**login, "Content-Type": "application/vnd.kafka.json.v2+json", "X-Api-Key": CANARY}
            async with http.request(method, path, json=body, headers=headers) as answer:
                refusals.append(answer.status)
                told.append(f"{answer.headers} {await answer.text()}")
    assert refusals == [200, 404, 404, 401, 401, 401, 401, 401, 404, 405]
    async with aiohttp.ClientSession(f"http://{gateway.addresses['management']}") as http:
        for method, path in (
            ("GET", "/metrics"), ("GET", "/ready"), ("GET", "/healthy"), ("GET", f"/nothing?key={WRITTEN}"),
            ("POST", "/metrics"),
        ):  # fmt: skip
            async with http.request(method, path, headers=right) as answer:
                told.append(f"{answer.headers} {await answer.text()}")
    login = Connect(Version.V5, "canary", username="bob", password=CANARY.encode())
    told.append(await last_words(gateway.address("mqtt"), encode_packet(login, Version.V5)))
    init = Frames.performative(0x41, Frames.symbol("PLAIN"), Frames.binary(b"\0bob\0" + CANARY.encode()))
    told.append(await last_words(gateway.address("amqp"), b"AMQP\x03\x01\0\0" + Frames.frame(init, kind=1)))
    assert told[-2].startswith("\x20")  # CONNACK
    assert told[-1].startswith("AMQP\x03")
    assert await gateway.stop() == 0  # this exports the last spans
    names = {span.name for span in collector.spans()}
    assert {"POST /topics/{topicname}", "POST /topics/{topicname}/partitions/{partitionid}", f"send {topic}"} <= names
    assert not [text for text in (*told, *map(str, collector.taken), gateway.log.read_text()) if has_secret(text)]
    for path, fields in collector.asked:
        assert path.startswith("/in/v1/traces?key=")  # the collector's login is sent only to the collector
        assert not has_secret(str({name: value for name, value in fields.items() if name != "Authorization"}))


async def test_a_failed_login_to_kafka_does_not_log_the_password(
    bootstrap: str, new_gateway: Callable[..., GatewayProcess]
) -> None:
    sasl = f'[log]\nlevel = "debug"\n[kafka]\nsasl_username = "u"\nsasl_password = "{CANARY}"\n'
    sasl += 'security_protocol = "SASL_PLAINTEXT"\n'
    gateway = new_gateway(bootstrap, config=sasl)
    starting = asyncio.create_task(gateway.start())
    await wait_until(lambda: gateway.log.exists() and "does not answer" in gateway.log.read_text(), 60)
    assert await gateway.stop() == 0
    with pytest.raises(RuntimeError):
        await starting
    assert not has_secret(gateway.log.read_text())


def test_urls_are_shown_without_their_secrets() -> None:
    for url, shown in {
        "http://127.0.0.1:4318/v1": "http://127.0.0.1:4318/v1",
        "https://user:pw@h.example:1/p?q=secret&r=": "https://***@h.example:1/p?q=***&r=***",
        "http://[": "***",
    }.items():
        assert str(SecretUrl(url)) == shown


def test_secrets_are_removed_from_the_output_of_libraries() -> None:
    redactor = Redactor([CANARY, WRITTEN, "a b\nc", "x"])
    assert redactor.clean(f"at {CANARY}, {WRITTEN} and {'a b' + chr(10) + 'c'!r}: x") == "at ***, *** and '***': x"
