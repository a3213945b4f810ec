"""Transactions of a whole gateway: what each kind of reader sees, also after a crash."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from proton import ProtonException
from proton.reactor import AtMostOnce, Copy
from proton.utils import BlockingConnection

from protocols.amqp import outcomes
from protocols.mqtt.packets import Subscription
from tests.support.amqp import body_of, data, until_drained
from tests.support.amqp_transactions import Transacted, TransactedClient
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.waiting import wait_until

WAIT_S = 60
PATIENCE_S = 5.0  # of a copier whose gateway may be down
RECORDS = 500
V2 = "application/vnd.kafka.v2+json"
BINARY = "application/vnd.kafka.binary.v2+json"


class HttpReader:
    """A consumer instance of one topic, from its beginning."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def open(self, group: str, topic: str) -> HttpReader:
        headers = {"Content-Type": V2}
        wanted = {"format": "binary", "auto.offset.reset": "earliest"}
        async with self._session.post(f"{self._url}/consumers/{group}", json=wanted, headers=headers) as answer:
            self._url = f"{self._url}/consumers/{group}/instances/{(await answer.json())['instance_id']}"
        async with self._session.post(f"{self._url}/subscription", json={"topics": [topic]}, headers=headers) as answer:
            assert answer.status == 204
        return self

    async def read(self, count: int) -> list[bytes]:
        found: list[bytes] = []
        async with asyncio.timeout(WAIT_S):
            while len(found) < count:
                async with self._session.get(f"{self._url}/records?timeout=200", headers={"Accept": BINARY}) as answer:
                    assert answer.status == 200
                    found += [base64.b64decode(record["value"]) for record in await answer.json()]
        return found

    async def close(self) -> None:
        async with self._session.delete(self._url, headers={"Content-Type": V2}) as answer:
            assert answer.status == 204


@pytest.fixture
async def connect_mqtt(gateway: GatewayProcess) -> AsyncIterator[Callable[[], Awaitable[RawClient]]]:
    made: list[RawClient] = []

    async def connect() -> RawClient:
        made.append(await RawClient.connect(gateway.address("mqtt")))
        return made[-1]

    yield connect
    for client in made:
        client.drop()


async def test_readers_of_every_kind_see_what_is_committed(
    gateway: GatewayProcess, connect_mqtt: Callable[[], Awaitable[RawClient]], new_topic: Any
) -> None:
    """Rolled-back records lie in between, and one of Kafka's markers ends the log."""
    topic = await new_topic(partitions=1)
    host, port = gateway.address("amqp")
    mqtt = await connect_mqtt()
    await mqtt.subscribe(Subscription(topic, 1))
    expected = [b"%d" % n for n in range(5)]
    async with aiohttp.ClientSession() as session, TransactedClient(f"{host}:{port}") as client:
        http = await HttpReader(session, f"http://{gateway.addresses['http']}").open(f"h-{topic}", topic)

        def work() -> list[list[bytes]]:
            connection = client.connection
            sender = connection.create_sender(topic)
            readers = [
                connection.create_receiver(address, credit=20) for address in (topic, f"{topic}/group.id/g-{topic}")
            ]
            for values, commit in (([b"no"] * 20, False), (expected[:2], True), ([b"nor this"], False)):
                transaction = Transacted(connection)
                for value in values:
                    transaction.post(sender, data(value))
                transaction.end(commit=commit)
            transaction = Transacted(connection)
            for value in expected[2:4]:
                assert transaction.outcome(transaction.post(sender, data(value))) == (outcomes.ACCEPTED, "")
            sender.send(data(expected[4]))  # not in the transaction, but behind its records: visible after the end
            transaction.end()
            browser = connection.create_receiver(f"queue://{topic}", credit=0, options=[Copy(), AtMostOnce()])
            browser.link.drain(100)
            until_drained(connection, browser)
            found = [[body_of(message) for message, _ in browser.fetcher.incoming]]
            for reader in readers:
                found.append([])
                for _ in expected:
                    found[-1].append(body_of(reader.receive(WAIT_S)))
                    reader.accept()
            return found

        browsed, *received = await client.run(work)
        assert received == [expected, expected]
        assert browsed == expected[: len(browsed)]  # Kafka's markers may lag behind the discharge by a moment
        assert len(browsed) >= 2
        assert [message.payload for message in await mqtt.messages(5)] == expected
        assert await http.read(5) == expected
        await http.close()


async def test_a_gateway_that_is_killed_leaves_nothing_open(
    new_gateway: Callable[..., GatewayProcess], bootstrap: str, new_topic: Any, tmp_path: Path
) -> None:
    """Its successor ends the transaction long before Kafka's time-out of 75 s, and uses the same ids."""
    topic = await new_topic(partitions=1)
    gateway = await new_gateway(bootstrap, "--data-dir", str(tmp_path / "data")).start()

    async def client() -> TransactedClient:
        host, port = gateway.address("amqp")
        return await TransactedClient(f"{host}:{port}").connect()

    killed = await client()

    def post() -> None:
        sender = killed.connection.create_sender(topic)
        first = Transacted(killed.connection)
        first.post(sender, data(b"yes"))
        assert first.end() == "committed"
        for _ in range(2):
            transaction = Transacted(killed.connection)
            assert transaction.outcome(transaction.post(sender, data(b"no"))) == (outcomes.ACCEPTED, "")

    await killed.run(post)
    await gateway.kill()
    await killed.close(patience=0.1)
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        await producer.send_and_wait(topic, b"behind")
    await gateway.start()
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
    )
    async with consumer, asyncio.timeout(WAIT_S):
        assert [(await consumer.getone()).value for _ in range(2)] == [b"yes", b"behind"]

        def again() -> None:
            sender = living.connection.create_sender(topic)
            transactions = [Transacted(living.connection) for _ in range(3)]
            for transaction in transactions:
                transaction.post(sender, data(b"again"))
            assert [transaction.end() for transaction in transactions] == ["committed"] * 3

        living = await client()
        await living.run(again)
        await living.close()
        assert [(await consumer.getone()).value for _ in range(3)] == [b"again"] * 3


class Copier:
    """Receives records of a group and posts them to another topic, ten in a transaction, across gateway crashes."""

    def __init__(self, gateway: GatewayProcess, source: str, target: str) -> None:
        self._gateway = gateway
        self._source = f"{source}/group.id/copier-{source}"
        self._target = target
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self.committed = 0
        self.stopping = False

    async def run(self) -> None:
        """Copy until stopped; while the gateway is down, try again."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._run)
        self._thread.shutdown()

    def _run(self) -> None:
        while not self.stopping:
            with contextlib.suppress(ProtonException, OSError):
                self._copy()

    def _copy(self) -> None:
        host, port = self._gateway.address("amqp")
        connection = BlockingConnection(f"amqp://{host}:{port}", timeout=PATIENCE_S)
        try:
            receiver = connection.create_receiver(self._source, credit=10)
            sender = connection.create_sender(self._target)
            while not self.stopping:
                transaction = Transacted(connection, wait_s=PATIENCE_S)
                for _ in range(10):
                    transaction.post(sender, data(body_of(transaction.take(receiver))))
                if transaction.end() == "committed":
                    self.committed += 10
        finally:
            with contextlib.suppress(ProtonException):
                connection.close()


@pytest.mark.timeout(300)
async def test_each_record_is_copied_once_though_the_gateway_is_killed(
    new_gateway: Callable[..., GatewayProcess], bootstrap: str, new_topic: Any, tmp_path: Path
) -> None:
    """Receiving and posting are one transaction: no record is lost or duplicated."""
    source, target = await new_topic(partitions=1), await new_topic(partitions=2)
    gateway = await new_gateway(bootstrap, "--data-dir", str(tmp_path / "data")).start()
    expected = [b"%04d" % n for n in range(RECORDS)]
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        for value in expected:
            await producer.send(source, value)
        await producer.flush()
    copier = Copier(gateway, source, target)
    copying = asyncio.create_task(copier.run())
    await wait_until(lambda: copier.committed >= RECORDS // 3, 2 * WAIT_S)
    await gateway.kill()
    await gateway.start()
    consumer = AIOKafkaConsumer(
        target, bootstrap_servers=bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
    )
    found: list[bytes] = []
    async with consumer, asyncio.timeout(3 * WAIT_S):
        while len(found) < RECORDS:
            for records in (await consumer.getmany(timeout_ms=200)).values():
                found += [record.value for record in records]
        copier.stopping = True
        await copying
        for records in (await consumer.getmany(timeout_ms=1000)).values():  # a duplicate would be stored by now
            found += [record.value for record in records]
    assert sorted(found) == expected
