"""No reference cycles on a data path: messages and connections are freed with garbage collection off."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from proton import Message
from proton.utils import BlockingConnection, BlockingReceiver

from gateway.rest.server.openapi_pages import load_contract
from protocols.mqtt import packets
from protocols.mqtt.packets import Will
from tests.support.amqp_frames import Frames, WireClient
from tests.support.amqp_transactions import Transacted
from tests.support.mqtt import RawClient
from tests.support.uncollected import Uncollected

pytestmark = pytest.mark.part("live websockets")

TURNS = 8  # per round; a leak shows as one object or more per turn
OURS = (
    "gateway.",
    "protocols.",
    "mapping.",
    "flowcontrol.",
    "kafka_records.",
    "_cffi_backend.",
    "uvloop.loop.TCP",
    "aiohttp.",
)
"""Types of connections and messages."""
AIOKAFKA = "gateway.kafka.driver."
"""Classes made from aiokafka's. Their cycles appear when an assignment or a consumer ends, as the live reader's does
with the last subscription; they hold no records (`kafka/driver/test_fetching.py`)."""
WAIT_S = 60
JSON = {"Content-Type": "application/vnd.kafka.json.v2+json"}
CONSUMERS = {"Content-Type": "application/vnd.kafka.v2+json"}


@pytest.fixture(scope="module")
async def gateway(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Uncollected]:
    process = Uncollected(tmp_path_factory.mktemp("uncollected"), bootstrap, config="[kafka]\ncreate_topics = true\n")
    await process.start()
    yield process
    await process.stop()


class Round:
    """What the turns share: the gateway, and names that stay the same."""

    def __init__(self, gateway: Uncollected) -> None:
        self.gateway = gateway
        self.name = f"cycles-{uuid.uuid4().hex[:8]}"
        self.mqtt = gateway.address("mqtt")
        self.amqp_address = gateway.address("amqp")
        self.amqp = f"amqp://{gateway.addresses['amqp']}"
        self.http = f"http://{gateway.addresses['http']}"
        self.kept = contextlib.AsyncExitStack()
        self.turns = 0

    async def keep_group(self) -> None:
        """Keep a member without credit in the group all the time.

        A group lives in this process as long as its aiokafka consumer, whose end leaves cycles.
        """
        if not self.turns:
            http = await self.kept.enter_async_context(self.session())
            socket = await self.kept.enter_async_context(http.ws_connect("/stream", protocols=["trivium.v1"]))
            await socket.send_json(
                {"type": "subscribe", "id": "k", "topic": self.name, "group": self.name, "credit": 0}
            )
            assert (await socket.receive_json())["type"] == "subscribed"

    async def blocking(self, work: Callable[[BlockingConnection], Any]) -> Any:
        def run() -> Any:
            connection = BlockingConnection(self.amqp, timeout=WAIT_S)
            try:
                return work(connection)
            finally:
                connection.close()

        return await asyncio.to_thread(run)

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[aiohttp.ClientSession]:
        async with aiohttp.ClientSession(self.http, timeout=aiohttp.ClientTimeout(total=WAIT_S)) as session:
            yield session


async def mqtt_in_and_out(way: Round) -> None:
    """Publish and receive at QoS 0, 1 and 2, with a will."""
    topic = f"{way.name}/live/t"
    subscriber = await RawClient.connect(way.mqtt, f"{way.name}-s")
    await subscriber.subscribe(f"{way.name}/live/#")
    publisher = await RawClient.connect(way.mqtt, f"{way.name}-p", will=Will(f"{way.name}/live/will", b"w", 1, False))
    for qos in (0, 1, 2):
        for _ in range(5):
            await publisher.publish(topic, b"x", qos)
            await subscriber.message()
    publisher.drop()
    assert (await subscriber.message()).topic == f"{way.name}/live/will"
    await subscriber.disconnect()


async def mqtt_retained(way: Round) -> None:
    client = await RawClient.connect(way.mqtt, f"{way.name}-r")
    for number in range(5):
        await client.publish(f"{way.name}/{number}", b"r", 1, True)
    await client.subscribe(f"{way.name}/+")
    await client.messages(5)
    await client.disconnect()


async def mqtt_sessions(way: Round) -> None:
    kept = {"session_expiry_interval": 600, "clean_start": False}
    client = await RawClient.connect(way.mqtt, f"{way.name}-k", **kept)
    await client.subscribe(f"{way.name}/#")
    client.drop()
    publisher = await RawClient.connect(way.mqtt, f"{way.name}-p")
    for number in range(5):
        await publisher.publish(f"{way.name}/x", b"%d" % number, 2)
    await publisher.disconnect()
    client = await RawClient.connect(way.mqtt, f"{way.name}-k", **kept)
    await client.messages(5)
    client.drop()


async def mqtt_shared(way: Round) -> None:
    await way.keep_group()
    sharers = [await RawClient.connect(way.mqtt, f"{way.name}-{one}") for one in range(2)]
    for one in sharers:
        await one.subscribe(f"$share/{way.name}/{way.name}/#")
    for _ in range(5):
        await sharers[0].publish(f"{way.name}/x", b"x", 1)
    for one in sharers:
        one.drop()


async def amqp_connections(way: Round) -> None:
    for _ in range(5):
        await way.blocking(lambda connection: None)


async def amqp_in_and_out(way: Round) -> None:
    def work(connection: BlockingConnection) -> None:
        receiver = connection.create_receiver(way.name, credit=10)
        sender = connection.create_sender(way.name)
        for _ in range(10):
            sender.send(Message(body=b"x"))
            receiver.receive(WAIT_S)
            receiver.accept()

    await way.blocking(work)


async def amqp_group(way: Round) -> None:
    await way.keep_group()

    def work(connection: BlockingConnection) -> None:
        receiver: BlockingReceiver = connection.create_receiver(f"{way.name}/group.id/{way.name}", credit=10)
        sender = connection.create_sender(way.name)
        for _ in range(5):
            sender.send(Message(body=b"x"))
            receiver.receive(WAIT_S)
            receiver.accept()
        sender.send(Message(body=b"x"))
        receiver.receive(WAIT_S)
        receiver.release()

    await way.blocking(work)


async def amqp_transactions(way: Round) -> None:
    def work(connection: BlockingConnection) -> None:
        sender = connection.create_sender(way.name)
        for commit in (True, False):
            transaction = Transacted(connection)
            for _ in range(3):
                transaction.outcome(transaction.post(sender, Message(body=b"x")))
            transaction.end(commit=commit)

    await way.blocking(work)


async def amqp_broken(way: Round) -> None:
    """Drop connections: before any byte, in the middle, and after garbage."""
    for said in (b"", b"AMQP\x00\x01\x00\x00", b"AMQP\x03\x01\x00\x00", b"rubbish\r\n\r\n"):
        reader, writer = await asyncio.open_connection(*way.gateway.address("amqp"))
        writer.write(said)
        if said:
            await reader.read(1)
        writer.transport.abort()


async def http_produce(way: Round) -> None:
    async with way.session() as http:
        body = json.dumps({"records": [{"key": "k", "value": {"n": 1}}] * 5})
        for _ in range(5):
            async with http.post(f"/topics/{way.name}", data=body, headers=JSON) as answer:
                assert answer.status == 200, await answer.text()
        async with http.post(f"/topics/{way.name}", data="{", headers=JSON) as answer:
            assert answer.status >= 400


async def http_poll(way: Round) -> None:
    """Create a consumer, assign, poll and commit, without deleting it."""
    async with way.session() as http:
        options = {"name": way.name, "format": "json", "auto.offset.reset": "earliest"}
        place = f"/consumers/{way.name}/instances/{way.name}"
        async with http.post(f"/consumers/{way.name}", json=options, headers=CONSUMERS) as answer:
            assert answer.status == (409 if way.turns else 200), await answer.text()
        async with http.post(
            f"{place}/assignments", json={"partitions": [{"topic": way.name, "partition": 0}]}, headers=CONSUMERS
        ) as answer:
            assert answer.status == 204, await answer.text()
        for _ in range(5):
            async with http.post(
                f"/topics/{way.name}", data='{"records":[{"value":1,"partition":0}]}', headers=JSON
            ) as answer:
                assert answer.status == 200, await answer.text()
            records: list[Any] = []
            while not records:
                async with http.get(f"{place}/records", headers={"Accept": JSON["Content-Type"]}) as answer:
                    assert answer.status == 200, await answer.text()
                    records = await answer.json(content_type=None)
        async with http.post(f"{place}/offsets", headers=CONSUMERS) as answer:
            assert answer.status in {200, 204}, await answer.text()


async def http_reads(way: Round) -> None:
    async with way.session() as http:
        for _ in range(3):
            async with http.get(f"/topics/{way.name}/records?from=beginning&wait=100") as answer:
                await answer.read()
            async with http.get("/topics") as answer:
                await answer.read()


async def http_events(way: Round) -> None:
    async with way.session() as http, http.get(f"/topics/{way.name}/stream") as stream:
        await stream.content.readline()
        for _ in range(5):
            async with http.post(f"/topics/{way.name}", data='{"records":[{"value":1}]}', headers=JSON) as answer:
                assert answer.status == 200
            while not (await stream.content.readline()).startswith(b"data"):
                pass


async def http_socket(way: Round) -> None:
    await way.keep_group()
    async with way.session() as http, http.ws_connect("/stream", protocols=["trivium.v1"]) as socket:
        await socket.send_json({"type": "subscribe", "id": "s", "topic": way.name})
        assert (await socket.receive_json())["type"] == "subscribed"
        await socket.send_json({"type": "subscribe", "id": "g", "topic": way.name, "group": way.name})
        assert (await socket.receive_json())["type"] == "subscribed"
        for number in range(5):
            await socket.send_json({"type": "produce", "id": str(number), "topic": way.name, "records": [{"value": 1}]})
            while (heard := await socket.receive_json(timeout=WAIT_S))["type"] != "record" or heard["id"] != "s":
                assert heard["type"] in {"produced", "record"}, heard
        await socket.send_json({"type": "produce"})


async def http_upload(way: Round) -> None:
    async with way.session() as http:
        lines = b'{"value": 1}\n' * 20
        headers = {"Content-Type": "application/x-ndjson"}
        async with http.post(f"/topics/{way.name}/records", data=lines, headers=headers) as answer:
            assert answer.status == 200
            await answer.read()


# Bad input: each is refused, and the errors go with their frames.


async def bad_http(way: Round) -> None:
    """Ask each operation of the contract for what does not exist, in ways that it must refuse."""
    names = {"topicname": way.name, "partitionid": "0", "groupid": way.name, "name": "nobody"}
    async with way.session() as http:
        for operation in load_contract().operations.values():
            if operation.name in {"openStream", "streamRecords"}:
                continue  # see `bad_socket`; an answer of these has no end
            path = re.sub(r"\{(\w+)\}", lambda found: names.get(found[1], "x"), operation.template)
            media = operation.body.media if operation.body is not None else ("text/plain",)
            for kind in (*media, "image/png"):
                for body in (b"{", b"[1]", b'{"records":[{"value":1,"partition":99}],"x":1}', b"\xff"):
                    query = {"timeout": "1"}
                    headers = {"Content-Type": kind, "Accept": "application/json, */*", "Idempotency-Key": '"k"'}
                    if operation.method == "DELETE" and "{topicname}" in operation.template:
                        continue  # the topic is used by the others
                    async with http.request(operation.method, path, params=query, data=body, headers=headers) as answer:
                        await answer.read()


async def bad_records(way: Round) -> None:
    """Produce what Kafka's side refuses: all records of a request, one of them, one that is too large."""
    async with way.session() as http:
        for path, body in (
            (way.name, '{"records":[{"value":1,"partition":99},{"value":1,"partition":99}]}'),
            (way.name, '{"records":[{"value":1},{"value":1,"partition":99}]}'),
            (way.name, '{"records":[{"value":"%s"}]}' % ("x" * 1_200_000)),
            ("bad%20name", '{"records":[{"value":1}]}'),
            ("__consumer_offsets", '{"records":[{"value":1}]}'),
        ):
            for more in ({}, {"Idempotency-Key": f'"{uuid.uuid4().hex}"'}):
                async with http.post(
                    f"/topics/{path}", data=io.BytesIO(body.encode()), headers={**JSON, **more}
                ) as answer:
                    await answer.read()


async def bad_lines(way: Round) -> None:
    """Upload lines that are no records, in both dialects, until the upload is broken off."""
    async with way.session() as http:
        headers = {"Content-Type": "application/x-ndjson", "Content-Encoding": "gzip", "Connection": "close"}
        lines = gzip.compress(b'{"value": 1}\n' + b"1\n" * 3000)
        async with http.post(f"/topics/{way.name}/records", data=lines, headers=headers) as answer:
            assert (await answer.text()).splitlines()[-1].endswith('"ended":true}')
        async with http.get("/v3/clusters") as answer:
            cluster = (await answer.json())["data"][0]["cluster_id"]
        path = f"/v3/clusters/{cluster}/topics/{way.name}/records"
        for documents in (b"[] " * 1500, b"{} " * 10 + b"1", b'{"value":'):
            async with http.post(
                path, data=documents, headers={"Content-Type": "application/json", "Connection": "close"}
            ) as answer:
                await answer.read()


async def bad_socket(way: Round) -> None:
    for bad in (
        {"type": "produce"},
        {"type": "produce", "id": "1", "topic": way.name, "records": [{"value": 1, "partition": 99}]},
        {"type": "produce", "id": "1", "topic": "bad name", "records": [{"value": 1}]},
        {"type": "subscribe", "id": "1", "topic": "__consumer_offsets"},
        {"type": "subscribe", "id": "1", "topic": way.name, "from": "nowhere"},
        {"type": "unsubscribe", "id": "9"},
        {"type": "credit", "id": "9", "credit": -1},
        [],
    ):
        async with way.session() as http, http.ws_connect("/stream", protocols=["trivium.v1"]) as socket:
            await socket.send_json(bad)
            await socket.receive(timeout=WAIT_S)


async def bad_mqtt(way: Round) -> None:
    """Publish and subscribe to what may not be used, then break the protocol."""
    for qos, topic in ((1, "__consumer_offsets/x"), (2, "$x/y"), (1, f"{way.name}/{'z' * 300}")):
        client = await RawClient.connect(way.mqtt, f"{way.name}-b")
        client.send(packets.Publish(topic, b"x", qos, False, False, client.new_id()))
        await client.receive()  # PUBACK or PUBREC
        client.drop()
    client = await RawClient.connect(way.mqtt, f"{way.name}-b")
    await client.subscribe("__consumer_offsets/x", "$SYS/#")
    client.drop()
    for data in (
        b"\x30\x02\x00\x09",
        b"\x32\x03\x00\x01#",
        b"\xf0\x00",
        b"\x82\x05\x00\x01\x00\x00\x00",
        b"\x30\xff\xff\xff\xff\x7f",
    ):
        client = await RawClient.connect(way.mqtt, f"{way.name}-b")
        client.send_bytes(data)
        await client.expect_end()
        client.drop()


async def bad_amqp(way: Round) -> None:
    """Send messages that cannot be decoded, to addresses that do not exist too, then break the protocol."""
    undecodable = (
        b"",
        b"\x00",
        b"\x00\x53\x75\xb0\xff\xff\xff\xff",
        b"\x00\x53\x73\x40",
        b"\x00\x53\x77\xa1\x02\xff\xff",
    )
    for address in (way.name, "__consumer_offsets", "bad name"):
        client = await WireClient.connect(way.amqp_address)
        client.say(Frames.begin() + Frames.attach(address=address))
        await client.header()
        await client.until(0x12)
        for number, data in enumerate(undecodable * 2):
            client.say(Frames.transfer(number, data))
        client.say(Frames.frame(Frames.performative(0x18)))
        await client.until(0x18)
        await client.close()
    for said in (
        Frames.begin() + Frames.frame(b"\x00\x53\x99\x45"),
        Frames.begin() + Frames.frame(b"\xff\xff"),
        b"AMQP",
    ):
        client = await WireClient.connect(way.amqp_address)
        client.say(said)
        await client.close()


ROUNDS: list[Callable[[Round], Awaitable[None]]] = [
    mqtt_in_and_out, mqtt_retained, mqtt_sessions, mqtt_shared, amqp_connections, amqp_in_and_out, amqp_group,
    amqp_transactions, amqp_broken, http_produce, http_poll, http_reads, http_events, http_socket, http_upload,
    bad_http, bad_records, bad_lines, bad_socket, bad_mqtt, bad_amqp,
]  # fmt: skip


@pytest.mark.parametrize("turn", ROUNDS, ids=lambda turn: turn.__name__)
async def test_no_garbage_is_left_in_cycles(gateway: Uncollected, turn: Callable[[Round], Awaitable[None]]) -> None:
    way = Round(gateway)
    async with way.kept:
        for _ in range(2):
            await turn(way)
            way.turns += 1
        await gateway.garbage()  # of the end of a previous test
        for _ in range(TURNS):
            await turn(way)
        found = await gateway.garbage()
    kinds = (*OURS, "frame", "traceback") if turn.__name__.startswith("bad_") else OURS
    ours = {name: count for name, count in found.items() if name.startswith(kinds) and not name.startswith(AIOKAFKA)}
    assert {name: count for name, count in ours.items() if count >= TURNS} == {}, json.dumps(found)
