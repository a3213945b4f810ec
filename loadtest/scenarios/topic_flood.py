"""Scenario `topics`: clients of every protocol create Kafka topics until the limits refuse, on an embedded Kafka.

Meanwhile modest clients send and receive on existing topics. Then gateway and Kafka are killed and restarted on their
data; then there are more topics than the defaults allow, and finally fewer open files than the data needs.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import json
import os
import re
import resource
import secrets
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
from aiokafka.admin import AIOKafkaAdminClient
from proton import Message
from proton.utils import BlockingConnection
from pwdlib.hashers.argon2 import Argon2Hasher

from loadtest.beside import beside
from loadtest.clients import topic_makers as makers
from loadtest.clients.mqtt_wire import publish_packet, subscribe_packet
from loadtest.gateway import GatewayProcess, process_cpu, process_descriptors, process_resident
from loadtest.report import Latencies

REFUSALS: Final = {
    "mqtt": "0x97",
    "amqp sender": "amqp:resource-limit-exceeded",
    "amqp receiver": "amqp:resource-limit-exceeded",
    "http": "429",
}
SHARE: Final = 0.7
"""The share of the broker's open files that its topics may use (docs/configuration.md)."""
SLACK: Final = 0.1
"""The additional share for clients, new segments and compaction."""
PAUSE_S: Final = 0.05
_TOPICS: Final = ("modest-mqtt", "modest-amqp", "modest-http")


class Plan(NamedTuple):
    """Parameters.

    Attributes:
        principals: in addition to a greedy one, which is first.
        files: limit of open files of gateway and broker, each, during the flood.
        enough: refusals after which a client ends.
        filters: of missing topics, for each principal.
        topics: number in the end, with raised limits and one partition each.
        scarce: open files of the start that must be refused. 0 skips it.
        topic_limit: `kafka.max_topics` of the first part. 0 means the default.
        principal_limit: its `kafka.max_topics_per_principal`. 0 means the default.
        again: 1 if the directory is an earlier run's: begin with the start after the kill.
    """

    principals: int = 6
    files: int = 16_000
    enough: int = 50
    filters: int = 500
    topics: int = 6_000
    scarce: int = 8_000
    topic_limit: int = 0
    principal_limit: int = 0
    again: int = 0


class Part(NamedTuple):
    """One part of the run; `answers` by protocol and result."""

    name: str
    seconds: float
    answers: dict[str, collections.Counter[str]]
    topics: int
    partitions: int
    files: int
    cpu: float
    resident: int
    rounds: Latencies

    def row(self) -> dict[str, Any]:
        """Return the columns of a report."""
        said = {protocol: ", ".join(f"{word or 'made'} {n}" for word, n in found.items())
                for protocol, found in self.answers.items()}  # fmt: skip
        return {
            "part": self.name, "seconds": round(self.seconds, 1), **said, "topics": self.topics,
            "partitions": self.partitions, "most open files": self.files, "gateway cpu s": round(self.cpu, 1),
            "gateway MiB": self.resident >> 20, "modest rounds": self.rounds.count,
            "p50 ms": self.rounds.milliseconds(50), "p99 ms": self.rounds.milliseconds(99),
            "most ms": self.rounds.milliseconds(100),
        }  # fmt: skip


class Flood:
    """One run."""

    def __init__(self, directory: Path, plan: Plan, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._plan = plan
        self._say = say
        self._numbers = itertools.count()
        self._run = secrets.token_hex(3)
        self._problems: list[str] = []
        self._parts: list[Part] = []
        self._users = ["greedy", *(f"p{number}" for number in range(plan.principals))]
        line = Argon2Hasher(time_cost=1, memory_cost=1024).hash(makers.PASSWORD)
        passwords = directory / "passwords"
        passwords.write_text("".join(f"{user}:{line}\n" for user in self._users))
        self._settings = {"TRIVIUM_SECURITY__PASSWORD_FILE": str(passwords)}
        self._limits = dict(self._settings)
        if plan.topic_limit:
            self._limits["TRIVIUM_KAFKA__MAX_TOPICS"] = str(plan.topic_limit)
        if plan.principal_limit:
            self._limits["TRIVIUM_KAFKA__MAX_TOPICS_PER_PRINCIPAL"] = str(plan.principal_limit)

    async def run(self) -> tuple[list[Part], list[str]]:
        """Run all parts; return the measurements and the problems."""
        plan = self._plan
        gateway = self._gateway(self._limits, plan.files)
        try:
            if not plan.again:
                await self._start(gateway, "empty")
                await self._part(gateway, "one principal", lambda to: self._flood(gateway, self._users[:1], to))
                await self._part(gateway, "the others", lambda to: self._flood(gateway, self._users[1:], to))
                await self._part(gateway, "SUBSCRIBE", lambda to: self._subscribe(gateway, to))
                await self._kill(gateway)
            await self._start(gateway, "killed")
            await self._part(gateway, "after the kill", lambda to: self._flood(gateway, self._users, to))
            await self._kill(gateway)
            gateway = await self._overfull(gateway)
        finally:
            await gateway.stop()
        return self._parts, self._problems

    async def _overfull(self, gateway: GatewayProcess) -> GatewayProcess:
        """Create more topics than the limits allow; return the gateway that runs in the end."""
        plan = self._plan
        raised = self._settings | {
            "TRIVIUM_KAFKA__MAX_TOPICS": str(plan.topics),
            "TRIVIUM_KAFKA__MAX_TOPICS_PER_PRINCIPAL": str(plan.topics),
            "TRIVIUM_KAFKA__TOPIC_PARTITIONS": "1",
        }
        gateway = self._gateway(raised, None)
        await self._start(gateway, "raised limits")
        try:
            await self._part(gateway, "raised limits", lambda to: self._flood(gateway, self._users[1:], to))
        finally:
            await self._kill(gateway)
        gateway = self._gateway(self._limits, None)
        await self._start(gateway, "more topics than allowed")
        try:
            await self._part(gateway, "overfull", lambda to: self._flood(gateway, self._users, to))
        finally:
            await self._kill(gateway)
        if not plan.scarce:
            return gateway
        least = await self._too_few(plan.scarce)
        gateway = self._gateway(self._limits, least)
        await self._start(gateway, f"the {least} open files that it requires")
        await self._part(gateway, "as many files as it asks for", lambda to: self._flood(gateway, self._users, to))
        return gateway

    async def _too_few(self, files: int) -> int:
        """Start with too few open files; return how many it says that it needs."""
        gateway = self._gateway(self._limits, files)
        try:
            await gateway.start()
        except RuntimeError as error:
            found = re.search(r"(\d+) log files in .* may open (\d+) files: allow at least (\d+)", str(error))
            if found is not None:
                self._say(found[0])
                return min(int(found[3]), self._most_files())
            self._problems.append(f"with {files} open files: {error}")
        else:
            await gateway.stop()
            self._problems.append(f"it started with {files} open files")
        return self._most_files()

    @staticmethod
    def _most_files() -> int:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def _gateway(self, settings: dict[str, str], files: int | None) -> GatewayProcess:
        return GatewayProcess(self._directory, None, environment=settings, open_files=files)

    async def _start(self, gateway: GatewayProcess, how: str) -> None:
        began = time.monotonic()
        await gateway.launch()
        await gateway.wait_ready(None)  # it gives up on its own if Kafka makes no progress
        self._say(f"started ({how}) in {time.monotonic() - began:.1f} s")

    async def _kill(self, gateway: GatewayProcess) -> None:
        """Kill gateway and Kafka together, like a machine that goes down."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(gateway.addresses["kafka_pid"]), signal.SIGKILL)
        await gateway.kill()

    async def _part(self, gateway: GatewayProcess, name: str, work: Callable[[Answers], Awaitable[None]]) -> None:
        """Run `work` beside modest clients, and measure."""
        answers: Answers = {}
        watch = _Watch(gateway)
        began, cpu = time.monotonic(), process_cpu(gateway.pid)
        async with _modest(gateway, self._problems) as rounds, beside(watch.look()):
            await work(answers)
        topics = await _count(gateway)
        figures = await gateway.metrics()
        part = Part(
            name, time.monotonic() - began, answers, topics, int(figures["trivium_topics_partitions"]), watch.most,
            process_cpu(gateway.pid) - cpu, process_resident(gateway.pid), rounds,
        )  # fmt: skip
        self._parts.append(part)
        self._say(json.dumps(part.row()))
        bound = (SHARE + SLACK) * figures["trivium_embedded_kafka_open_files_limit"]
        if name != "overfull" and watch.most > bound:
            self._problems.append(f"{name}: the broker had {watch.most} open files, more than {bound:.0f}")
        if not rounds.count:
            self._problems.append(f"{name}: the modest clients were not served")

    async def _flood(self, gateway: GatewayProcess, users: list[str], answers: Answers) -> None:
        """Have all users create topics until `enough` refusals; then no more can be created."""
        async with asyncio.TaskGroup() as tasks:
            for user in users:
                for protocol, make in _PROTOCOLS.items():
                    said = answers.setdefault(protocol, collections.Counter())
                    answered = _until(said, self._plan.enough, self._problems, REFUSALS[protocol])
                    tasks.create_task(make(gateway, user, self._name, answered))

    def _name(self) -> str:
        return f"flood-{next(self._numbers)}-{self._run}"

    async def _subscribe(self, gateway: GatewayProcess, answers: Answers) -> None:
        """Subscribe to missing topics, which must not create them."""
        before = await _count(gateway)
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(makers.by_subscribing(gateway, user, self._name, self._plan.filters))
                for user in self._users
            ]
        answers["mqtt"] = collections.Counter(granted=sum(one.result() for one in asked))
        if await _count(gateway) != before:
            self._problems.append("SUBSCRIBE created topics")


Answers = dict[str, collections.Counter[str]]


def _until(said: collections.Counter[str], enough: int, problems: list[str], refusal: str) -> makers.Answered:
    """Return a function that counts results, and returns False after `enough` refusals in a row."""
    refused = 0

    def answered(word: str) -> bool:
        nonlocal refused
        said[word] += 1
        refused = refused + 1 if word else 0
        if word and word != refusal:
            problems.append(f"refused by {word}, not by {refusal}")
        return refused < enough

    return answered


async def _amqp_sender(*arguments: Any) -> None:
    await makers.by_amqp(*arguments, receiver=False)


async def _amqp_receiver(*arguments: Any) -> None:
    await makers.by_amqp(*arguments, receiver=True)


_PROTOCOLS: Final[dict[str, Callable[..., Coroutine[Any, Any, None]]]] = {
    "mqtt": makers.by_mqtt,
    "amqp sender": _amqp_sender,
    "amqp receiver": _amqp_receiver,
    "http": makers.by_http,
}


# Modest clients send a message, wait for its acknowledgement and its arrival, and then send the next.


@contextlib.asynccontextmanager
async def _modest(gateway: GatewayProcess, problems: list[str]) -> AsyncIterator[Latencies]:
    """Run one client of each protocol during the block, and yield the latencies of their rounds."""
    rounds = Latencies()
    clients = [_modest_mqtt(gateway), _modest_http(gateway), _modest_amqp(gateway)]
    for client in clients:
        await anext(client)  # topics exist, and receivers are attached

    async def go_on(client: AsyncIterator[None]) -> None:
        while not over.is_set():
            began = time.perf_counter()
            try:
                async with asyncio.timeout(makers.PATIENCE_S):
                    await anext(client)
            except Exception as error:  # any error is what the run looks for
                problems.append(f"a modest client: {error!r}")
                return
            rounds.record(time.perf_counter() - began)
            await asyncio.sleep(PAUSE_S)

    over = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as tasks:
            for client in clients:
                tasks.create_task(go_on(client))
            try:
                yield rounds
            finally:
                over.set()
    finally:
        for client in clients:
            await client.aclose()


async def _subscriber(gateway: GatewayProcess, topic: str) -> makers.MqttConnection:
    client = await makers.MqttConnection.connect(gateway, f"reads-{topic}")
    client.writer.write(subscribe_packet(1, [(f"{topic}/#", 0)]))
    await client.expect(makers.SUBACK)
    return client


async def _arrival(client: makers.MqttConnection, payload: bytes) -> None:
    got = makers.payload_of(await client.expect(0x30))
    if got != payload:
        raise ValueError(f"{got!r} and not {payload!r}")


async def _modest_mqtt(gateway: GatewayProcess) -> Any:
    topic = _TOPICS[0]
    client = await makers.MqttConnection.connect(gateway, "modest")
    reader = None
    for number in _rounds():
        payload = b"%d" % number
        client.writer.write(publish_packet(f"{topic}/x", payload, 1, 1))
        code = makers.reason(await client.expect(makers.PUBACK))
        if code:
            raise ValueError(f"PUBACK 0x{code:02x}")
        if reader is None:
            reader = await _subscriber(gateway, topic)
        else:
            await _arrival(reader, payload)
        yield


async def _modest_http(gateway: GatewayProcess) -> Any:
    topic = _TOPICS[2]
    reader = None
    headers = {"Content-Type": "application/vnd.kafka.json.v2+json"}
    async with aiohttp.ClientSession(f"http://{gateway.addresses['http']}", headers=headers) as session:
        for number in _rounds():
            body = {"records": [{"key": "x", "value": number}]}
            async with session.post(f"/topics/{topic}", json=body) as response:
                if response.status != 200:
                    raise ValueError(f"status {response.status}")
            if reader is None:
                reader = await _subscriber(gateway, topic)
            else:
                await _arrival(reader, b"%d" % number)
            yield


async def _modest_amqp(gateway: GatewayProcess) -> Any:
    """Use proton's blocking client, with each round in a thread."""
    url = f"amqp://{gateway.addresses['amqp']}"
    lock = threading.Lock()

    def connect() -> tuple[Any, Any, Any]:
        connection = BlockingConnection(url, timeout=makers.PATIENCE_S)
        receiver = connection.create_receiver(_TOPICS[1], credit=10)
        return connection, connection.create_sender(_TOPICS[1]), receiver

    connection, sender, receiver = await asyncio.to_thread(connect)

    def round_trip(number: int) -> None:
        with lock:
            sender.send(Message(body=number))
            got = receiver.receive()
            receiver.accept()
            if got.body != number:
                raise ValueError(f"{got.body} and not {number}")

    try:
        for number in _rounds():
            await asyncio.to_thread(round_trip, number)
            yield
    finally:
        await asyncio.to_thread(connection.close)


def _rounds() -> Iterator[int]:
    return itertools.count(1)


class _Watch:
    """Measures once a second how many files the broker has open."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self._pid = int(gateway.addresses["kafka_pid"])
        self.most = 0

    async def look(self) -> None:
        """Measure forever."""
        while True:
            self.most = max(self.most, process_descriptors(self._pid))
            await asyncio.sleep(1)


async def _count(gateway: GatewayProcess) -> int:
    """Return the number of topics that Kafka itself lists."""
    admin = AIOKafkaAdminClient(bootstrap_servers=gateway.kafka, request_timeout_ms=60_000)
    await admin.start()
    try:
        return sum(1 for name in await admin.list_topics() if not name.startswith("__"))
    finally:
        await admin.close()
