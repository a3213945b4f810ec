"""Three Kafka brokers for the faults, started like `make cluster`; each can be killed and restarted."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Int8, Int16, Int32, Schema, String

from loadtest.child import command_line
from loadtest.start import Child

START_S: Final = 180.0
COPIES: Final = 3
_POLL_S: Final = 0.05
LOGINS: Final[Mapping[str, Mapping[str, str]]] = {
    "TLS": {"security_protocol": "SSL", "ssl_certfile": "client.pem", "ssl_keyfile": "client.key"},
    "SASL": {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_username": "gateway",
        "sasl_password_file": "password",
    },
}
"""The gateway's keys of `[kafka]` for a listener of secured brokers; the files are the cluster's."""
_FILES: Final = ("ssl_cafile", "ssl_certfile", "ssl_keyfile", "sasl_password_file")
_PREFERRED: Final = 0  # ElectLeaders' election_type
_UNNECESSARY: Final = 84  # it already leads


class _ElectLeadersAnswer(Response):  # type: ignore[misc]  # aiokafka has no types
    API_KEY = 43
    API_VERSION = 1
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        (
            "results",
            Array(
                ("topic", String("utf-8")),
                (
                    "partitions",
                    Array(("partition", Int32), ("error_code", Int16), ("error_message", String("utf-8"))),
                ),
            ),
        ),
    )


class _ElectLeaders(RequestStruct):  # type: ignore[misc]
    API_KEY: ClassVar[int] = 43
    API_VERSION: ClassVar[int] = 1
    RESPONSE_TYPE = _ElectLeadersAnswer
    SCHEMA = Schema(
        ("election_type", Int8),
        ("topics", Array(("topic", String("utf-8")), ("partitions", Array(Int32)))),
        ("timeout_ms", Int32),
    )


class ElectPreferred(Request[_ElectLeaders]):  # type: ignore[misc]
    """Makes the first replica of each partition its leader; aiokafka lacks this request."""

    API_KEY = 43

    def __init__(self, partitions: dict[str, list[int]]) -> None:
        """`partitions` is by topic."""
        self._partitions = partitions

    def build(self, request_struct_class: type[_ElectLeaders]) -> _ElectLeaders:
        """See `Request`."""
        return request_struct_class(_PREFERRED, list(self._partitions.items()), 30_000)


class KafkaCluster(Child):
    """Three brokers in a directory, and the process that supervises them; see `Kafka`. `kill` kills all of them."""

    def __init__(self, directory: Path, listener: str | None = None) -> None:
        """Prepare the cluster without starting it.

        With a `listener` of `LOGINS` the brokers require authentication, and the gateway, which has its rights, uses
        this listener.
        """
        self._directory = directory
        self._listener = listener
        self._ready = directory / "ready.json"
        self._facts: dict[str, Any] = {}

    @property
    def bootstrap_servers(self) -> str:
        """The addresses of the brokers."""
        return str(self._facts["bootstrap_servers"])

    def way(self) -> tuple[str, dict[str, str]]:
        """Return the gateway's bootstrap servers, and its settings for them as environment variables."""
        if self._listener is None:
            return self.bootstrap_servers, {}
        secrets = Path(self._facts["secrets"])
        login = {"ssl_cafile": "ca.pem", **LOGINS[self._listener]}
        settings = {name: str(secrets / value) if name in _FILES else value for name, value in login.items()}
        return self._facts["secured"][self._listener], {
            f"TRIVIUM_KAFKA__{name.upper()}": settings[name] for name in login
        }

    def node(self, number: int) -> int | None:
        """Return the process of a node; None while it does not run."""
        found = self._facts["nodes"].get(str(number))
        return None if found is None else int(found)

    async def start(self) -> None:
        """Start the brokers that do not run, and wait until all serve; RuntimeError if they do not."""
        if self.is_running:
            os.kill(self.pid, signal.SIGHUP)
        else:
            self._ready.unlink(missing_ok=True)
            argv = [sys.executable, "-m", "tools.cluster", "--directory", str(self._directory / "data")]
            argv += [] if self._listener is None else ["--secured"]
            await self.spawn(
                *command_line(*argv, "--ready-file", str(self._ready)), log=self._directory / "cluster.log"
            )
        async with asyncio.timeout(START_S):
            while len(self._status().get("nodes", ())) < COPIES:
                if not self.is_running:
                    raise RuntimeError(f"the cluster has ended; see {self._directory / 'cluster.log'}")
                await asyncio.sleep(_POLL_S)

    def _status(self) -> dict[str, Any]:
        if self._ready.exists():
            self._facts = json.loads(self._ready.read_text())
        return self._facts

    async def kill_node(self, number: int) -> None:
        """Kill a node with SIGKILL; it stays down until `start`."""
        pid = self.node(number)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(START_S):
            while str(number) in self._status()["nodes"]:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(_POLL_S)

    async def kill(self) -> None:
        """Kill all nodes."""
        for number in range(1, COPIES + 1):
            if self.node(number) is not None:
                await self.kill_node(number)

    async def leaders(self, topic: str) -> dict[int, int]:
        """Return the leader of each partition of a topic."""
        async with self._admin() as admin:
            (found,) = await admin.describe_topics([topic])
        return {one["partition"]: one["leader"] for one in found["partitions"]}

    async def elect(self, topics: list[str]) -> int:
        """Make the preferred replicas leaders; return how many partitions changed leader. RuntimeError if refused."""
        partitions = {topic: sorted(await self.leaders(topic)) for topic in topics}
        async with self._admin() as admin:
            answer = await admin._send_to_controller(ElectPreferred(partitions))
        codes = [code for _, results in answer.results for _, code, _ in results]
        if answer.error_code or any(code not in {0, _UNNECESSARY} for code in codes):
            raise RuntimeError(f"Kafka refused the election: {answer}")
        return codes.count(0)

    @asynccontextmanager
    async def _admin(self) -> AsyncIterator[AIOKafkaAdminClient]:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap_servers)
        await admin.start()
        try:
            yield admin
        finally:
            await admin.close()


@asynccontextmanager
async def three_brokers(directory: Path, listener: str | None = None) -> AsyncIterator[KafkaCluster]:
    """Run three brokers; `listener` as in `KafkaCluster`."""
    await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
    cluster = KafkaCluster(directory, listener)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop(START_S)
