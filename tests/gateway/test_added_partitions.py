"""Every way to name a partition reaches one that was added a moment ago, at once; one that is not there is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions
from proton import Message, symbol
from proton.utils import BlockingConnection, LinkDetached, SendException

from tests.support.gateway import GatewayProcess
from tests.support.topics import read_all
from tests.support.waiting import wait_until

ADDED = 3
JSON = "application/vnd.kafka.json.v2+json"


async def add_partitions(admin: AIOKafkaAdminClient, topic: str) -> None:
    await admin.create_partitions({topic: NewPartitions(ADDED + 1)})

    async def is_led() -> bool:
        (found,) = await admin.describe_topics([topic])
        leaders = [partition["leader"] for partition in found["partitions"]]
        return len(leaders) == ADDED + 1 and -1 not in leaders

    await wait_until(is_led)


class Http:
    """Posts to a partition, in one of the dialects; `send` returns whether it was stored."""

    def __init__(self, path: str, body: Callable[[int], Any], media: str = JSON) -> None:
        self.path, self.body, self.media = path, body, media

    async def open(self, gateway: GatewayProcess, topic: str) -> None:
        self.topic = topic
        self.http = aiohttp.ClientSession(f"http://{gateway.addresses['http']}", headers={"Content-Type": self.media})
        assert await self.send(0)

    async def send(self, partition: int) -> bool:
        path = self.path.replace("TOPIC", self.topic).replace("PARTITION", str(partition))
        if "CLUSTER" in path:
            async with self.http.get("/v3/clusters") as answer:
                path = path.replace("CLUSTER", (await answer.json())["data"][0]["cluster_id"])
        async with self.http.post(path, json=self.body(partition)) as answer:
            found = await answer.json(content_type=None)
            errors = [one for one in found.get("offsets", [found]) if one.get("error_code") not in (None, 200)]
            return answer.status == 200 and not errors

    async def close(self) -> None:
        await self.http.close()


class Amqp:
    """Sends to a partition; `send` returns whether it was stored."""

    def __init__(self, target: str | None, message: Callable[[str, int], Message]) -> None:
        self.target, self.message = target, message

    async def open(self, gateway: GatewayProcess, topic: str) -> None:
        self.topic = topic
        self.connection = await asyncio.to_thread(BlockingConnection, f"amqp://{gateway.addresses['amqp']}", timeout=60)
        self.sender: Any = None
        assert await self.send(0)

    def _send(self, partition: int) -> bool:
        try:
            if self.sender is None or (self.target and "PARTITION" in self.target):
                target = self.target and self.target.replace("TOPIC", self.topic).replace("PARTITION", str(partition))
                self.sender = self.connection.create_sender(target)
            self.sender.send(self.message(self.topic, partition))
        except (SendException, LinkDetached):
            return False
        return True

    async def send(self, partition: int) -> bool:
        return await asyncio.to_thread(self._send, partition)

    async def close(self) -> None:
        await asyncio.to_thread(self.connection.close)


def plain(_topic: str, _partition: int) -> Message:
    return Message(body="x")


def to_partition(topic: str, partition: int) -> Message:
    return Message(address=f"{topic}/partitions/{partition}", body="x")


def annotated(_topic: str, partition: int) -> Message:
    return Message(body="x", annotations={symbol("x-opt-bridge.partition"): partition})


WAYS: dict[str, Callable[[], Any]] = {
    "HTTP, in the record": lambda: Http("/topics/TOPIC", lambda n: {"records": [{"value": 1, "partition": n}]}),
    "HTTP, in the path": lambda: Http("/topics/TOPIC/partitions/PARTITION", lambda _: {"records": [{"value": 1}]}),
    "HTTP, version 2": lambda: Http("/v2/topics/TOPIC/partitions/PARTITION", lambda _: {"records": [{"value": 1}]}),
    "HTTP, version 3": lambda: Http(
        "/v3/clusters/CLUSTER/topics/TOPIC/records",
        lambda n: {"partition_id": n, "value": {"type": "JSON", "data": 1}},
        "application/json",
    ),
    "AMQP, a new link": lambda: Amqp("TOPIC/partitions/PARTITION", plain),
    "AMQP, to an anonymous target": lambda: Amqp(None, to_partition),
    "AMQP, by annotation": lambda: Amqp("TOPIC", annotated),
}


@pytest.mark.part("confluent")
@pytest.mark.parametrize("way", WAYS)
async def test_an_added_partition_is_reached_at_once(
    gateway: GatewayProcess, bootstrap: str, admin: AIOKafkaAdminClient, new_topic: Any, way: str
) -> None:
    topic = await new_topic(partitions=1)
    client = WAYS[way]()
    await client.open(gateway, topic)
    await add_partitions(admin, topic)
    assert await client.send(ADDED)
    assert sorted(record.partition for record in await read_all(bootstrap, topic)) == [0, ADDED]
    assert not await client.send(ADDED + 7)
    await client.close()
