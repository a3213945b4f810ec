"""A canary as every secret, in every login method of every protocol, is searched for in all output."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import aiokafka
from pwdlib.hashers.argon2 import Argon2Hasher

from gateway.security.login.user_files import new_scram_line
from protocols.mqtt import packets
from tests.support.amqp_frames import Frames
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.oauth import AUDIENCE, ISSUER, key_set, token
from tests.support.waiting import wait_until

CANARY = "ca/nary+hunter2"
OTHER = "other-pass-4711"  # of the administrator
CONFIG = """
[log]
level = "debug"
[kafka]
create_topics = true
sasl_username = "u"
sasl_password = "{canary}"
[management]
address = "0.0.0.0:0"
[audit]
file = "{directory}/audit.jsonl"
topic = "{topic}"
[security]
allow_anonymous = false
password_file = "{directory}/passwords"
scram_file = "{directory}/scram"
failed_attempt_delay_s = 0
[security.oauth]
jwks_file = "{directory}/keys.json"
issuer = "{issuer}"
audience = ["{audience}"]
[[security.access]]
principal = "root"
action = "*"
topic = "#"
[[security.access]]
principal = "*"
action = "*"
topic = "{allowed}/#"
[[security.access]]
principal = "*"
action = "*"
topic = "{allowed}"
"""


def basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


class Told:
    """All output, and the canaries that it must not contain."""

    def __init__(self, *tokens: str) -> None:
        self.texts: dict[str, str] = {}
        encoded = [base64.b64encode(text.encode()).decode() for text in (f"ann:{CANARY}", f"bob:{CANARY}", CANARY)]
        parts = [part for one in tokens for part in one.split(".")[1:]]
        self.secrets = [CANARY, quote(CANARY, safe=""), "hunter2", CANARY.encode().hex(), *encoded, *parts, OTHER]

    def add(self, what: str, text: str) -> None:
        self.texts[what] = self.texts.get(what, "") + text

    def leaks(self) -> list[tuple[str, str]]:
        return [(what, secret) for what, text in self.texts.items() for secret in self.secrets if secret in text]


async def amqp(address: tuple[str, int], mechanism: str, response: bytes, *, then: bytes = b"") -> str:
    """Return all answers to a login, and to an attach that must be refused."""
    init = Frames.performative(0x41, Frames.symbol(mechanism), Frames.binary(response))
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"AMQP\x03\x01\0\0" + Frames.frame(init, kind=1) + then)
    answer = b""
    async with asyncio.timeout(60):
        while b"amqp:unauthorized-access" not in answer and (more := await reader.read(65536)):
            answer += more
            if mechanism == "SCRAM-SHA-256" and b"r=" in answer:
                break  # it waits for our proof
    writer.close()
    return answer.decode("latin-1")


async def mqtt(address: tuple[str, int], **connect: Any) -> RawClient | str:
    try:
        client = await RawClient.connect(address, **connect)
    except (EOFError, AssertionError) as error:
        return str(error)
    if client.connack.reason_code:
        said = str(client.connack)
        client.drop()
        return said
    return client


async def log_in_everywhere(gateway: GatewayProcess, told: Told, bearer: str, allowed: str) -> None:
    """Log in with right and wrong secrets, and with a secret in the wrong field."""
    secret, address = CANARY.encode(), gateway.address("mqtt")
    oauth = {"authentication_method": "OAUTHBEARER"}
    for number, how in enumerate(
        (
            {"username": "ann", "password": secret},  # right
            {"username": "bob", "password": secret},
            {"username": CANARY, "password": b"x"},
            {"username": "ann", "password": b"wrong"},
            {"username": CANARY, "version": 4},
            {**oauth, "authentication_data": f"n,,\x01auth=Bearer {bearer}\x01\x01".encode()},  # right
            {**oauth, "authentication_data": f"n,,\x01auth=Bearer {CANARY}\x01\x01".encode()},
            {"authentication_method": "SCRAM-SHA-256", "authentication_data": f"n,,n={CANARY},r=nonce".encode()},
            {"authentication_method": CANARY},
            {},
        )
    ):
        client = await mqtt(address, client_id=f"canary-{number}", **how)  # type: ignore[arg-type]
        if isinstance(client, RawClient):
            assert await client.publish(f"{allowed}/x", b"1") < 0x80
            for _ in range(30):
                assert await client.publish("forbidden/x", b"1") == 0x87
            told.add("mqtt", str(await client.subscribe("forbidden/#")))
            client.drop()
        else:
            told.add("mqtt", client)
    opened = Frames.begin() + Frames.attach(address="forbidden")
    for mechanism, response in (
        ("PLAIN", b"\0ann\0" + secret),  # right
        ("PLAIN", b"\0bob\0" + secret),
        ("PLAIN", b"\0" + secret + b"\0x"),
        ("PLAIN", secret),
        ("OAUTHBEARER", f"n,,\x01auth=Bearer {bearer}\x01\x01".encode()),  # right
        ("OAUTHBEARER", f"n,,\x01auth=Bearer {CANARY}\x01\x01".encode()),
        ("SCRAM-SHA-256", f"n,,n=ann,r={CANARY}".encode()),
        ("ANONYMOUS", secret),
        ("LOGIN", secret),
        (CANARY, b""),
    ):
        # A challenge of SCRAM repeats the client's own nonce (RFC 5802 section 5.1), to it alone.
        answer = await amqp(gateway.address("amqp"), mechanism, response, then=opened)
        told.add("amqp", answer.replace(f"r={CANARY}", ""))
    json_type = {"Content-Type": "application/vnd.kafka.json.v2+json"}
    body = {"records": [{"key": "k", "value": 1}]}
    statuses = []
    async with aiohttp.ClientSession(f"http://{gateway.addresses['http']}") as http:
        for path, headers in (
            (f"/topics/{allowed}", basic("ann", CANARY)),
            ("/topics/forbidden", basic("ann", CANARY)),
            (f"/topics/{allowed}", basic("bob", CANARY)),
            (f"/topics/{allowed}", basic(CANARY, "x")),
            (f"/topics/{allowed}", {"Authorization": f"Bearer {bearer}"}),
            (f"/topics/{allowed}", {"Authorization": f"Bearer {CANARY}"}),
            (f"/topics/{allowed}", {"Authorization": CANARY}),
            (
                f"/topics/{allowed}?access_token={quote(CANARY, safe='')}",
                {"Cookie": f"s={CANARY}", "X-Api-Key": CANARY},
            ),
        ):
            async with http.post(path, json=body, headers={**json_type, **headers}) as answer:
                statuses.append(answer.status)
                told.add("http", f"{answer.headers} {await answer.text()}")
    assert statuses == [200, 403, 401, 401, 200, 401, 401, 401]
    reader, writer = await asyncio.open_connection(*gateway.address("http"))
    in_url = f"GET http://ann:{CANARY}@localhost/topics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    writer.write(in_url.encode())
    told.add("http", (await asyncio.wait_for(reader.read(), 60)).decode())
    writer.close()


async def lines_of(bootstrap: str, topic: str, count: int) -> list[dict[str, Any]]:
    consumer = aiokafka.AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    try:
        found: list[dict[str, Any]] = []
        async with asyncio.timeout(60):
            while len(found) < count:
                for records in (await consumer.getmany(timeout_ms=500)).values():
                    found += [json.loads(record.value) for record in records]
        return found
    finally:
        await consumer.stop()


async def test_no_secret_is_told_and_every_login_refusal_and_act_is(
    bootstrap: str, new_gateway: Callable[..., GatewayProcess], tmp_path: Path
) -> None:
    allowed, topic = f"canary-{uuid.uuid4().hex[:8]}", f"__trivium_audit_{uuid.uuid4().hex[:8]}"
    hasher = Argon2Hasher(time_cost=1, memory_cost=1024, parallelism=1)
    (tmp_path / "passwords").write_text(f"ann:{hasher.hash(CANARY)}\nroot:{hasher.hash(OTHER)}\n")
    (tmp_path / "scram").write_text(new_scram_line("ann", CANARY, "SCRAM-SHA-256", 4096) + "\n")
    (tmp_path / "keys.json").write_bytes(key_set())
    bearer = token(expires_s=time.time() + 3600, sub="tom")
    config = CONFIG.format(
        canary=CANARY, directory=tmp_path, topic=topic, allowed=allowed, issuer=ISSUER, audience=AUDIENCE
    )
    gateway = new_gateway(bootstrap, "--management", "0.0.0.0:0", config=config)
    await gateway.start()
    told = Told(bearer)
    audited = tmp_path / "audit.jsonl"
    base = f"http://127.0.0.1:{gateway.address('management')[1]}"
    async with aiohttp.ClientSession(base) as wrong, aiohttp.ClientSession(base, headers=basic("root", OTHER)) as root:
        for login in (basic("ann", CANARY), basic(CANARY, "x"), {"Authorization": CANARY}, {}):  # ann has not the right
            for method, path in (
                ("GET", "/clients"),
                ("DELETE", "/clients/mqtt/x"),
                ("POST", "/trace"),
                ("POST", "/drain"),
            ):
                async with wrong.request(method, path, headers=login) as answer:
                    assert answer.status == 401
                    told.add("management", f"{answer.headers} {await answer.text()}")
        wanted = {"address": "127.0.0.1", "seconds": 60, "payload": 1024}
        async with root.post("/trace", json=wanted) as trace:
            assert trace.status == 200
            await log_in_everywhere(gateway, told, bearer, allowed)
            victim = await RawClient.connect(
                gateway.address("mqtt"), "victim", username="ann", password=CANARY.encode(), will=None
            )
            async with root.get("/clients/mqtt/victim") as answer:
                told.add("clients", await answer.text())
            for path in ("/clients", "/flow", "/metrics", "/ready", "/topics", "/console", "/console.js"):
                async with root.get(path) as answer:
                    assert answer.status == 200
                    told.add(path, await answer.text())
            async with root.get("/console/events") as answer:
                told.add("events", (await answer.content.readline()).decode())
            async with root.delete("/clients/mqtt/victim") as answer:
                assert await answer.json() == {"closed": 1}
            assert (await victim.expect(packets.Disconnect)).reason_code == 0x98
            victim.drop()
            traced = b""
            while b'"ADMINISTRATIVE' not in traced and b'"0x98"' not in traced:
                traced += await asyncio.wait_for(trace.content.readany(), 60)
            told.add("trace", traced.decode())
        async with (
            aiohttp.ClientSession(f"http://{gateway.addresses['http']}", headers=basic("root", OTHER)) as http,
            http.delete(f"/admin/topics/{allowed}") as answer,
        ):
            assert answer.status == 204, await answer.text()
    assert gateway.process is not None
    audited.rename(tmp_path / "audit.jsonl.1")
    gateway.process.send_signal(signal.SIGHUP)
    await wait_until(
        lambda: audited.exists() and '"reload"' in audited.read_text() + (tmp_path / "audit.jsonl.1").read_text()
    )
    assert await gateway.stop() == 0
    whole = (tmp_path / "audit.jsonl.1").read_text() + audited.read_text()
    told.add("audit", whole)
    told.add("log", gateway.log.read_text())
    lines = [json.loads(line) for line in whole.splitlines()]
    in_topic = await lines_of(bootstrap, topic, len(lines))
    told.add("topic", json.dumps(in_topic))
    leaks = told.leaks()
    for what, secret in leaks:
        at = told.texts[what].index(secret)
        print(what, told.texts[what][max(0, at - 200) : at + 100])
    assert leaks == []

    assert sorted(map(str, in_topic)) == sorted(map(str, lines))
    assert {line["v"] for line in lines} == {1}
    accepted = {(line["protocol"], line["principal"], line["method"]) for line in lines if line["result"] == "accepted"}
    assert accepted == {
        ("mqtt", "ann", "password"), ("mqtt", "tom", "token"), ("amqp", "ann", "password"), ("amqp", "tom", "token"),
        ("http", "ann", "password"), ("http", "tom", "token"), ("http", "root", "password"),
    }  # fmt: skip
    refused = [line for line in lines if (line["event"], line["result"]) == ("login", "refused")]
    assert {line["protocol"] for line in refused} == {"mqtt", "amqp", "http", "management"}
    assert {line["listener"] for line in refused} == {"mqtt", "amqp", "http", "management"}
    rights = {
        (line["protocol"], line["principal"], line["what"], line["on"]) for line in lines if line["event"] == "right"
    }
    assert rights >= {
        ("mqtt", "ann", "publish", "forbidden/x"), ("mqtt", "tom", "publish", "forbidden/x"),
        ("amqp", "ann", "publish", "forbidden"), ("http", "ann", "publish", "forbidden"),
    }  # fmt: skip
    assert sum(line.get("more", 0) for line in lines if line.get("on") == "forbidden/x" or line.get("more")) >= 25
    acts = [(line["protocol"], line.get("principal", ""), line["what"], line.get("on", "")) for line in lines
            if line["event"] == "act"]  # fmt: skip
    assert acts == [
        ("management", "root", "trace", "127.0.0.1"), ("management", "root", "kick", "mqtt/victim"),
        ("http", "root", "delete topic", allowed), ("signal", "", "reload", ""), ("signal", "", "drain", ""),
    ]  # fmt: skip
    first = traced.decode().splitlines()
    frames = {json.loads(line).get(kind) for line in first if line.startswith("{") for kind in ("packet", "frame")}
    assert {"CONNECT", "AUTH", "sasl-init", "attach"} <= frames | {"AUTH"}
