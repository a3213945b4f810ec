"""Scenario `rolling`: three gateways behind a balancer, under load by all protocols, each drained and started again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from loadtest.balancer import Balancer
from loadtest.faults.load import Load, Stored, Terms
from loadtest.gateway import GatewayProcess
from loadtest.scenarios.steady import PROTOCOLS
from loadtest.verify import read_topic

GATEWAYS: Final = 3
STEP_S: Final = 0.05
LIMIT_S: Final = 120.0  # for what must come: a restart, answers to all
JITTER: Final = 1.2
"""Of the rate, in the fullest second: clients connect again a little later than they were sent away, not all alike."""


class Plan(NamedTuple):
    """How much load, and how gateways are left.

    Attributes:
        connections: of each protocol; by MQTT the last one is at QoS 2.
        rate: messages a second of each protocol.
        window: messages unanswered at a connection.
        size: payload bytes.
        lead: seconds.
        leaving: connections a second.
        between: seconds of load before the first and after each restart.
        pause: seconds, for the 99th percentile of clients' pauses.
    """

    connections: int = 100
    rate: float = 3334.0
    window: int = 100
    size: int = 100
    lead: float = 1.0
    leaving: float = 50.0
    between: float = 5.0
    pause: float = 2.0


class Rolled(NamedTuple):
    """What has come of it.

    Attributes:
        stored: held against Kafka.
        doubled: messages at QoS 2 that are stored twice.
        pauses: of clients between two connections, seconds, in order.
        peak: connects in the fullest second of the restarts.
        refused: connections that no gateway took.
        faults: what must not be.
    """

    stored: Stored
    doubled: int
    pauses: list[float]
    peak: int
    refused: int
    seconds: float
    faults: list[str]

    @property
    def p99(self) -> float:
        """Of the pauses."""
        return self.pauses[len(self.pauses) * 99 // 100] if self.pauses else 0.0

    def row(self) -> dict[str, Any]:
        """As columns of a report."""
        total = self.stored.total
        return {
            "acknowledged": total("acknowledged"), "lost": total("lost"), "duplicated": total("duplicated"),
            "doubled at QoS 2": self.doubled, "moves": len(self.pauses), "p99 pause s": self.p99,
            "longest pause s": self.pauses[-1] if self.pauses else 0.0, "connects in a second": self.peak,
            "refused": self.refused, "messages/s": total("acknowledged") / self.seconds,
        }  # fmt: skip

    def problems(self, plan: Plan) -> list[str]:
        """What was not as promised."""
        found = list(self.faults)
        if self.stored.total("lost"):
            found.append(f"{self.stored.total('lost')} acknowledged messages are lost")
        if self.doubled:
            found.append(f"{self.doubled} messages at QoS 2 are stored twice")
        if self.peak > JITTER * plan.leaving + 1:
            found.append(f"{self.peak} connects in a second, and {plan.leaving:g} may leave in one")
        if self.p99 > plan.pause:
            found.append(f"p99 of the pauses is {self.p99:.2f} s")
        if not self.pauses:
            found.append("nobody was sent away")
        return found


class Fleet(NamedTuple):
    """What the load takes for its gateway."""

    balancer: Balancer
    gateways: list[GatewayProcess]

    def address(self, protocol: str) -> tuple[str, int]:
        """The balancer's."""
        return self.balancer.address(protocol)

    @property
    def pid(self) -> int:
        """Of one."""
        return self.gateways[0].pid


class Rolling:
    """One run."""

    def __init__(self, directory: Path, bootstrap: str, plan: Plan, say: Callable[[str], None]) -> None:
        environment = {
            "TRIVIUM_KAFKA__CREATE_TOPICS": "true",
            "TRIVIUM_SECURITY__TRUSTED_PROXIES": '["127.0.0.1/32"]',
            "TRIVIUM_DRAIN__LEAD_S": str(plan.lead),
            "TRIVIUM_DRAIN__RATE_PER_S": str(plan.leaving),
            **{f"TRIVIUM_{protocol.upper()}__PROXY_PROTOCOL": "true" for protocol in PROTOCOLS},
        }
        self._plan = plan
        self._say = say
        self._bootstrap = bootstrap
        self._gateways: list[GatewayProcess] = []
        for number in range(GATEWAYS):
            place = directory / f"gateway-{number + 1}"
            place.mkdir(parents=True, exist_ok=True)
            self._gateways.append(GatewayProcess(place, bootstrap, environment=environment))

    async def run(self) -> Rolled:
        """Start everything, restart each gateway, judge."""
        plan = self._plan
        async with contextlib.AsyncExitStack() as stack:
            for gateway in self._gateways:
                stack.push_async_callback(gateway.kill)
            await asyncio.gather(*(gateway.start() for gateway in self._gateways))
            listeners = (*PROTOCOLS, "management")
            balancer = Balancer([{name: one.address(name) for name in listeners} for one in self._gateways], PROTOCOLS)
            await balancer.start()
            stack.push_async_callback(balancer.stop)
            await _until(lambda: all(balancer.ready), "every gateway is ready")
            terms = Terms(plan.connections, plan.window, plan.rate, plan.size)
            load = Load(Fleet(balancer, self._gateways), self._bootstrap, terms)  # type: ignore[arg-type]
            await load.start()
            await _until(load.progressed(), "everybody has an answer")
            began = len(balancer.connects)
            faults = await self._restart_all(load, balancer)
            late = await load.finish(LIMIT_S)
            faults += [late] if late else []
            peak = _fullest(balancer.connects[began:])
            for gateway in self._gateways:
                await gateway.stop(LIMIT_S)
                faults += gateway.bugs()
        arrivals = await read_topic(self._bootstrap, load.topic("mqtt"), load.numbering)
        doubled = sum(n > 1 for one, n in arrivals.counts.items() if one.sender == plan.connections - 1)
        pauses = sorted(pause for sender in load.all for pause in sender.pauses)
        stored = await load.judge()
        return Rolled(stored, doubled, pauses, peak, balancer.refused, load.now, faults + load.faults())

    async def _restart_all(self, load: Load, balancer: Balancer) -> list[str]:
        faults = []
        for number, gateway in enumerate(self._gateways):
            await asyncio.sleep(self._plan.between)
            before = load.now
            moved = sum(len(sender.pauses) for sender in load.all)
            await gateway.stop(LIMIT_S)
            took = load.now - before
            if gateway.exit_code != 0:
                faults.append(f"gateway {number + 1} has ended with {gateway.exit_code}")
            await gateway.start()
            await _until(lambda number=number: balancer.ready[number], "the gateway is ready again")  # type: ignore[misc]
            await _until(load.progressed(), "everybody has an answer again")
            self._say(
                f"gateway {number + 1}: drained in {took:.1f} s,"
                f" {sum(len(sender.pauses) for sender in load.all) - moved} clients moved"
            )
        await asyncio.sleep(self._plan.between)
        return faults


def _fullest(times: list[float]) -> int:
    """The most of them within one second."""
    most = first = 0
    for number, at in enumerate(times):
        while at - times[first] >= 1.0:
            first += 1
        most = max(most, number - first + 1)
    return most


async def _until(condition: Callable[[], bool], what: str) -> None:
    """TimeoutError names what has not come."""
    try:
        async with asyncio.timeout(LIMIT_S):
            while not condition():  # noqa: ASYNC110 - nobody announces it
                await asyncio.sleep(STEP_S)
    except TimeoutError:
        raise TimeoutError(f"not within {LIMIT_S:g} s: {what}") from None
