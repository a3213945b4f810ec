"""Clients connect and disconnect while gateways are killed; the topic must be right in the end.

Each device knows its true state: the connection that got a CONNACK and was not closed. The topic must finally have that
state for every device: online from this very socket, or offline.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from typing import Final, NamedTuple

from loadtest.clients.crowd.devices import Device, PresenceTopic
from loadtest.engine.command import Scenario
from loadtest.engine.stand import Stand
from loadtest.gateway import GatewayProcess, frozen
from loadtest.report import Latencies

STEP_S: Final = 0.2
KEPT: Final = 4  # every fourth device has a persistent session


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


class Presence:
    """One run.

    Attributes:
        devices: all clients.
        connects: accepted connections, `ends` those that were closed, and `refused` ones.
        killed: gateways.
    """

    def __init__(self, stand: Stand, gateways: list[GatewayProcess], plan: Plan, run: str) -> None:
        self.devices = [Device(f"{run}-{number}", kept=number % KEPT == 0) for number in range(plan.devices)]
        self.connects = self.ends = self.refused = self.killed = 0
        self._stand, self._gateways, self._plan = stand, gateways, plan
        self._alive = set(range(plan.gateways))

    async def churn(self, group: asyncio.TaskGroup) -> None:
        """Run the plan's connects, spread over time; each device makes one change at a time."""
        began, begun = time.monotonic(), 0
        while self.connects < self._plan.connects:
            due = int((time.monotonic() - began) * self._plan.rate) - begun
            idle = [device for device in self.devices if not device.busy]
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
                self.ends += 1
                device.open[-1].end(properly=way < 0.4)
            if way > 0.1:
                gateway = random.choice(sorted(self._alive))
                if await device.connect(self._gateways[gateway].address("mqtt")):
                    self.connects += 1
                else:
                    self.refused += 1
        finally:
            device.busy = False

    async def kill_all(self, changes: asyncio.Task[None]) -> None:
        """Kill one gateway after the other while clients change; the last one stays down if others run."""
        plan = self._plan
        for number in range(plan.kills):
            due = plan.connects * (number + 1) / (plan.kills + 1)
            while self.connects < due and not changes.done():  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(STEP_S)
            which = number % plan.gateways
            if number < plan.freezes:
                await self._freeze((which + 1) % plan.gateways)
            self._alive.discard(which)
            await self._gateways[which].kill()
            self.killed += 1
            self._stand.say(f"gateway {which + 1} was killed; {self.connects} connects, {self.refused} refused")
            if number == plan.kills - 1 and plan.dead > 0:
                break
            if number % 2 and plan.dead:
                await asyncio.wait([changes], timeout=plan.dead)
            await self._gateways[which].start()
            self._alive.add(which)

    async def _freeze(self, which: int) -> None:
        """Stop a gateway for a while; its clients do not notice unless they send."""
        self._alive.discard(which)
        with frozen(self._gateways[which].pid):
            await asyncio.sleep(self._plan.frozen)
        self._alive.add(which)

    def wrong(self, topic: PresenceTopic) -> list[str]:
        """Return where the topic and the devices disagree."""
        problems = []
        for device in self.devices:
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


async def run(stand: Stand, plan: Plan) -> None:
    """Start, change clients while gateways are killed, and verify."""
    name = uuid.uuid4().hex[:8]
    settings = {"TRIVIUM_PRESENCE__TOPIC": f"presence-{name}"}
    async with contextlib.AsyncExitStack() as stack:
        gateways = [
            await stack.enter_async_context(stand.gateway(settings, f"gateway-{number + 1}"))
            for number in range(plan.gateways)
        ]
        topic, presence = (
            PresenceTopic(await stand.kafka(), settings["TRIVIUM_PRESENCE__TOPIC"]),
            Presence(stand, gateways, plan, name),
        )
        async with asyncio.TaskGroup() as group:
            follower = group.create_task(topic.follow())
            changes = group.create_task(presence.churn(group))
            await presence.kill_all(changes)
            await changes
            while any(device.busy for device in presence.devices):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(STEP_S)
            began = time.monotonic()
            while (wrong := presence.wrong(topic)) and time.monotonic() - began < plan.settle:  # noqa: ASYNC110
                await asyncio.sleep(STEP_S)
            settled = time.monotonic() - began
            follower.cancel()
        online = sum(1 for device in presence.devices if device.open)
        for device in presence.devices:
            for socket in device.sockets:
                socket.end(properly=False)
    taken = Latencies()
    for device in presence.devices:
        for one, moved in device.moves:
            if one.closed_at is not None and one.code == 0x8E and one.closed_at > moved:
                taken.record(one.closed_at - moved)
    stand.problems += wrong
    stand.row(**{
        "connects": presence.connects, "ends": presence.ends, "refused": presence.refused, "kills": presence.killed,
        "records": topic.records, "older behind newer": topic.stale, "online at the end": online,
        "taken over elsewhere": taken.count, "0x8E after p50 ms": taken.milliseconds(50),
        "0x8E after p99 ms": taken.milliseconds(99), "right after s": settled, "wrong": len(wrong),
    })  # fmt: skip


SCENARIOS = (
    Scenario(
        "presence",
        "connect clients while gateways are killed; the presence topic must be right",
        Plan(),
        run,
        lines=False,
    ),
)
