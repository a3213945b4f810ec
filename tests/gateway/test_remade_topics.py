"""A topic that is deleted and made again, with fewer partitions or more, under every kind of client."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiokafka.admin import AIOKafkaAdminClient
from proton import Message, ProtonException
from proton.utils import BlockingConnection

from gateway.kafka.publish.partitioner import partition_of
from tests.gateway.test_containment import contained
from tests.support.amqp import ThreadedSender
from tests.support.amqp_transactions import Transacted
from tests.support.gateway import GatewayProcess, wait_until
from tests.support.topics import read_all, remake

JSON = {"Content-Type": "application/vnd.kafka.json.v2+json"}


@pytest.fixture
async def served(new_gateway: Callable[..., GatewayProcess], bootstrap: str) -> AsyncIterator[GatewayProcess]:
    gateway = await new_gateway(bootstrap).start()
    yield gateway
    assert (await contained(gateway)).keys() <= {"callback"}
    assert await gateway.stop() == 0


class Loads:
    """Requests again and again, and what became of each kind of them since the last look."""

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
        """The offsets, or the status and its message."""
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
    """It may be told for a while that the topic is not there; then every answer is good."""
    await wait_until(lambda: any(good(answer) for answer in loads.answers.get(name, ())), 60)
    answers = loads.answers[name]
    count = len(answers)
    await wait_until(lambda: len(answers) > count + 10, 60)
    assert all(good(answer) for answer in answers[count:]), (name, answers[count:])


def stored(partitions: int) -> Callable[[Any], bool]:
    """All records of a request are stored, in the partitions that there are."""
    return lambda answer: all(isinstance(one, dict) and one.get("partition", 9) < partitions for one in answer)


@pytest.mark.timeout(400)
async def test_whoever_writes_goes_on(
    served: GatewayProcess, new_topic: Any, admin: AIOKafkaAdminClient, bootstrap: str
) -> None:
    topic = await new_topic(6)
    last = next(key for key in map(str, range(100)) if partition_of(key.encode(), 6) == 5)
    loads = Loads(served, topic)
    links = [
        await ThreadedSender(served.addresses["amqp"], place).connect() for place in (topic, f"{topic}/partitions/5")
    ]

    async def lonely() -> Any:
        """All of its records lie in the last partition: nothing but itself finds out that there is none any more."""
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


def transact(address: str, topic: str, key: str) -> str:
    """One record in a transaction of AMQP; what became of it."""
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


async def test_transactions_go_on(served: GatewayProcess, new_topic: Any, admin: AIOKafkaAdminClient) -> None:
    topic = await new_topic(6)
    last = next(key for key in map(str, range(100)) if partition_of(key.encode(), 6) == 5)
    address = served.addresses["amqp"]
    assert await asyncio.to_thread(transact, address, topic, last) == "committed"
    await remake(admin, topic, 2)
    async with asyncio.timeout(50):  # its own time-out would be 60 s
        while await asyncio.to_thread(transact, address, topic, last) != "committed":
            pass
