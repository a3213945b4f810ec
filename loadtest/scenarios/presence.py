"""Scenario `presence`: clients connect and disconnect while gateways are killed; the topic must be right in the end.

Each device knows its true state: the connection that got a CONNACK and was not closed. The topic must finally have that
state for every device: online from this very socket, or offline.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from aiokafka import AIOKafkaConsumer

from loadtest.clients.joining import join
from loadtest.clients.mqtt_wire import Splitter, connect_packet
from loadtest.gateway import GatewayProcess, frozen
from loadtest.scenarios.rolling import at

ANSWER_S: Final = 15.0  # timeout of CONNACK
STEP_S: Final = 0.2
EXPIRY_S: Final = 600
KEPT: Final = 4  # every fourth device has a persistent session
DISCONNECT: Final = b"\xe0\x00"


class Plan(NamedTuple):
    """Parameters.

    Attributes:
        gateways: processes on one Kafka.
        devices: clients, each with its own id.
        connects: connections in total; about as many are closed.
        rate: connects per second.
        kills: of gateways, by SIGKILL.
        dead: seconds for which every second killed gateway stays down; others take over after 15.
        freezes: of gateways, by SIGSTOP, each before a kill of another one.
        frozen: seconds of a freeze; after 15 the gateway counts as dead.
        settle: seconds within which the topic must be right in the end.
    """

    gateways: int = 3
    devices: int = 1000
    connects: int = 10_000
    rate: float = 60.0
    kills: int = 10
    dead: float = 20.0
    freezes: int = 2
    frozen: float = 17.0
    settle: float = 90.0


class Socket(asyncio.Protocol):
    """One connection of a device.

    Attributes:
        address: of the client's end.
        server: the gateway's address.
        answered: CONNACK's reason code; None if the connection ended before.
        code: reason code of the server's DISCONNECT; None without one.
        closed_at: when it ended; None while it is open.
    """

    def __init__(self, greeting: bytes, server: tuple[str, int]) -> None:
        self.address = ""
        self.server = server
        self.answered: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.code: int | None = None
        self.closed_at: float | None = None
        self._greeting = greeting
        self._splitter = Splitter()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send CONNECT."""
        self._transport = cast("asyncio.Transport", transport)
        host, port = transport.get_extra_info("sockname")[:2]
        self.address = f"{host}:{port}"
        self._transport.write(self._greeting)

    def data_received(self, data: bytes) -> None:
        """Handle CONNACK and DISCONNECT."""
        for first, body in self._splitter.feed(data):
            if first == 0x20 and not self.answered.done():
                self.answered.set_result(body[1])
            elif first == 0xE0:
                self.code = body[0] if body else 0

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end of the connection."""
        self.closed_at = time.monotonic()
        if not self.answered.done():
            self.answered.set_result(None)

    @property
    def is_open(self) -> bool:
        """Whether the client was accepted and the connection is open."""
        return self.closed_at is None and self.answered.done() and self.answered.result() == 0

    def end(self, *, properly: bool) -> None:
        """Close with DISCONNECT, or abort."""
        if self._transport is not None and self.closed_at is None:
            if properly:
                self._transport.write(DISCONNECT)
                self._transport.close()
            else:
                self._transport.abort()
            self.closed_at = time.monotonic()


class Device:
    """A client id and its connections; at most one is open in the end."""

    def __init__(self, client_id: str, *, kept: bool) -> None:
        self.client_id = client_id
        self.sockets: list[Socket] = []
        self.moves: list[tuple[Socket, float]] = []  # connections replaced by one at another gateway, and when
        self.busy = False
        self._greeting = connect_packet(
            client_id, clean_start=not kept, session_expiry_s=EXPIRY_S if kept else 0, keep_alive_s=0
        )

    @property
    def open(self) -> list[Socket]:
        """The open connections."""
        self.sockets = [one for one in self.sockets if one.closed_at is None]
        return [one for one in self.sockets if one.is_open]

    async def connect(self, address: tuple[str, int]) -> bool:
        """Connect, even if there is a connection; False if the gateway is down or refuses."""
        former = self.open
        socket = Socket(self._greeting, address)
        try:
            async with asyncio.timeout(ANSWER_S):
                accepted = await (await join(socket, address)).answered == 0
        except (OSError, TimeoutError):
            accepted = False
        if not accepted:
            socket.end(properly=False)
            return False
        self.sockets.append(socket)
        self.moves += [(one, time.monotonic()) for one in former if one.server != socket.server]
        return True


class Shown(NamedTuple):
    """The result; `taken` is seconds from CONNACK to the end of the older connection at another gateway."""

    connects: int
    ends: int
    refused: int
    killed: int
    records: int
    stale: int
    online: int
    taken: list[float]
    settled: float
    problems: list[str]

    def row(self) -> dict[str, Any]:
        """Return the columns of a report."""
        return {
            "connects": self.connects, "ends": self.ends, "refused": self.refused, "kills": self.killed,
            "records": self.records, "older behind newer": self.stale, "online at the end": self.online,
            "taken over elsewhere": len(self.taken), "0x8E after p50 ms": 1000 * at(self.taken, 0.5),
            "0x8E after p99 ms": 1000 * at(self.taken, 0.99), "right after s": self.settled,
            "wrong": len(self.problems),
        }  # fmt: skip


class Topic:
    """The presence topic as read by a plain consumer that compares epochs."""

    def __init__(self, bootstrap: str, name: str) -> None:
        self.right: dict[str, dict[str, Any]] = {}
        self.last: dict[str, dict[str, Any]] = {}
        self.records = self.stale = 0
        self._bootstrap = bootstrap
        self._name = name

    async def follow(self) -> None:
        """Read forever."""
        options = {"bootstrap_servers": self._bootstrap, "auto_offset_reset": "earliest"}
        async with AIOKafkaConsumer(self._name, **options) as consumer:
            async for record in consumer:
                self._take(record.key.decode(), json.loads(record.value or b"null"))

    def _take(self, key: str, state: dict[str, Any] | None) -> None:
        self.records += 1
        if state is None:
            self.right.pop(key, None)
            self.last.pop(key, None)
            return
        self.last[key] = state
        if key in self.right and state["epoch"] < self.right[key]["epoch"]:
            self.stale += 1
        else:
            self.right[key] = state


class Presence:
    """One run."""

    def __init__(self, directory: Path, bootstrap: str, plan: Plan, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self._run = uuid.uuid4().hex[:8]
        self._topic = f"presence-{self._run}"
        self._bootstrap = bootstrap
        self._gateways: list[GatewayProcess] = []
        for number in range(plan.gateways):
            environment = {"TRIVIUM_PRESENCE__TOPIC": self._topic}
            place = directory / f"gateway-{number + 1}"
            self._gateways.append(GatewayProcess(place, bootstrap, environment=environment))
        self._devices = [Device(f"{self._run}-{number}", kept=number % KEPT == 0) for number in range(plan.devices)]
        self._alive = set(range(plan.gateways))
        self._connects = self._ends = self._refused = self._killed = 0

    async def run(self) -> Shown:
        """Start, change clients while gateways are killed, and verify."""
        async with contextlib.AsyncExitStack() as stack:
            for gateway in self._gateways:
                stack.push_async_callback(gateway.kill)
            await asyncio.gather(*(gateway.start() for gateway in self._gateways))
            topic = Topic(self._bootstrap, self._topic)
            group = await stack.enter_async_context(asyncio.TaskGroup())
            follower = group.create_task(topic.follow())
            changes = group.create_task(self._churn(group))
            await self._kill_all(changes)
            await changes
            while any(device.busy for device in self._devices):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(STEP_S)
            settled, problems = await self._check(topic)
            follower.cancel()
            online = sum(1 for device in self._devices if device.open)
            for device in self._devices:
                for socket in device.sockets:
                    socket.end(properly=False)
            for number in self._alive:
                await self._gateways[number].stop()
                problems += self._gateways[number].bugs()
        taken = [
            one.closed_at - moved for device in self._devices for one, moved in device.moves
            if one.closed_at is not None and one.code == 0x8E and one.closed_at > moved
        ]  # fmt: skip
        return Shown(
            self._connects, self._ends, self._refused, self._killed, topic.records, topic.stale, online, taken, settled,
            problems,
        )  # fmt: skip

    async def _churn(self, group: asyncio.TaskGroup) -> None:
        """Run the plan's connects, spread over time; each device makes one change at a time."""
        began, begun = time.monotonic(), 0
        while self._connects < self._plan.connects:
            due = int((time.monotonic() - began) * self._plan.rate) - begun
            idle = [device for device in self._devices if not device.busy]
            for device in random.sample(idle, min(len(idle), max(0, due))):
                device.busy = True
                begun += 1
                group.create_task(self._change(device))
            await asyncio.sleep(0.02)

    async def _change(self, device: Device) -> None:
        """Disconnect with DISCONNECT, abort, or neither; then usually connect to a running gateway."""
        try:
            way = random.random()
            if device.open and way < 0.6:
                self._ends += 1
                device.open[-1].end(properly=way < 0.4)
            if way > 0.1:
                gateway = random.choice(sorted(self._alive))
                if await device.connect(self._gateways[gateway].address("mqtt")):
                    self._connects += 1
                else:
                    self._refused += 1
        finally:
            device.busy = False

    async def _kill_all(self, changes: asyncio.Task[None]) -> None:
        """Kill one gateway after the other while clients change; the last one stays down if others run."""
        plan = self._plan
        for number in range(plan.kills):
            due = plan.connects * (number + 1) / (plan.kills + 1)
            while self._connects < due and not changes.done():  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(STEP_S)
            which = number % plan.gateways
            if number < plan.freezes:
                await self._freeze((which + 1) % plan.gateways)
            gateway = self._gateways[which]
            self._alive.discard(which)
            await gateway.kill()
            self._killed += 1
            last = number == plan.kills - 1 and plan.dead > 0
            if last:
                self._say(f"gateway {which + 1} is killed and stays down")
                break
            if number % 2 and plan.dead:
                await asyncio.wait([changes], timeout=plan.dead)
            await gateway.start()
            self._alive.add(which)
            self._say(f"gateway {which + 1} was killed; {self._connects} connects, {self._refused} refused")

    async def _freeze(self, which: int) -> None:
        """Stop a gateway for a while; its clients do not notice unless they send."""
        gateway = self._gateways[which]
        self._alive.discard(which)
        with frozen(gateway.pid):
            await asyncio.sleep(self._plan.frozen)
        self._alive.add(which)
        self._say(f"gateway {which + 1} was frozen for {self._plan.frozen:g} s")

    async def _check(self, topic: Topic) -> tuple[float, list[str]]:
        """Wait until the topic is right; return the seconds it took, and what is wrong."""
        began = time.monotonic()
        while (wrong := self._wrong(topic)) and time.monotonic() - began < self._plan.settle:  # noqa: ASYNC110
            await asyncio.sleep(STEP_S)
        return time.monotonic() - began, wrong

    def _wrong(self, topic: Topic) -> list[str]:
        problems = []
        for device in self._devices:
            key, open_now = f"mqtt/{device.client_id}", device.open
            if len(open_now) > 1:
                problems.append(f"{key} has {len(open_now)} connections")
            expected = ("online", open_now[-1].address) if open_now else ("offline", None)
            for whose, states in (("the newest epoch", topic.right), ("the last record", topic.last)):
                state = states.get(key, {"state": "offline"})
                said = state["state"], state["address"] if state["state"] == "online" else None
                if said != expected:
                    problems.append(f"{key} is {expected}, {whose} says {state}")
        return problems
