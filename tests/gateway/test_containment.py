"""After an unexpected exception in any background task its part restarts, and everything else keeps working."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import aiohttp
import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from prometheus_client.parser import text_string_to_metric_families
from proton import Message, ProtonException
from proton.utils import BlockingConnection

from gateway.runtime.failures import failures
from gateway.runtime.spawn import on_loop_error
from tests.support.amqp import ThreadedSender
from tests.support.amqp_transactions import Transacted
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import PahoClient
from tests.support.topics import remake
from tests.support.waiting import wait_until

CREATE = "[kafka]\ncreate_topics = true\n"
JSON = "application/vnd.kafka.json.v2+json"
BINARY = "application/vnd.kafka.binary.v2+json"
MUST_FAIL = frozenset(
    {
        "PartitionQueue._run", "keep_running Topics.run", "keep_running LiveConsumer._run",
        "keep_running StateTopics._run", "keep_running Upkeep.run", "keep_running Retained._run",
        "keep_running GroupReader._run", "keep_running Commits.run", "keep_running GroupReader._follow",
        "_CatchUpWorker.serve", "KafkaTransaction._run", "Producers._start",
    }
)  # fmt: skip


class Faulty(GatewayProcess):
    """A gateway whose tasks can be made to fail, by `tests.support.faulty`."""

    def __init__(self, directory: Path, bootstrap: str, **options: Any) -> None:
        self.pipe = directory / "faults"
        self.program = ("-m", "tests.support.faulty", str(self.pipe))
        self.answers = directory / "faults.out"
        os.mkfifo(self.pipe)
        os.mkfifo(self.answers)
        super().__init__(directory, bootstrap, **options)

    async def order(self, command: str) -> Any:
        """Send a command of `tests.support.faulty` and return the answer."""
        if not hasattr(self, "_out"):
            self._in, self._out = await asyncio.to_thread(self._open)
        self._in.write(command + "\n")
        self._in.flush()
        answer = json.loads(await asyncio.to_thread(self._out.readline))
        assert not (isinstance(answer, dict) and "error" in answer), (command, answer)
        return answer

    def _open(self) -> tuple[TextIO, TextIO]:
        """Open both pipes in the order of the other side; each open waits for it."""
        return self.pipe.open("w"), self.answers.open()

    async def kill(self) -> None:
        await super().kill()
        if hasattr(self, "_out"):
            self._in.close()
            self._out.close()


@pytest.fixture
async def faulty(bootstrap: str, tmp_path: Path) -> AsyncIterator[Faulty]:
    gateway = Faulty(tmp_path, bootstrap, config=CREATE)
    await gateway.start()
    yield gateway
    await gateway.kill()


@pytest.fixture
async def users(faulty: Faulty) -> AsyncIterator[Users]:
    clients = Users(faulty)
    yield clients
    await clients.close()


class Users:
    """Clients of all kinds that reconnect when their connection is lost, like real ones."""

    def __init__(self, gateway: Faulty) -> None:
        self.gateway = gateway
        self.topic = f"f-{uuid.uuid4().hex[:10]}"
        self.http = aiohttp.ClientSession(f"http://{gateway.addresses['http']}")
        self.mqtt: PahoClient | None = None
        self.count = 0

    async def connected(self) -> PahoClient:
        """Connect the subscriber: a persistent session with a normal and a shared subscription."""
        while self.mqtt is None or self.mqtt.disconnected is not None:
            if self.mqtt is not None:
                await self.mqtt.close()
            self.mqtt = await PahoClient(self.gateway.address("mqtt"), client_id=self.topic).connect(clean_start=False)
            for topic_filter in (f"{self.topic}/#", f"$share/{self.topic}/{self.topic}/#"):
                await self.mqtt.subscribe(topic_filter)
        return self.mqtt

    async def serve(self) -> None:
        """Check that everything works; resend what is refused or lost with its connection, like a real sender."""
        self.count += 1
        text = f"{self.count}".encode()
        async with asyncio.timeout(150):  # an attempt may fail after 20 s
            for way in (self._by_mqtt, self._by_amqp, self._by_transaction, self._by_http):
                while not await way(text):
                    pass
            await self._arrive({b"mqtt " + text, b"amqp " + text, b"both " + text})

    async def _arrive(self, wanted: set[bytes]) -> None:
        client = await self.connected()
        while wanted - {message.payload for message in client.messages}:
            with contextlib.suppress(TimeoutError):
                await wait_until(partial(has_all_or_is_lost, client, wanted), 5)
            former, client = client, await self.connected()
            if former is not client:
                client.messages += former.messages

    async def _by_mqtt(self, text: bytes) -> bool:
        client = await self.connected()
        mid = client.send(f"{self.topic}/k", b"mqtt " + text)
        await wait_until(lambda: mid in client.pubacks or client.disconnected is not None)
        return mid in client.pubacks and client.pubacks[mid].value in (0, 0x10)

    async def _by_amqp(self, text: bytes) -> bool:
        sender = ThreadedSender(self.gateway.addresses["amqp"], self.topic)
        try:
            await sender.connect()
            done = await sender.send(b"amqp " + text) == "ACCEPTED"
            await sender.close()
        except Exception:
            return False
        return done

    async def _by_transaction(self, text: bytes) -> bool:
        return await asyncio.to_thread(transact, self.gateway.addresses["amqp"], self.topic, b"both " + text)

    async def _by_http(self, text: bytes) -> bool:
        """Post a record, and read it as a consumer."""
        value = f"http {text.decode()}"
        try:
            answer = await self._post(f"/topics/{self.topic}", {"records": [{"value": value}]})
            stored = answer["offsets"][0]
            if "error_code" in stored:
                return False
            base = f"/consumers/{self.topic}-{self.count}"
            create = {"auto.offset.reset": "earliest", "format": "binary", "name": uuid.uuid4().hex}
            place = f"{base}/instances/{(await self._post(base, create))['instance_id']}"
            await self._post(f"{place}/subscription", {"topics": [self.topic]})
            found: set[Any] = set()
            while base64.b64encode(json.dumps(value).encode()).decode() not in found:
                async with self.http.get(f"{place}/records?timeout=2000", headers={"Accept": BINARY}) as response:
                    if response.status != 200:
                        return False
                    found |= {record["value"] for record in await response.json(content_type=None)}
            async with self.http.delete(place):
                pass
            page = f"/topics/{self.topic}/records?partition={stored['partition']}&offset={stored['offset']}"
            async with self.http.get(page) as response:
                return response.status == 200 and bool(await response.json(content_type=None))
        except (aiohttp.ClientError, KeyError):
            return False

    async def _post(self, path: str, body: Any) -> Any:
        kind = JSON if path.startswith("/topics") else "application/vnd.kafka.v2+json"
        async with self.http.post(path, data=json.dumps(body), headers={"Content-Type": kind}) as response:
            return await response.json(content_type=None)

    async def close(self) -> None:
        await self.http.close()
        if self.mqtt is not None:
            await self.mqtt.close()


def has_all_or_is_lost(client: PahoClient, wanted: set[bytes]) -> bool:
    return client.disconnected is not None or wanted <= {message.payload for message in client.messages}


def transact(address: str, topic: str, body: bytes) -> bool:
    """Send a message in an AMQP transaction; return whether it was committed."""
    try:
        connection = BlockingConnection(f"amqp://{address}", timeout=20)
        try:
            sender = connection.create_sender(topic)
            whole = Transacted(connection, wait_s=20)
            if whole.ends.event != "declared":
                return False
            whole.post(sender, Message(body=body))
            return whole.end() == "committed"
        finally:
            with contextlib.suppress(ProtonException):
                connection.close()
    except ProtonException:
        return False


async def contained(gateway: GatewayProcess) -> dict[str, float]:
    """Return the metric of contained failures, by place."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{gateway.addresses['management']}/metrics") as response,
    ):
        text = await response.text()
    return {
        sample.labels["place"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "trivium_failures_contained_total"
    }


@pytest.mark.timeout(300)
async def test_after_any_task_fails_everything_else_keeps_working(faulty: Faulty, users: Users) -> None:
    await users.serve()
    failed: set[str] = set()
    while left := (await faulty.order("names")).keys() - failed:
        for name in sorted(left):
            await faulty.order(f"fail {name}")
            failed.add(name)
        await users.serve()
        assert faulty.process is not None
        assert faulty.process.returncode is None, failed
    assert failed >= MUST_FAIL
    told = await contained(faulty)
    assert sum(told.values()) >= len(MUST_FAIL)
    assert told.keys() >= {
        "live reader",
        "state",
        "topics",
        "sessions",
        "retained",
        "group",
        "partition",
        "transaction",
    }
    assert "on purpose" in faulty.log.read_text()
    assert await faulty.stop() == 0


MQTT_PLACES = ("client:Client._act", "publishing:Incoming.settle")
AMQP_PLACES = ("connection:AmqpConnection.handle", "connection:AmqpConnection.settle", "attaches:Attach.answer")


@pytest.mark.part("live websockets")
@pytest.mark.timeout(400)
async def test_a_bug_closes_a_connection_with_its_protocols_internal_error(faulty: Faulty) -> None:
    topic = f"f-{uuid.uuid4().hex[:10]}"
    heir = await PahoClient(faulty.address("mqtt")).connect()
    await heir.subscribe(f"{topic}/will")
    for place in MQTT_PLACES:
        client = PahoClient(faulty.address("mqtt"))
        client.paho.will_set(f"{topic}/will", place, 1)
        await client.connect()
        await faulty.order(f"break gateway.mqtt.connection.{place}")
        client.send(f"{topic}/k")
        await wait_until(lambda client=client: client.disconnected is not None)
        assert client.disconnected.value == 0x83
        await wait_until(lambda place=place: place.encode() in {message.payload for message in heir.messages})
        await client.close()
    await faulty.order("break gateway.mqtt.connection.admission:ConnectAdmission._admit")
    stranger = await PahoClient(faulty.address("mqtt")).connect()
    assert stranger.connack.value == 0x83

    for place in AMQP_PLACES:
        sender = await ThreadedSender(faulty.addresses["amqp"], topic).connect()
        await faulty.order(f"break gateway.amqp.{place}")
        if place.endswith("answer"):
            with pytest.raises(ProtonException):
                await sender.attach(topic)
        else:
            assert await sender.send(b"lost or not") != "ACCEPTED"
        assert await sender.end() == "amqp:internal-error", place

    async with aiohttp.ClientSession(f"http://{faulty.addresses['http']}") as http:
        # A request after one that was answered with 200 skips aiohttp: its header is cached by then.
        places = ("Results.settle", "_Answers.settle", "DirectRequest.answer", "Results.settle")
        for broken in itertools.chain.from_iterable((place, None) for place in places):
            if broken is not None:
                await faulty.order(f"break gateway.rest.produce.requests:{broken}")
            body = json.dumps({"records": [{"value": 1}] * (2 if broken == "Results.settle" else 1)})
            async with http.post(f"/topics/{topic}", data=body, headers={"Content-Type": JSON}) as response:
                assert response.status == (200 if broken is None else 500)
                assert ("error_code" in await response.json(content_type=None)) == (broken is not None)
        await faulty.order("break gateway.rest.server.request_login:RequestLogin.authenticate")
        async with http.get("/v3/clusters") as response:
            assert response.status == 500
            assert (await response.json(content_type=None))["error_code"] == 50002
        async with http.ws_connect("/stream", protocols=["trivium.v1"]) as socket:
            await faulty.order("break gateway.rest.live.live_websockets:LiveSession.handle")
            await socket.send_str('{"type": "unsubscribe", "id": "nothing"}')
            await socket.receive()
            assert socket.close_code == 1011
    assert await heir.publish(f"{topic}/k") in (0, 0x10)
    for other in (heir, stranger):
        await other.close()
    assert await faulty.stop() == 0


@pytest.mark.timeout(400)
async def test_a_topic_recreated_with_fewer_partitions_under_load_keeps_working(
    new_gateway: Callable[..., GatewayProcess],
    new_topic: Callable[..., Awaitable[str]],
    admin: AIOKafkaAdminClient,
    bootstrap: str,
) -> None:
    topic, bystander = await new_topic(6), await new_topic(1)
    gateway = await new_gateway(bootstrap).start()
    readers = [await PahoClient(gateway.address("mqtt"), client_id=f"{topic}-{n}").connect() for n in range(2)]
    for reader, topic_filter in zip(readers, (f"{topic}/#", f"$share/{topic}/{topic}/#"), strict=True):
        await reader.subscribe(topic_filter)
    writer = await PahoClient(gateway.address("mqtt"), client_id=topic).connect()
    stop, acknowledged = asyncio.Event(), set[bytes]()

    async def load() -> None:
        """Write every key, and so every partition, again and again."""
        number = 0
        while not stop.is_set():
            sent = {}
            for key in range(32):
                number += 1
                sent[writer.send(f"{topic}/{key}", b"%d" % number)] = b"%d" % number
            await wait_until(lambda sent=sent: sent.keys() <= writer.pubacks.keys() or writer.disconnected)
            assert writer.disconnected is None, gateway.log.read_text()[-3000:]
            acknowledged.update(text for mid, text in sent.items() if writer.pubacks.pop(mid).value in (0, 0x10))

    loading = asyncio.create_task(load())
    await wait_until(lambda: len(acknowledged) > 500)
    for partitions in (2, 1):
        await remake(admin, topic, partitions)
        before = len(acknowledged)
        await wait_until(lambda before=before: loading.done() or len(acknowledged) > before + 500, 60)
    settled = set(acknowledged)  # the load since the topic was last created
    stop.set()
    await loading
    after = {b"last %d" % number for number in range(32)}
    for text in after:
        assert await writer.publish(f"{topic}/{text.decode()}", text) in (0, 0x10)
    for reader in readers:  # each has continued with the new topic
        await wait_until(lambda reader=reader: after <= {message.payload for message in reader.messages}, 60)
    assert await writer.publish(f"{bystander}/a", b"") in (0, 0x10)
    async with AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, auto_offset_reset="earliest") as consumer:
        stored: set[bytes] = set()
        while not after <= stored:
            stored |= {record.value for part in (await consumer.getmany(timeout_ms=500)).values() for record in part}
    first = min(int(text) for text in stored - after)
    assert {text for text in settled if int(text) > first + 1000} <= stored  # no acknowledged record is lost
    # No part of the gateway failed; a commit for a deleted partition may fail in one of aiokafka's tasks.
    assert (await contained(gateway)).keys() <= {"callback"}
    assert "Unrecognized partition" not in gateway.log.read_text()
    for client in (*readers, writer):
        await client.close()
    assert await gateway.stop() == 0


@pytest.mark.timeout(400)
async def test_a_fatal_failure_stops_the_gateway_with_each_protocols_close(
    new_gateway: Callable[..., GatewayProcess], tmp_path: Path
) -> None:
    gateway = await new_gateway(None, "--data-dir", str(tmp_path / "data"), "--kafka-port", "0").start()
    mqtt = await PahoClient(gateway.address("mqtt")).connect()
    amqp = await ThreadedSender(gateway.addresses["amqp"], "t").connect()
    marker = tmp_path / "data" / "kafka" / "broker.json"
    marker.write_text(marker.read_text().replace('"layout"', '"laid-out"'))  # no broker can start with this data again
    os.kill(gateway.addresses["kafka_pid"], signal.SIGKILL)
    assert gateway.process is not None
    assert await asyncio.wait_for(gateway.process.wait(), 60) == 1
    assert await amqp.end() == "amqp:connection:forced"
    await wait_until(lambda: mqtt.disconnected is not None)
    assert mqtt.disconnected.value == 0x8B
    said = gateway.log.read_text()
    assert "the gateway stops after a fatal failure" in said
    assert said.splitlines()[-1].startswith("trivium: ")
    assert "Traceback" not in said.splitlines()[-1]
    assert not gateway.ready_file.exists()
    await mqtt.close()


async def test_a_write_of_tls_to_a_closed_socket_is_not_a_failure() -> None:
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with theirs:
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
        transport.abort()
        await wait_until(lambda: ours.fileno() == -1)
        with pytest.raises(RuntimeError) as closed:
            transport.write(b"late")

    def reported(message: str) -> int:
        before = failures.statistics().contained_total.get("callback", 0)
        on_loop_error(loop, {"message": message, "exception": closed.value})
        return failures.statistics().contained_total["callback"] - before

    assert reported("Exception in callback") == 1
    assert reported("Fatal error on SSL protocol") == 0
