"""A topic is deleted and created again, with fewer or more partitions, under every kind of client."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import aiohttp
import paho.mqtt.client as paho
import pytest
from aiokafka.admin import AIOKafkaAdminClient
from proton import Message, ProtonException, Timeout
from proton.utils import BlockingConnection

from gateway.embedded.broker import EmbeddedBroker
from gateway.kafka.publish.partitioner import partition_of
from loadtest.clients.topics import create_topic
from tests.gateway.test_containment import contained
from tests.support.amqp import ThreadedSender, body_of
from tests.support.amqp_transactions import Transacted
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import PahoClient
from tests.support.topics import produce, read_all, remake
from tests.support.waiting import wait_until

JSON = {"Content-Type": "application/vnd.kafka.json.v2+json"}
CONTROL = {"Content-Type": "application/vnd.kafka.v2+json"}
BINARY = "application/vnd.kafka.binary.v2+json"


@pytest.fixture
async def served(new_gateway: Callable[..., GatewayProcess], bootstrap: str) -> AsyncIterator[GatewayProcess]:
    gateway = await new_gateway(bootstrap).start()
    yield gateway
    assert (await contained(gateway)).keys() <= {"callback"}
    assert await gateway.stop() == 0


class Loads:
    """Repeats requests of several kinds, and records the answers of each kind."""

    def __init__(self, gateway: GatewayProcess, topic: str) -> None:
        self.gateway = gateway
        self.topic = topic
        self.http = aiohttp.ClientSession(f"http://{gateway.addresses['http']}")
        self.answers: dict[str, list[Any]] = {}
        self.sent = 0
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, **kinds: Callable[[], Awaitable[Any]]) -> None:
        for name, ask in kinds.items():
            self._tasks.append(asyncio.create_task(self._again(name, ask)))

    async def _again(self, name: str, ask: Callable[[], Awaitable[Any]]) -> None:
        while True:
            self.answers.setdefault(name, []).append(await ask())

    async def post(self, *records: Any) -> Any:
        """Produce records; return the offsets, or the status and message of the error."""
        body = json.dumps({"records": list(records)})
        async with self.http.post(f"/topics/{self.topic}", data=body, headers=JSON) as response:
            answer = await response.json(content_type=None)
            return answer["offsets"] if response.status == 200 else [(response.status, answer["message"])]

    async def single(self) -> Any:
        self.sent += 1
        return await self.post({"key": f"k{self.sent % 32}", "value": self.sent})

    async def keyless(self) -> Any:
        self.sent += 1
        return await self.post({"value": self.sent})

    async def batch(self) -> Any:
        self.sent += 1
        return await self.post(*({"key": f"k{number}", "value": self.sent} for number in range(32)))

    async def pinned(self) -> Any:
        return await self.post({"partition": 5, "key": "k", "value": 1})

    async def upload(self) -> Any:
        lines = b"".join(b'{"key":"k%d","value":%d}\n' % (number, number) for number in range(64))
        headers = {"Content-Type": "application/x-ndjson"}
        async with self.http.post(f"/topics/{self.topic}/records", data=lines, headers=headers) as response:
            return [json.loads(line) async for line in response.content]

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.http.close()


async def settled(loads: Loads, name: str, good: Callable[[Any], bool]) -> None:
    """Wait until answers are good, after possible errors about a missing topic, and check that they stay good."""
    await wait_until(lambda: any(good(answer) for answer in loads.answers.get(name, ())), 60)
    answers = loads.answers[name]
    count = len(answers)
    await wait_until(lambda: len(answers) > count + 10, 60)
    assert all(good(answer) for answer in answers[count:]), (name, answers[count:])


def stored(partitions: int) -> Callable[[Any], bool]:
    """Return a check that all records of an answer were stored in existing partitions."""
    return lambda answer: all(isinstance(one, dict) and one.get("partition", 9) < partitions for one in answer)


@pytest.mark.timeout(400)
async def test_writers_continue_after_a_topic_is_recreated(
    served: GatewayProcess, new_topic: Any, admin: AIOKafkaAdminClient, bootstrap: str
) -> None:
    topic = await new_topic(6)
    last = next(key for key in map(str, range(100)) if partition_of(key.encode(), 6) == 5)
    loads = Loads(served, topic)
    links = [
        await ThreadedSender(served.addresses["amqp"], place).connect() for place in (topic, f"{topic}/partitions/5")
    ]

    async def lonely() -> Any:
        """Write only to the last partition, so that no other request notices that the partition is gone."""
        return await loads.post({"key": last, "value": 0})

    try:
        loads.begin(lonely=lonely)
        await settled(loads, "lonely", stored(6))
        await remake(admin, topic, 2)
        await settled(loads, "lonely", stored(2))
        await remake(admin, topic, 6)
        kinds = {"single": loads.single, "keyless": loads.keyless, "batch": loads.batch, "upload": loads.upload}
        loads.begin(
            **kinds,
            pinned=loads.pinned,
            link=lambda: links[0].send(b"link"),
            pinned_link=lambda: links[1].send(b"pinned"),
        )
        await settled(loads, "pinned", stored(6))
        await settled(loads, "pinned_link", lambda answer: answer == "ACCEPTED")
        for partitions in (2, 4):
            await remake(admin, topic, partitions)
            for name in kinds:
                loads.answers[name] = []
                await settled(loads, name, stored(partitions))
            await settled(loads, "pinned", lambda answer: answer == [(404, f"topic {topic} has no partition 5")])
            await settled(loads, "link", lambda answer: answer == "ACCEPTED")
            await settled(loads, "pinned_link", lambda answer: answer == "REJECTED")
        kept = loads.answers["single"] = []
        await settled(loads, "single", stored(4))
    finally:
        await loads.end()
        for link in links:
            await link.close()
    there = {(record.partition, record.offset) for record in await read_all(bootstrap, topic)}
    assert {(one["partition"], one["offset"]) for answer in kept for one in answer} <= there


class Readers:
    """All kinds of HTTP readers of a topic, and the values that each has received."""

    def __init__(self, gateway: GatewayProcess, topic: str) -> None:
        self.gateway = gateway
        self.topic = topic
        self.got: dict[str, list[Any]] = {}
        self.http = aiohttp.ClientSession(
            f"http://{gateway.addresses['http']}", timeout=aiohttp.ClientTimeout(total=None)
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self, name: str, read: Callable[[Callable[[Any], None]], Awaitable[None]]) -> None:
        """Start a reader; return when it reads."""
        got = self.got[name] = []
        begun = asyncio.Event()

        async def run() -> None:
            await read(lambda value: begun.set() if value is None else got.append(value))

        self._tasks.append(asyncio.create_task(run()))
        async with asyncio.timeout(60):
            await begun.wait()

    async def stream(self, take: Callable[[Any], None]) -> None:
        async with self.http.get(f"/topics/{self.topic}/stream?from=end&format=text") as response:
            assert response.status == 200
            take(None)
            async for line in response.content:
                if line.startswith(b"data:"):
                    take(json.loads(line[5:])["value"])

    async def socket(self, take: Callable[[Any], None], place: str) -> None:
        async with self.http.ws_connect("/stream", protocols=["trivium.v1"]) as socket:
            wanted = {"type": "subscribe", "id": "s", "topic": self.topic, "format": "text", "from": place}
            await socket.send_json(wanted)
            async for message in socket:
                heard = json.loads(message.data)
                take(heard["record"]["value"] if heard["type"] == "record" else None)

    async def pages(self, take: Callable[[Any], None]) -> None:
        """Read pages without a consumer; record each error and restart from the beginning."""
        place = "from=end"
        while True:
            query = f"/topics/{self.topic}/records?{place}&wait=1000&format=text"
            async with self.http.get(query, headers={"Accept": "application/x-ndjson"}) as response:
                text = await response.text()
                if response.status == 200:
                    place = "from=" + response.headers["Next-Position"]
                    take(None)
                    for line in text.splitlines():
                        take(json.loads(line)["value"])
                else:
                    assert response.status in {404, 416, 503}, text
                    place = "from=beginning"

    async def consumer(self, take: Callable[[Any], None], reset: str) -> None:
        base = f"/consumers/{self.topic}-{reset}"
        body = json.dumps({"auto.offset.reset": reset, "format": "binary", "enable.auto.commit": False})
        async with self.http.post(base, data=body, headers=CONTROL) as response:
            place = f"{base}/instances/{(await response.json(content_type=None))['instance_id']}"
        topics = json.dumps({"topics": [self.topic]})
        async with self.http.post(f"{place}/subscription", data=topics, headers=CONTROL) as response:
            assert response.status == 204
        take(None)
        while True:
            async with self.http.get(f"{place}/records?timeout=1000", headers={"Accept": BINARY}) as response:
                assert response.status in {200, 503}, await response.text()
                page = await response.json(content_type=None) if response.status == 200 else []
            for record in page:
                take(base64.b64decode(record["value"]).decode())
            async with self.http.post(f"{place}/offsets", headers=CONTROL) as response:
                assert response.status in {204, 503}, await response.text()

    async def receive(self, take: Callable[[Any], None], address: str, source: str) -> None:
        """Run an AMQP receiver that accepts everything."""
        loop = asyncio.get_running_loop()

        def run() -> None:
            connection = BlockingConnection(f"amqp://{address}", timeout=60)
            try:
                receiver = connection.create_receiver(source, credit=100)
                loop.call_soon_threadsafe(take, None)
                while not self.ended:
                    with contextlib.suppress(Timeout):
                        take(body_of(receiver.receive(timeout=1)).decode())
                        receiver.accept()
            finally:
                connection.close()

        await asyncio.to_thread(run)

    ended = False

    async def end(self) -> None:
        self.ended = True
        threads = [task for task in self._tasks if not task.done()]
        for task in threads:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.http.close()

    async def have(self, wanted: set[str], *names: str) -> None:
        for name in names or self.got:
            try:
                await wait_until(lambda name=name: wanted <= set(self.got[name]), 60)
            except TimeoutError:
                log = self.gateway.log.read_text()[-6000:]
                raise AssertionError((name, sorted(wanted - set(self.got[name])), log)) from None


async def fill(bootstrap: str, topic: str, partitions: int, name: str, count: int) -> set[str]:
    """Write `count` records to each partition; return their values."""
    values: set[str] = set()
    for partition in range(partitions):
        made = [f"{name} {partition} {number}" for number in range(count)]
        await produce(bootstrap, topic, [value.encode() for value in made], key=b"k", partition=partition)
        values.update(made)
    return values


@pytest.mark.part("live websockets")
@pytest.mark.timeout(280)
async def test_readers_continue_after_a_topic_is_recreated(
    new_gateway: Callable[..., GatewayProcess], new_topic: Any, admin: AIOKafkaAdminClient, bootstrap: str
) -> None:
    """Old positions are meaningless: the new topic has as many records as the old one, and then more."""
    served = await new_gateway(bootstrap, config="[kafka]\nmetadata_max_age_s = 5\n").start()
    topic = await new_topic(2)
    readers = Readers(served, topic)
    amqp = served.addresses["amqp"]
    mqtt = await PahoClient(served.address("mqtt"), client_id=topic).connect(clean_start=False)

    async def back() -> PahoClient:
        """Reconnect to the persistent session."""
        options = {"client_id": f"{topic}-away", "protocol": paho.MQTTv311, "clean_session": False}
        return await PahoClient(served.address("mqtt"), **options).connect()

    away = await back()

    async def arrived(client: PahoClient, wanted: set[str]) -> None:
        await wait_until(lambda: wanted <= {message.payload.decode() for message in client.messages}, 60)

    try:
        await mqtt.subscribe(f"{topic}/#")
        await away.subscribe(f"{topic}/#")
        await readers.begin("stream", readers.stream)
        await readers.begin("socket", partial(readers.socket, place="end"))
        await readers.begin("pages", readers.pages)
        await readers.begin("earliest", partial(readers.consumer, reset="earliest"))
        await readers.begin("latest", partial(readers.consumer, reset="latest"))
        await readers.begin("tail", partial(readers.receive, address=amqp, source=topic))
        await readers.begin("group", partial(readers.receive, address=amqp, source=f"{topic}/group.id/{topic}"))
        wanted = await fill(bootstrap, topic, 2, "first", 3)
        await readers.have(wanted)
        await arrived(mqtt, wanted)
        await arrived(away, wanted)
        for name, partitions, count in (("same", 2, 3), ("more", 3, 5)):
            await away.close()
            await remake(admin, topic, partitions)
            wanted = await fill(bootstrap, topic, partitions, name, count)
            await readers.have(wanted, "stream", "socket", "tail", "group", "earliest", "latest")
            await arrived(mqtt, wanted)
            away = await back()
            await arrived(away, wanted)
        # The client keeps a page's position, which does not identify the topic: reading continues from there.
        await readers.have(await fill(bootstrap, topic, 3, "later", 3))
    finally:
        await readers.end()
        await mqtt.close()
        await away.close()
    assert (await contained(served)).keys() <= {"callback"}
    assert await served.stop() == 0


def transact(address: str, topic: str, key: str) -> str:
    """Send one record in an AMQP transaction; return the transaction's last event."""
    connection = BlockingConnection(f"amqp://{address}", timeout=60)
    try:
        whole = Transacted(connection)
        message = Message(body=b"", annotations={"x-opt-bridge.key": key})
        delivery = whole.post(connection.create_sender(topic), message)
        whole.wait(lambda: bool(delivery.remote_state))
        return whole.end()
    finally:
        with contextlib.suppress(ProtonException):
            connection.close()


async def test_transactions_continue(served: GatewayProcess, new_topic: Any, admin: AIOKafkaAdminClient) -> None:
    topic = await new_topic(6)
    last = next(key for key in map(str, range(100)) if partition_of(key.encode(), 6) == 5)
    address = served.addresses["amqp"]
    assert await asyncio.to_thread(transact, address, topic, last) == "committed"
    await remake(admin, topic, 2)
    async with asyncio.timeout(25):  # metadata expires in 30 s
        while await asyncio.to_thread(transact, address, topic, last) != "committed":
            pass


async def admitted(served: GatewayProcess, client_id: str, topic_filter: str) -> PahoClient:
    """Connect a subscriber with a persistent session; retry while the gateway cannot store the session."""
    while True:
        client = await PahoClient(served.address("mqtt"), client_id=client_id).connect(clean_start=False)
        if client.connack.value == 0 and await client.subscribe(topic_filter) < 0x80:
            return client
        await client.close()


@pytest.mark.timeout(240)
async def test_nothing_acknowledged_is_lost_after_internal_topics_were_deleted(
    new_broker: Callable[..., EmbeddedBroker], new_gateway: Callable[..., GatewayProcess]
) -> None:
    broker = new_broker()  # a separate broker: other gateways have their sessions in these topics
    await broker.start()
    served = await new_gateway(broker.bootstrap_servers).start()
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    await admin.start()
    topic = "kept"
    await create_topic(broker.bootstrap_servers, topic, 1)
    client = await admitted(served, topic, f"{topic}/#")
    codes: set[int] = set()

    async def retain(text: bytes) -> None:
        while True:
            mid = client.paho.publish(f"{topic}/r", text, 1, retain=True).mid
            await wait_until(lambda mid=mid: mid in client.pubacks, 60)
            codes.add(client.pubacks[mid].value)
            if client.pubacks[mid].value == 0:
                return

    for number in range(3):
        await retain(b"before %d" % number)
    for name in ("__trivium_retained", "__trivium_sessions", "__trivium_groups", "__trivium_requests"):
        await admin.delete_topics([name])
        text = name.encode()
        await retain(text)
        for _ in range(2):  # immediately, and after the new topics were read
            newcomer = await admitted(served, f"{topic}-{name}", f"{topic}/#")
            await wait_until(
                lambda text=text, newcomer=newcomer: text in [one.payload for one in newcomer.messages], 60
            )
            await newcomer.close()
    assert codes <= {0, 0x97}  # no error may blame the client's topic
    await client.close()
    await admin.close()
    assert (await contained(served)).keys() <= {"callback"}
    assert await served.stop() == 0
    await broker.stop()
