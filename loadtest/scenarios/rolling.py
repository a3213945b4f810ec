"""Three gateways behind a load balancer, under load of all protocols, are drained and restarted one by one."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import time
from typing import Final, NamedTuple

from aiokafka import AIOKafkaProducer

from loadtest.beside import until
from loadtest.clients.topics import create_topic
from loadtest.engine.command import Scenario
from loadtest.engine.load import Load, Stored, Terms
from loadtest.engine.stand import Stand
from loadtest.engine.steady import PROTOCOLS
from loadtest.faults.balancer import Balancer, balancing
from loadtest.gateway import GatewayProcess
from loadtest.report import Latencies

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


async def run(stand: Stand, plan: Plan) -> None:
    """Restart each gateway in turn under load, and verify."""
    settings = {
        "TRIVIUM_KAFKA__CREATE_TOPICS": "true",
        "TRIVIUM_SECURITY__TRUSTED_PROXIES": '["127.0.0.1/32"]',
        "TRIVIUM_DRAIN__LEAD_S": str(plan.lead),
        "TRIVIUM_DRAIN__RATE_PER_S": str(plan.leaving),
        **{f"TRIVIUM_{protocol.upper()}__PROXY_PROTOCOL": "true" for protocol in PROTOCOLS},
    }
    kafka, round_trips = await stand.kafka(), Latencies()
    async with contextlib.AsyncExitStack() as stack:
        gateways = [
            await stack.enter_async_context(stand.gateway(settings, f"gateway-{number + 1}"))
            for number in range(GATEWAYS)
        ]
        addresses = [{name: one.address(name) for name in (*PROTOCOLS, "management")} for one in gateways]
        balancer = await stack.enter_async_context(balancing(addresses, PROTOCOLS))
        await until(lambda: all(balancer.ready), "every gateway is ready", LIMIT_S)
        terms = Terms(plan.connections, plan.window, plan.rate, plan.size, plan.exactly, plan.tick)
        load = Load(Fleet(balancer, gateways), kafka, terms)
        async with asyncio.TaskGroup() as group:
            await load.start(group)
            await until(load.progressed(), "every sender has an acknowledgement", LIMIT_S)
            probe = group.create_task(_probe(kafka, f"{load.topic('mqtt')}-probe", round_trips))
            began = len(balancer.connects)
            for number, gateway in enumerate(gateways):
                await asyncio.sleep(plan.between)
                before, moved = load.now, len(load.pauses)
                await gateway.stop(LIMIT_S)
                took = load.now - before
                stand.check(gateway.exit_code == 0, f"gateway {number + 1} ended with exit code {gateway.exit_code}")
                await gateway.start()
                await until(lambda number=number: balancer.ready[number], "the gateway is ready again", LIMIT_S)  # type: ignore[misc]
                await until(load.progressed(), "every sender has an acknowledgement again", LIMIT_S)
                stand.say(f"gateway {number + 1}: drained in {took:.1f} s, {len(load.pauses) - moved} clients moved")
            await asyncio.sleep(plan.between)
            probe.cancel()
            late = await load.finish(LIMIT_S)
            stand.problems += [*([late] if late else []), *load.faults()]
        seconds, peak = load.now, _fullest(balancer.connects[began:])
    _report(stand, plan, load, await load.verify(), (round_trips, peak, balancer.refused, seconds))


def _report(stand: Stand, plan: Plan, load: Load, stored: Stored, seen: tuple[Latencies, int, int, float]) -> None:
    round_trips, peak, refused, seconds = seen
    pauses, handshakes = Latencies(), Latencies()
    pauses.extend(load.pauses)
    for sender in load.senders["mqtt"]:
        handshakes.extend(sender.handshakes)
    rate, wanted = stored.total("acknowledged") / seconds, plan.rate * len(PROTOCOLS)
    pause, connack, kafka = pauses.milliseconds(99) / 1000, handshakes.milliseconds(50), round_trips.milliseconds(50)
    stand.row(**{
        "acknowledged": stored.total("acknowledged"), "lost": stored.total("lost"),
        "duplicated": stored.total("duplicated"), "doubled at QoS 2": stored.doubled, "moves": pauses.count,
        "p99 pause s": pause, "longest pause s": pauses.milliseconds(100) / 1000, "connects in a second": peak,
        "refused": refused, "messages/s": rate, "CONNACK elsewhere p50 ms": connack,
        "CONNACK elsewhere p99 ms": handshakes.milliseconds(99), "Kafka's round trip p50 ms": kafka,
        "Kafka's round trip p99 ms": round_trips.milliseconds(99),
    })  # fmt: skip
    stand.problems += stored.problems()
    stand.check(not stored.doubled, f"{stored.doubled} messages at QoS 2 are stored twice")
    stand.check(rate >= plan.enough * wanted, f"{rate:.0f} messages per second, of {wanted:.0f}")
    stand.check(peak <= plan.leaving + 1, f"{peak} connects in a second, more than {plan.leaving:g} and one")
    stand.check(pause <= plan.pause, f"p99 of the pauses is {pause:.2f} s")
    stand.check(connack <= kafka + 1000 * plan.connack, f"CONNACK takes {connack:.1f} ms")
    stand.check(pauses.count > 0, "no client was moved")


async def _probe(bootstrap: str, topic: str, round_trips: Latencies) -> None:
    """Store one record after the other, and record Kafka's latency."""
    await create_topic(bootstrap, topic, 1)
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all") as producer:
        while True:
            began = time.monotonic()
            await producer.send_and_wait(topic, b"x" * 100)
            round_trips.record(time.monotonic() - began)
            await asyncio.sleep(PROBE_S)


def _fullest(times: list[float]) -> int:
    """Return the most times within one second."""
    return max((bisect.bisect_left(times, at + 1.0) - first for first, at in enumerate(times)), default=0)


SCENARIOS = (
    Scenario(
        "rolling",
        "restart three gateways behind a balancer one by one, draining them under load",
        Plan(),
        run,
        lines=False,
    ),
)
