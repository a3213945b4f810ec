"""A produce request with a known head gets the same bytes as an answer as a parsed one, in its turn."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import signal
import socket
import uuid
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pwdlib.hashers.argon2 import Argon2Hasher

from gateway.embedded.broker import EmbeddedBroker
from gateway.net.http.http_server import HttpConnection
from gateway.rest.server.direct_requests import DirectRequest
from gateway.settings.config import AccessRule, BudgetConfig, SecurityConfig
from tests.gateway.rest.conftest import Gateway, read_topic, running_gateway
from tests.support.frozen import freeze
from tests.support.waiting import wait_until

GOOD = b'{"records":[{"key":"a","value":{"n":1}}]}'
MANY = json.dumps({"records": [{"value": number} for number in range(300)]}).encode()
BODIES = [
    GOOD, MANY, b"", b"{", b"[]", b'{"records":[]}', b'{"records":null}', b'{"records":[{"value":1,"partition":7}]}',
    b'{"records":[{"value":1,"partition":-1}]}', b'{"records":[{"value":1},{"value":2,"partition":7}]}',
    b'{"records":[{"value":null}]}', b'{"records":[{"key":"\xff","value":1}]}', b'{"records":[{"value":1,"x":1}]}',
    b'{"records":[{"value":1,"timestamp":-5}]}', b'{"records":[{"value":1,"timestamp":1}]}', b"\r\n\r\n" + GOOD,
    b'{"records":[{"value":"' + b"x" * 3_000_000 + b'"}]}', b'{"records":[' + b"1," * 20_000 + b"1]}",
]  # fmt: skip


def request(topic: str, body: bytes = GOOD, fields: str = "", query: str = "") -> bytes:
    head = f"POST /topics/{topic}{query} HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n{fields}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Client:
    """One connection, and the gateway's side of it."""

    def __init__(self, served: HttpConnection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.served = served
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, gateway: Gateway, known: bytes | None = None) -> Client:
        """Connect; `known` is a request that is sent and answered first, so that its head is known."""
        host, _, port = gateway.listener.bound.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        ours = writer.get_extra_info("sockname")

        def served() -> list[HttpConnection]:
            connections = gateway.listener.connections
            return [one for one in connections if isinstance(one, HttpConnection) and one.peername == ours]

        await wait_until(served)
        client = cls(served()[0], reader, writer)
        if known is not None:
            assert (await client.ask(known)).startswith(b"HTTP/1.1 200 ")
        return client

    @property
    def parsed(self) -> int:
        """The number of requests that aiohttp has parsed."""
        return self.served._request_count

    async def ask(self, *parts: bytes) -> bytes:
        """Return one answer; each part is one read of the gateway."""
        for part in parts:
            self.served.data_received(part)
        return await self.answer()

    async def answer(self) -> bytes:
        async with asyncio.timeout(60):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"\r\nContent-Length: (\d+)\r\n", head)
            assert length is not None
            return head + await self.reader.readexactly(int(length[1]))

    async def gone(self) -> bytes:
        """Return all bytes until the gateway closes."""
        async with asyncio.timeout(60):
            return await self.reader.read()

    def close(self) -> None:
        self.writer.close()


def plain(answer: bytes) -> bytes:
    """Remove the parts that differ in every answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"Content-Encoding: gzip" in head:
        body, head = gzip.decompress(body), re.sub(rb"Content-Length: \d+", b"", head)
    body, places = re.subn(rb'"offset":\d+', b'"offset":0', body)
    if places:
        head = re.sub(rb"Content-Length: \d+", b"", head)
    return re.sub(rb"\r\nDate: [^\r]*", b"", head) + b"\r\n\r\n" + body


async def both(gateway: Gateway, topic: str, body: bytes, fields: str = "") -> tuple[bytes, bytes]:
    """Return the answers to a parsed request, and to the same request with a known head."""
    answers = []
    for known in (None, request(topic, fields=fields)):
        client = await Client.connect(gateway, known)
        before = client.parsed
        answers.append(plain(await client.ask(request(topic, body, fields))))
        if known is not None and len(body) <= 1 << 20:
            assert client.parsed == before
        if b"Connection: close" in answers[-1]:
            assert await client.gone() == b""
        else:
            assert (await client.ask(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        client.close()
    return answers[0], answers[1]


async def test_the_answers_are_the_same(bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    async with running_gateway(bootstrap, http={"max_body_bytes": 2 << 20}) as gateway:
        for body in BODIES:
            parsed, direct = await both(gateway, topic, body)
            assert direct == parsed
        for fields in ("Accept-Encoding: gzip\r\n", "Accept-Encoding: gzip;q=0\r\n", "Accept: text/html\r\nX-A: b\r\n"):
            parsed, direct = await both(gateway, topic, MANY, fields)
            assert direct == parsed
            assert (b"Content-Encoding" in direct) == fields.endswith(" gzip\r\n")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.integers(0, len(GOOD)), taken=st.integers(0, 3), put=st.binary(max_size=3))
async def test_the_answers_to_any_body_are_the_same(gateway: Gateway, where: int, taken: int, put: bytes) -> None:
    body = GOOD[:where] + put + GOOD[where + taken :]
    parsed, direct = await both(gateway, "direct-any-body", body)
    assert direct == parsed


async def test_however_requests_are_split_and_joined(gateway: Gateway, new_topic: Any, bootstrap: str) -> None:
    topic = await new_topic(partitions=1)
    client = await Client.connect(gateway, request(topic))
    numbers = iter(range(1000))
    sent = []

    def numbered() -> bytes:
        sent.append(next(numbers))
        return request(topic, b'{"records":[{"value":%d}]}' % sent[-1])

    for cut in range(1, len(request(topic, b'{"records":[{"value":1}]}'))):
        one = numbered()
        assert (await client.ask(one[:cut], one[cut:])).startswith(b"HTTP/1.1 200 ")
    bad = request(topic, b"{")
    for _ in range(2):  # the first is served directly; in one read or in many, the others wait for its answer
        before = client.parsed
        client.served.data_received(numbered())
        assert client.parsed == before
        client.served.data_received(numbered())
        client.served.data_received(bad + numbered() + b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + numbered()[:40])
        client.served.data_received(request(topic, b'{"records":[{"value":%d}]}' % sent[-1])[40:])
        statuses = [(await client.answer()).split()[1] for _ in range(6)]
        assert statuses == [b"200", b"200", b"400", b"200", b"200", b"200"]
        before = client.parsed
        assert (await client.ask(numbered())).startswith(b"HTTP/1.1 200 ")  # after the pipeline as before it
    client.close()
    stored = await read_topic(bootstrap, topic, len(sent) + 1)
    assert [int(record.value) for record in stored[1:]] == sent
    assert len({tuple(record.headers) for record in stored}) == 1


async def test_requests_with_unusual_fields_are_parsed(gateway: Gateway, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    for fields, query in (
        ("Idempotency-Key: direct-%d\r\n", ""),
        ("traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b71692033%02d-01\r\n", ""),
        ("Content-Encoding: identity\r\nX: %d\r\n", ""),
        ("X: %d\r\n", "?async=true"),
    ):
        client = await Client.connect(gateway)
        for number in (1, 1, 2):
            sent = request(topic, fields=fields % number, query=query)
            client.served.data_received(sent)
            async with asyncio.timeout(60):
                head = await client.reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"\r\nContent-Length: (\d+)\r\n", head)
            await client.reader.readexactly(int(length[1]) if length else 0)
            assert head.split()[1] == (b"204" if query else b"200")
        assert client.parsed == 3
        client.close()


async def test_an_answer_that_is_not_read_holds_back_the_next_request(gateway: Gateway, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    client = await Client.connect(gateway, request(topic, MANY))
    transport = client.served.transport
    assert transport is not None
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    many = 0
    while not client.served.writing_paused:
        client.served.data_received(request(topic, MANY))
        many += 1
        await wait_until(lambda: not gateway.listener.statistics().produce.active)
    assert client.parsed == 1
    served = gateway.listener.statistics().produce.requests_total
    client.served.data_received(request(topic))
    client.served.data_received(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    assert client.parsed == 3
    assert gateway.listener.statistics().produce.requests_total == served
    for _ in range(many):
        assert (await client.answer()).count(b"offset") == 301
    assert (await client.answer()).count(b"offset") == 2
    assert (await client.answer()).endswith(b"}")
    assert (await client.ask(request(topic))).startswith(b"HTTP/1.1 200 ")
    assert client.parsed == 3
    client.close()


async def test_a_bug_with_one_request_does_not_affect_the_others(
    gateway: Gateway, new_topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their records share an owner and a batch."""
    topic = await new_topic(partitions=1)
    clients = [await Client.connect(gateway, request(topic)) for _ in range(3)]
    answer = DirectRequest.answer

    def broken(direct: DirectRequest, body: bytes) -> None:
        if direct.connection is clients[1].served:
            raise RuntimeError("a bug")
        answer(direct, body)

    monkeypatch.setattr(DirectRequest, "answer", broken)
    for client in clients:
        client.served.data_received(request(topic))
    heads = [(await client.answer()).partition(b"\r\n")[0] for client in clients]
    assert heads == [b"HTTP/1.1 200 OK", b"HTTP/1.1 500 Internal Server Error", b"HTTP/1.1 200 OK"]
    for client in clients:
        client.close()


async def test_a_bug_with_one_failed_request_does_not_affect_the_others(
    gateway: Gateway, new_topic: Any, admin: AIOKafkaAdminClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when Kafka has refused their batch."""
    topic = await new_topic(partitions=1)
    clients = [await Client.connect(gateway, request(topic)) for _ in range(3)]
    served = [client.served for client in clients]
    fail, failed = DirectRequest.fail, []

    def broken(direct: DirectRequest, error: Exception) -> None:
        failed.append(direct)
        if direct.connection is served[1]:
            raise RuntimeError("a bug")
        fail(direct, error)

    monkeypatch.setattr(DirectRequest, "fail", broken)
    await admin.delete_topics([topic])
    for client in clients:
        client.served.data_received(request(topic))
    heads = [(await clients[number].answer()).partition(b"\r\n")[0] for number in (0, 2)]
    assert heads == [b"HTTP/1.1 404 Not Found"] * 2
    assert len(failed) == 3
    for client in clients:
        client.close()


async def test_refusals_are_the_same_and_nothing_stays_counted(bootstrap: str) -> None:
    budget = BudgetConfig(process_bytes=1 << 20)
    async with running_gateway(bootstrap, budget=budget, http={"max_active_per_client": 1}) as gateway:
        clients = [await Client.connect(gateway, request("direct-refused")) for _ in range(3)]
        gateway.publisher.budget.take(1 << 20)
        refused = gateway.listener.statistics().produce.refused_total
        direct = await clients[0].ask(request("direct-refused"))
        fresh = await Client.connect(gateway)
        assert plain(direct) == plain(await fresh.ask(request("direct-refused")))
        assert direct.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nRetry-After: 1\r\n" in direct
        assert await clients[0].gone() == b""
        gateway.publisher.budget.give(1 << 20)
        counts = gateway.listener.statistics()
        assert counts.produce.refused_total == refused + 2
        # Two at once of one client: the second is one too many.
        clients[1].served.data_received(request("direct-refused"))
        greedy = await clients[2].ask(request("direct-refused"))
        assert greedy.startswith(b"HTTP/1.1 429 ")
        assert (await clients[1].answer()).startswith(b"HTTP/1.1 200 ")
        assert (await clients[2].ask(request("direct-refused"))).startswith(b"HTTP/1.1 200 ")
        counts = gateway.listener.statistics()
        assert (counts.produce.active, counts.load.active) == (0, 0)
        assert counts.answers_total["send"] == {"2xx": 5, "4xx": 1, "5xx": 2}
        assert counts.requests_total == 8
        for client in (*clients, fresh):
            client.close()


async def test_the_login_is_checked_for_each_request(bootstrap: str, tmp_path: Path, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    hasher = Argon2Hasher(time_cost=1, memory_cost=64, parallelism=1)
    passwords = tmp_path / "passwords"
    passwords.write_text(f"ann:{hasher.hash('secret')}\n")
    security = SecurityConfig(allow_anonymous=False, password_file=passwords, failed_attempt_delay_s=0)
    async with running_gateway(bootstrap, security=security) as gateway:
        ann = request(topic, fields="Authorization: Basic YW5uOnNlY3JldA==\r\n")
        client = await Client.connect(gateway, ann)
        assert (await client.ask(ann)).startswith(b"HTTP/1.1 200 ")
        assert client.parsed == 1
        assert await gateway.authenticator.reload()  # the same one: it is only requested again
        assert (await client.ask(ann)).startswith(b"HTTP/1.1 200 ")
        assert client.parsed == 2
        passwords.write_text(f"ann:{hasher.hash('another')}\n")
        assert await gateway.authenticator.reload()
        assert (await client.ask(ann)).startswith(b"HTTP/1.1 401 ")
        assert (await client.ask(request(topic))).startswith(b"HTTP/1.1 401 ")
        client.close()


async def test_the_client_of_a_connection_is_that_of_its_latest_request(
    bootstrap: str, tmp_path: Path, new_topic: Any
) -> None:
    hasher = Argon2Hasher(time_cost=1, memory_cost=64, parallelism=1)
    passwords = tmp_path / "passwords"
    passwords.write_text("".join(f"{name}:{hasher.hash('secret')}\n" for name in ("ann", "bob")))
    security = SecurityConfig(allow_anonymous=False, password_file=passwords)
    topics = [await new_topic(partitions=1) for _ in range(2)]  # a connection knows one head for each request line
    async with running_gateway(bootstrap, security=security) as gateway:
        ann, bob = (
            request(topic, fields=f"Authorization: Basic {b64encode(login).decode()}\r\n")
            for topic, login in zip(topics, (b"ann:secret", b"bob:secret"), strict=True)
        )
        client = await Client.connect(gateway, ann)
        for asked, name in ((bob, "bob"), (ann, "ann"), (bob, "bob")):
            assert (await client.ask(asked)).startswith(b"HTTP/1.1 200 ")
            assert [one.principal for one in gateway.listener.clients()] == [name]
        assert client.parsed == 2
        client.close()


async def test_changed_rights_hold_from_the_next_request_of_a_connection(bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    async with running_gateway(bootstrap) as gateway:
        client = await Client.connect(gateway, request(topic))
        for allowed, status in ((topic, b"200"), ("another", b"403"), (topic, b"200")):
            gateway.use_rules(AccessRule(principal="*", action="publish", topic=f"{allowed}/#"))
            for _ in range(2):
                assert (await client.ask(request(topic))).startswith(b"HTTP/1.1 %b " % status)
        assert client.parsed == 1
        client.close()


@pytest.mark.part("tenants")
async def test_requests_of_a_tenant_are_counted_one_by_one(bootstrap: str) -> None:
    asked = request(f"counted-{uuid.uuid4().hex[:8]}")
    security = SecurityConfig.model_validate({"tenants": {"sources": ["listener"]}})
    async with running_gateway(bootstrap, security=security) as gateway:
        client = await Client.connect(gateway, asked)
        for _ in range(3):
            assert (await client.ask(asked)).startswith(b"HTTP/1.1 200 ")
        assert client.parsed == 1
        assert gateway.tenants.statistics().logins_total == {"http": 4}
        client.close()


async def test_while_kafka_is_silent(stoppable: EmbeddedBroker) -> None:
    topic = "direct-silent"
    sent = request(topic)
    async with running_gateway(stoppable.bootstrap_servers, http={"header_timeout_s": 0.5}) as gateway:
        leaver, waiting, last = [await Client.connect(gateway, sent) for _ in range(3)]
        freeze(stoppable.pid)
        try:
            for client in (leaver, waiting, last):
                client.served.data_received(sent)
                assert client.parsed == 1
            last.served.data_received(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
            assert gateway.listener.statistics().produce.active == 3
            assert len(gateway.listener.flowing()) == 3
            leaver.close()
            await wait_until(lambda: gateway.listener.statistics().produce.active == 2)
            await wait_until(lambda: waiting.served._keepalive_handle is None)  # it would have been idle for too long
            assert gateway.listener.statistics().load.active == 2
        finally:
            os.kill(stoppable.pid, signal.SIGCONT)
        assert (await waiting.answer()).startswith(b"HTTP/1.1 200 ")
        assert (await last.answer()).startswith(b"HTTP/1.1 200 ")
        assert (await last.answer()).endswith(b"}")
        assert await waiting.gone() == b""  # idle for too long, now
        await wait_until(lambda: not gateway.listener.statistics().connections)
        waiting.close()
        last.close()


async def test_the_end_of_the_gateway_waits_for_kafka(
    stoppable: EmbeddedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    topic = "direct-end"
    sent = request(topic)
    async with running_gateway(stoppable.bootstrap_servers) as gateway:
        client, idle = [await Client.connect(gateway, sent) for _ in range(2)]
        freeze(stoppable.pid)
        try:
            client.served.data_received(sent)
            assert client.parsed == 1
            stopping = asyncio.ensure_future(gateway.listener.stop(60.0))
            assert await idle.gone() == b""
            assert gateway.listener.statistics().produce.active == 1
        finally:
            os.kill(stoppable.pid, signal.SIGCONT)
        answer = await client.answer()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nConnection: close\r\n" in answer
        assert await client.gone() == b""
        await stopping
        client.close()
        idle.close()
    assert "Unhandled exception" not in caplog.text


@pytest.mark.parametrize("scheme", ["Basic", "Bearer", "Basic !", "Bearer \xff"])
async def test_a_login_that_is_none_is_refused_every_time(gateway: Gateway, scheme: str) -> None:
    client = await Client.connect(gateway)
    for _ in range(2):
        answer = await client.ask(request("direct-login", fields=f"Authorization: {scheme}\r\n"))
        assert answer.startswith(b"HTTP/1.1 401 ")
    assert client.parsed == 2
    client.close()


async def test_remembered_heads_are_counted_while_their_connections_are_open(bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    async with running_gateway(bootstrap) as gateway:
        first, second = [await Client.connect(gateway, request(topic)) for _ in range(2)]
        both = gateway.listener.statistics().known_heads_bytes
        first.close()
        await wait_until(lambda: gateway.listener.statistics().known_heads_bytes < both)
        assert gateway.listener.statistics().known_heads_bytes * 2 == both
        gateway.listener.known_heads.take(gateway.listener.known_heads.free, 0)
        third = await Client.connect(gateway, request(topic))
        for client, parsed in ((third, 2), (second, 1)):  # there is no memory for the head of the third one
            assert (await client.ask(request(topic))).startswith(b"HTTP/1.1 200 ")
            assert client.parsed == parsed
            client.close()
