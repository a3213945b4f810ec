"""Clients of every protocol create Kafka topics until the limits refuse, on an embedded Kafka.

Honest clients of every protocol run meanwhile. Then gateway and Kafka are killed and restarted on their data; then
there are more topics than the defaults allow, and finally fewer open files than the data needs.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import os
import re
import resource
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple

from aiokafka.admin import AIOKafkaAdminClient
from pwdlib.hashers.argon2 import Argon2Hasher

from loadtest.beside import beside
from loadtest.clients.hostile.topic_makers import MAKERS, PASSWORD, Answered
from loadtest.clients.mqtt_wire import connect_packet, subscribe_packet
from loadtest.clients.talk import SUBACK, MqttTalk
from loadtest.engine.command import Scenario
from loadtest.engine.honest import honest
from loadtest.engine.stand import MIB, Stand
from loadtest.gateway import GatewayProcess, process_cpu, process_descriptors, process_resident

LIMIT: Final = "amqp:resource-limit-exceeded"
REFUSALS: Final = {"mqtt": "0x97", "amqp sender": LIMIT, "amqp receiver": LIMIT, "http": "429"}
SHARE: Final = 0.7
"""The share of the broker's open files that its topics may use (docs/configuration.md)."""
SLACK: Final = 0.1
"""The additional share for clients, new segments and compaction."""


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
    """

    principals: int = 6
    files: int = 16_000
    enough: int = 50
    filters: int = 500
    topics: int = 6_000
    scarce: int = 8_000
    topic_limit: int = 0
    principal_limit: int = 0


class Flood:
    """One run."""

    def __init__(self, stand: Stand, plan: Plan) -> None:
        self._stand, self._plan = stand, plan
        self._numbers, self._run = itertools.count(), secrets.token_hex(3)
        self._users = ["greedy", *(f"p{number}" for number in range(plan.principals))]
        line = Argon2Hasher(time_cost=1, memory_cost=1024).hash(PASSWORD)
        passwords = stand.directory / "passwords"
        passwords.write_text("".join(f"{user}:{line}\n" for user in self._users))
        self._settings = {"TRIVIUM_SECURITY__PASSWORD_FILE": str(passwords)}
        limits = {"MAX_TOPICS": plan.topic_limit, "MAX_TOPICS_PER_PRINCIPAL": plan.principal_limit}
        self._limits = self._settings | {
            f"TRIVIUM_KAFKA__{name}": str(limit) for name, limit in limits.items() if limit
        }

    async def run(self) -> None:
        """Run all parts."""
        plan, everybody = self._plan, self._users
        async with self._started("empty", self._limits, plan.files) as gateway:
            await self._part(gateway, "one principal", lambda: self._flood(gateway, everybody[:1]))
            await self._part(gateway, "the others", lambda: self._flood(gateway, everybody[1:]))
            await self._part(gateway, "SUBSCRIBE", lambda: self._subscribe(gateway))
        async with self._started("killed", self._limits, plan.files) as gateway:
            await self._part(gateway, "after the kill", lambda: self._flood(gateway, everybody))
        most = {f"TRIVIUM_KAFKA__MAX_TOPICS{end}": str(plan.topics) for end in ("", "_PER_PRINCIPAL")}
        raised = self._settings | most | {"TRIVIUM_KAFKA__TOPIC_PARTITIONS": "1"}
        async with self._started("raised limits", raised) as gateway:
            await self._part(gateway, "raised limits", lambda: self._flood(gateway, everybody[1:]))
        async with self._started("more topics than allowed", self._limits) as gateway:
            await self._part(gateway, "overfull", lambda: self._flood(gateway, everybody), files=False)
        if plan.scarce:
            least = await self._too_few(plan.scarce)
            async with self._started(f"the {least} open files that it requires", self._limits, least) as gateway:
                await self._part(gateway, "as many files as it asks for", lambda: self._flood(gateway, everybody))

    @contextlib.asynccontextmanager
    async def _started(
        self, how: str, settings: Mapping[str, str], files: int | None = None
    ) -> AsyncIterator[GatewayProcess]:
        """Start gateway and Kafka on the data; then kill both together, like a machine that goes down."""
        gateway = GatewayProcess(self._stand.directory, None, environment=settings, open_files=files)
        try:
            began = time.monotonic()
            await gateway.launch()
            await gateway.wait_ready(None)  # it gives up on its own if Kafka makes no progress
            self._stand.say(f"started ({how}) in {time.monotonic() - began:.1f} s")
            yield gateway
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(gateway.addresses["kafka_pid"]), signal.SIGKILL)
            await gateway.kill()
        finally:
            await gateway.stop()

    async def _too_few(self, files: int) -> int:
        """Start with too few open files; return how many it says that it needs."""
        most, found = resource.getrlimit(resource.RLIMIT_NOFILE)[1], None
        gateway = GatewayProcess(self._stand.directory, None, environment=self._limits, open_files=files)
        try:
            await gateway.start()
        except RuntimeError as error:
            found = re.search(r"(\d+) log files in .* may open (\d+) files: allow at least (\d+)", str(error))
            self._stand.check(found is not None, f"with {files} open files: {error}")
        else:
            await gateway.stop()
            self._stand.problems.append(f"it started with {files} open files")
        return min(int(found[3]), most) if found else most

    async def _part(
        self, gateway: GatewayProcess, name: str, work: Callable[[], Awaitable[dict[str, Any]]], *, files: bool = True
    ) -> None:
        """Run `work` beside honest clients, and measure; `files`: whether the broker's open files are bounded."""
        began, cpu, most = time.monotonic(), process_cpu(gateway.pid), 0

        async def look() -> None:
            nonlocal most
            while True:
                most = max(most, process_descriptors(int(gateway.addresses["kafka_pid"])))
                await asyncio.sleep(1)

        async with honest(self._stand, gateway) as load, beside(look()):
            answers = await work()
        metrics = await gateway.metrics()
        self._stand.row(**{
            "part": name, "seconds": round(time.monotonic() - began, 1), **answers, "topics": await _count(gateway),
            "partitions": int(metrics["trivium_topics_partitions"]), "most open files": most,
            "gateway cpu s": round(process_cpu(gateway.pid) - cpu, 1),
            "gateway MiB": process_resident(gateway.pid) // MIB,
            "honest p50 ms": load.latencies.milliseconds(50), "honest p99 ms": load.latencies.milliseconds(99),
        })  # fmt: skip
        bound = (SHARE + SLACK) * metrics["trivium_embedded_kafka_open_files_limit"]
        self._stand.check(
            not files or most <= bound, f"{name}: the broker had {most} open files, more than {bound:.0f}"
        )

    async def _flood(self, gateway: GatewayProcess, users: list[str]) -> dict[str, Any]:
        """Have all users create topics until `enough` refusals in a row; then no more can be created."""
        said: dict[str, collections.Counter[str]] = {protocol: collections.Counter() for protocol in MAKERS}
        async with asyncio.TaskGroup() as tasks:
            for user in users:
                for protocol, make in MAKERS.items():
                    answered = self._counting(said[protocol], REFUSALS[protocol])
                    tasks.create_task(_awaited(make(gateway, user, self._name, answered)))
        return {
            protocol: ", ".join(f"{word or 'made'} {count}" for word, count in found.items())
            for protocol, found in said.items()
        }

    def _counting(self, said: collections.Counter[str], refusal: str) -> Answered:
        refused = 0

        def answered(word: str) -> bool:
            nonlocal refused
            said[word] += 1
            refused = refused + 1 if word else 0
            self._stand.check(word in ("", refusal), f"refused by {word}, not by {refusal}")
            return refused < self._plan.enough

        return answered

    def _name(self) -> str:
        return f"flood-{next(self._numbers)}-{self._run}"

    async def _subscribe(self, gateway: GatewayProcess) -> dict[str, Any]:
        """Subscribe to missing topics, which must not create them."""
        before, granted = await _count(gateway), 0
        for user in self._users:
            talk = await MqttTalk.open(gateway.address("mqtt"), connect_packet(self._name(), user, PASSWORD))
            wanted = [(f"{self._name()}/#", 1) for _ in range(self._plan.filters)]
            (body,) = await talk.ask([subscribe_packet(1, wanted)], SUBACK)
            granted += sum(code < 0x80 for code in body[3 + body[2] :])
            talk.drop()
        self._stand.check(await _count(gateway) == before, "SUBSCRIBE created topics")
        return {"mqtt": f"granted {granted}"}


async def _awaited(work: Awaitable[None]) -> None:
    await work


async def _count(gateway: GatewayProcess) -> int:
    """Return the number of topics that Kafka itself lists."""
    admin = AIOKafkaAdminClient(bootstrap_servers=gateway.kafka, request_timeout_ms=60_000)
    await admin.start()
    try:
        return sum(1 for name in await admin.list_topics() if not name.startswith("__"))
    finally:
        await admin.close()


async def run(stand: Stand, plan: Plan) -> None:
    """Run it on its own embedded Kafka."""
    await Flood(stand, plan).run()


SCENARIOS = (
    Scenario(
        "topics", "have clients create Kafka topics up to the limits, with kills and few open files", Plan(), run,
        own_kafka=True,
    ),
)  # fmt: skip
