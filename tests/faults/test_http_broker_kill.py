"""Kafka is killed under HTTP clients of every kind: acknowledged records survive, and readers keep their position."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from gateway.embedded.broker import EmbeddedBroker
from loadtest.clients.topics import create_topic
from tests.support.gateway import GatewayProcess
from tests.support.topics import read_all
from tests.support.waiting import wait_until

JSON = {"Content-Type": "application/vnd.kafka.json.v2+json"}
CONTROL = {"Content-Type": "application/vnd.kafka.v2+json"}
LONG_S = 60.0  # for a wait until Kafka is back, on a slow machine
KILLS = 1
BETWEEN = 15  # answers that each client must get between two kills
PAUSE_S = 0.02
TOPIC = f"killed-{uuid.uuid4().hex[:6]}"


class Producers:
    """Clients that publish numbered values one after the other, and record their offsets."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url
        self.singles: dict[int, str] = {}  # offset -> value
        self.lines: dict[int, str] = {}
        self.over = asyncio.Event()

    async def single(self) -> None:
        """Send one record per request; after a 5xx, which is no acknowledgement, continue with the next record."""
        number = 0
        while not self.over.is_set():
            value = f"single-{number}"
            body = json.dumps({"records": [{"value": value}]})
            async with self._http.post(f"{self._url}/topics/{TOPIC}", data=body, headers=JSON) as answer:
                told = await answer.json(content_type=None)
                assert answer.status == 200 or answer.status >= 500, told
                if answer.status == 200 and "offset" in told["offsets"][0]:
                    self.singles[told["offsets"][0]["offset"]] = value
            number += 1
            await asyncio.sleep(PAUSE_S)

    async def upload(self) -> None:
        """Send line after line in one long request, and read the reports, which come in order."""
        sent: list[str] = []

        async def body() -> AsyncIterator[bytes]:
            while not self.over.is_set():
                sent.append(f"line-{len(sent)}")
                yield json.dumps({"value": sent[-1]}).encode() + b"\n"
                await asyncio.sleep(PAUSE_S)

        url = f"{self._url}/topics/{TOPIC}/records"
        async with self._http.post(url, data=body(), headers={"Content-Type": "application/x-ndjson"}) as answer:
            assert answer.status == 200
            number = 0
            async for line in answer.content:
                report = json.loads(line)
                if "offset" in report:
                    self.lines[report["offset"]] = sent[number]
                number += 1
        assert number == len(sent), "a report for every line"

    def has_stored(self, count: int) -> bool:
        return len(self.singles) >= count and len(self.lines) >= count


class Listener:
    """Follows the event stream as a browser does: it reconnects with the last event's id."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url
        self.values: list[str] = []
        self.connections = 0
        self.open = asyncio.Event()

    async def listen(self) -> None:
        last: str | None = None
        while True:
            headers = {} if last is None else {"Last-Event-ID": last}
            self.connections += 1
            try:
                url = f"{self._url}/topics/{TOPIC}/stream?from=beginning"
                async with self._http.get(url, headers=headers) as answer:
                    if answer.status == 200:
                        self.open.set()
                        identity, data = "", ""
                        async for line in answer.content:
                            name, _, value = line.decode().rstrip("\n").partition(": ")
                            if name == "id":
                                identity = value
                            elif name == "data":
                                data = value
                            elif not name and data:
                                self.values.append(json.loads(data)["value"])
                                last, data = identity, ""
            except aiohttp.ClientError:
                continue
            await asyncio.sleep(PAUSE_S)


class Consumer:
    """A consumer whose next poll commits the previous one; without Kafka it gets a 503 and still exists."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._path = f"{url}/consumers/readers/instances/one"
        self._url = url
        self.values: list[str] = []

    async def begin(self) -> None:
        await self._ask("POST", f"{self._url}/consumers/readers", {"name": "one", "format": "json",
                        "auto.offset.reset": "earliest"})  # fmt: skip
        await self._ask("POST", f"{self._path}/subscription", {"topics": [TOPIC]})

    async def poll(self) -> None:
        while True:
            async with self._http.get(f"{self._path}/records?timeout=500") as answer:
                told = await answer.json(content_type=None)
                assert answer.status == 200 or answer.status >= 500, told
                if answer.status == 200:
                    self.values += [record["value"] for record in told]
            await asyncio.sleep(PAUSE_S)

    async def end(self) -> None:
        await self._ask("DELETE", self._path, None)

    async def _ask(self, method: str, url: str, value: Any) -> None:
        async with asyncio.timeout(LONG_S):
            body = None if value is None else json.dumps(value)
            while True:
                async with self._http.request(method, url, data=body, headers=CONTROL) as answer:
                    if answer.status < 300:
                        return
                    assert answer.status >= 500, await answer.text()


@pytest.mark.timeout(300)
async def test_a_killed_broker_loses_no_acknowledged_record_and_no_position(
    stoppable: EmbeddedBroker, new_gateway: Callable[..., GatewayProcess]
) -> None:
    gateway = await new_gateway(stoppable.bootstrap_servers).start()
    await create_topic(stoppable.bootstrap_servers, TOPIC, 1)
    url = "http://" + gateway.addresses["http"]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 20) as http:
        producers, listener, consumer = Producers(http, url), Listener(http, url), Consumer(http, url)
        await consumer.begin()
        async with asyncio.TaskGroup() as group:
            publishing = [group.create_task(producers.single()), group.create_task(producers.upload())]
            reading = [group.create_task(listener.listen()), group.create_task(consumer.poll())]
            for kill in range(1, KILLS + 1):
                await wait_until(lambda kill=kill: producers.has_stored(kill * BETWEEN), LONG_S)
                await wait_until(lambda: len(listener.values) >= BETWEEN and len(consumer.values) >= BETWEEN, LONG_S)
                await stoppable.kill()
                await stoppable.start()
            stored = len(producers.singles), len(producers.lines)
            await wait_until(lambda: producers.has_stored(max(stored) + 5), LONG_S)
            producers.over.set()
            await asyncio.wait_for(asyncio.gather(*publishing), LONG_S)
            log = [(place, json.loads(value)) async for place, value in everything(stoppable.bootstrap_servers)]
            values = [value for _, value in log]
            await wait_until(lambda: len(listener.values) >= len(values), LONG_S)
            await wait_until(lambda: set(values) <= set(consumer.values), LONG_S)
            for task in reading:
                task.cancel()
        at = dict(log)
        for acknowledged in (producers.singles, producers.lines):
            assert {place: at.get(place) for place in acknowledged} == acknowledged
        assert listener.values == values, "a gap, or a double"
        seen = dict.fromkeys(consumer.values)
        assert list(seen) == values, "in order, and again only what was not committed"
        await consumer.end()
    assert await gateway.stop() == 0


async def everything(bootstrap: str) -> AsyncIterator[tuple[int, bytes]]:
    for record in await read_all(bootstrap, TOPIC):
        yield record.offset, record.value
