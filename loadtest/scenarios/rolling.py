"""Scenario `rolling`: three gateways behind a load balancer, under load of all protocols, are drained and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaProducer

from loadtest.balancer import Balancer, balancing
from loadtest.clients.topics import create_topic
from loadtest.faults.load import Load, Stored, Terms
from loadtest.gateway import GatewayProcess
from loadtest.scenarios.steady import PROTOCOLS
from loadtest.waiting import until

GATEWAYS: Final = 3
LIMIT_S: Final = 120.0  # timeout of a restart, and of acknowledgements to all senders
PROBE_S: Final = 0.05  # interval of round trips


class Plan(NamedTuple):
    """Size of the load, and how gateways are drained.

    Attributes:
        connections: of each protocol.
        exactly: how many of the MQTT connections use QoS 2.
        rate: messages per second of each protocol.
        window: unacknowledged messages per connection.
        size: payload bytes.
        lead: the gateways' `drain.lead_s`.
        leaving: the gateways' `drain.rate_per_s`.
        between: seconds of load before the first and after each restart.
        pause: limit in seconds for the 99th percentile of clients' pauses.
        connack: limit in seconds, in addition to a round trip to Kafka, of the median CONNACK at the next gateway.
        enough: share of the rate that must be reached.
        tick: interval at which senders get their due messages.
    """

    connections: int = 40
    exactly: int = 10
    rate: float = 3334.0
    window: int = 200
    size: int = 100
    lead: float = 1.0
    leaving: float = 20.0
    between: float = 5.0
    pause: float = 2.0
    connack: float = 0.02
    enough: float = 0.95
    tick: float = 0.05


class Rolled(NamedTuple):
    """The result.

    Attributes:
        stored: the verification against Kafka.
        pauses: of clients that moved: from the last acknowledgement before to the first one after.
        handshakes: from CONNECT to CONNACK at another gateway.
        round_trips: of a record to Kafka and its acknowledgement in the meantime.
        peak: the most connects within one second of the restarts.
        refused: connections that no gateway accepted.
        seconds: of load.
        faults: violations.
    """

    stored: Stored
    pauses: list[float]
    handshakes: list[float]
    round_trips: list[float]
    peak: int
    refused: int
    seconds: float
    faults: list[str]

    @property
    def rate(self) -> float:
        """Acknowledged messages per second."""
        return self.stored.total("acknowledged") / self.seconds

    def row(self) -> dict[str, Any]:
        """Return the columns of a report."""
        total = self.stored.total
        return {
            "acknowledged": total("acknowledged"), "lost": total("lost"), "duplicated": total("duplicated"),
            "doubled at QoS 2": self.stored.doubled, "moves": len(self.pauses), "p99 pause s": at(self.pauses, 0.99),
            "longest pause s": at(self.pauses, 1), "connects in a second": self.peak, "refused": self.refused,
            "messages/s": self.rate, "CONNACK elsewhere p50 ms": 1000 * at(self.handshakes, 0.5),
            "CONNACK elsewhere p99 ms": 1000 * at(self.handshakes, 0.99),
            "Kafka's round trip p50 ms": 1000 * at(self.round_trips, 0.5),
            "Kafka's round trip p99 ms": 1000 * at(self.round_trips, 0.99),
        }  # fmt: skip

    def problems(self, plan: Plan) -> list[str]:
        """Return the violations."""
        found = list(self.faults)
        if self.stored.total("lost"):
            found.append(f"{self.stored.total('lost')} acknowledged messages are lost")
        if self.stored.doubled:
            found.append(f"{self.stored.doubled} messages at QoS 2 are stored twice")
        if self.rate < plan.enough * plan.rate * len(PROTOCOLS):
            found.append(f"{self.rate:.0f} messages per second, of {plan.rate * len(PROTOCOLS):.0f}")
        if self.peak > plan.leaving + 1:
            found.append(f"{self.peak} connects in a second, more than {plan.leaving:g} and one")
        if at(self.pauses, 0.99) > plan.pause:
            found.append(f"p99 of the pauses is {at(self.pauses, 0.99):.2f} s")
        if at(self.handshakes, 0.5) > at(self.round_trips, 0.5) + plan.connack:
            found.append(f"CONNACK takes {1000 * at(self.handshakes, 0.5):.1f} ms")
        if not self.pauses:
            found.append("no client was moved")
        return found


class Fleet(NamedTuple):
    """The gateway of the load: a fleet behind a balancer."""

    balancer: Balancer
    gateways: list[GatewayProcess]

    def address(self, protocol: str) -> tuple[str, int]:
        """Return the balancer's address."""
        return self.balancer.address(protocol)

    @property
    def pid(self) -> int:
        """The process of one gateway."""
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
        self._gateways = [
            GatewayProcess(directory / f"gateway-{number + 1}", bootstrap, environment=environment)
            for number in range(GATEWAYS)
        ]

    async def run(self) -> Rolled:
        """Start everything, restart each gateway, verify."""
        plan = self._plan
        async with contextlib.AsyncExitStack() as stack:
            for gateway in self._gateways:
                stack.push_async_callback(gateway.kill)
            await asyncio.gather(*(gateway.start() for gateway in self._gateways))
            listeners = (*PROTOCOLS, "management")
            addresses = [{name: one.address(name) for name in listeners} for one in self._gateways]
            balancer = await stack.enter_async_context(balancing(addresses, PROTOCOLS))
            await until(lambda: all(balancer.ready), "every gateway is ready", LIMIT_S)
            terms = Terms(plan.connections, plan.window, plan.rate, plan.size, plan.exactly, plan.tick)
            load = Load(Fleet(balancer, self._gateways), self._bootstrap, terms)  # type: ignore[arg-type]
            group = await stack.enter_async_context(asyncio.TaskGroup())
            await load.start(group)
            await until(load.progressed(), "every sender has an acknowledgement", LIMIT_S)
            round_trips: list[float] = []
            probe = group.create_task(_probe(self._bootstrap, f"{load.topic('mqtt')}-probe", round_trips))
            began = len(balancer.connects)
            faults = await self._restart_all(load, balancer)
            probe.cancel()
            late = await load.finish(LIMIT_S)
            faults += [late] if late else []
            seconds, peak = load.now, _fullest(balancer.connects[began:])
            for gateway in self._gateways:
                await gateway.stop(LIMIT_S)
                faults += gateway.bugs()
        handshakes = [taken for sender in load.senders["mqtt"] for taken in sender.handshakes]
        stored = await load.verify()
        return Rolled(
            stored, load.pauses, handshakes, round_trips, peak, balancer.refused, seconds, faults + load.faults()
        )

    async def _restart_all(self, load: Load, balancer: Balancer) -> list[str]:
        faults = []
        for number, gateway in enumerate(self._gateways):
            await asyncio.sleep(self._plan.between)
            before = load.now
            moved = len(load.pauses)
            await gateway.stop(LIMIT_S)
            took = load.now - before
            if gateway.exit_code != 0:
                faults.append(f"gateway {number + 1} ended with exit code {gateway.exit_code}")
            await gateway.start()
            await until(lambda number=number: balancer.ready[number], "the gateway is ready again", LIMIT_S)  # type: ignore[misc]
            await until(load.progressed(), "every sender has an acknowledgement again", LIMIT_S)
            self._say(f"gateway {number + 1}: drained in {took:.1f} s, {len(load.pauses) - moved} clients moved")
        await asyncio.sleep(self._plan.between)
        return faults


def at(times: list[float], share: float) -> float:
    """Return a quantile; 0 if there are no times."""
    return sorted(times)[min(int(len(times) * share), len(times) - 1)] if times else 0.0


async def _probe(bootstrap: str, topic: str, round_trips: list[float]) -> None:
    """Store one record after the other, and record Kafka's latency."""
    await create_topic(bootstrap, topic, 1)
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all") as producer:
        while True:
            began = time.monotonic()
            await producer.send_and_wait(topic, b"x" * 100)
            round_trips.append(time.monotonic() - began)
            await asyncio.sleep(PROBE_S)


def _fullest(times: list[float]) -> int:
    """Return the most times within one second."""
    most = first = 0
    for number, at in enumerate(times):
        while at - times[first] >= 1.0:
            first += 1
        most = max(most, number - first + 1)
    return most
