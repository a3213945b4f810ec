"""Greedy clients get equal shares, and modest ones what they ask for, under any load.

It has four parts. Modest clients of all protocols, first alone, then beside greedy MQTT clients with or without a
limit. A crowd of modest clients, alone and with one greedy client of each protocol. Equal connections that send without
pause, of each protocol and of all: how equal their acknowledged shares are (Jain's index), also with exhausted budgets.
One busy AMQP link, alone and with many idle ones.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from loadtest.clients.crowd.apart import Apart, Order
from loadtest.clients.pace import Pace
from loadtest.clients.sender import Sender
from loadtest.clients.topics import create_topic
from loadtest.engine.command import Scenario
from loadtest.engine.stand import MIB, Stand
from loadtest.engine.steady import PROTOCOLS, Steady, make_sender, until_finished
from loadtest.gateway import GatewayProcess
from loadtest.report import Latencies

TIGHT: Final = {"TRIVIUM_BUDGET__PROCESS_BYTES": str(16 * MIB), "TRIVIUM_BUDGET__TOPIC_BYTES": str(8 * MIB)}
"""Budgets that ten connections with large messages exhaust: a share is less than a window, and more than a read."""
LIMITED: Final = {"TRIVIUM_LIMITS__RULES": '[{"per": "connection", "in_bytes_per_s": 1000000}]'}
"""A limit that greedy clients reach, and modest ones do not."""
EQUAL: Final = 0.98
"""The least Jain's index of equal connections."""
SLOWER: Final = 3.0
"""How many times longer than alone a modest client may wait with greedy ones, at the 99th percentile."""
WARM_S: Final = 1.0
GREEDY_SIZE: Final = 4_096
GREEDY_BYTES: Final = 250_000_000  # the most bytes per second of one greedy client with the crowd
MOST_BYTES: Final = 60_000_000  # the most bytes per second of all: messages are prepared in advance


class Plan(NamedTuple):
    """Parameters; message bytes are `size` for greedy, `bytes` for equal clients, `large` for tight budgets."""

    greedy: int = 12
    size: int = 65_536
    connections: int = 10
    window: int = 200
    bytes: int = 2_048
    large: int = 4_096
    links: int = 500
    modest: int = 99
    seconds: float = 20.0


Waits = dict[str, Latencies]
"""Latencies of modest clients by protocol."""


def jain(shares: Sequence[float]) -> float:
    """Return Jain's index: 1 if all are equal, 1/n if one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares)) if any(shares) else 0.0


async def _connect(gateway: GatewayProcess, protocol: str, topic: str, payloads: list[bytes], pace: Pace) -> Sender:
    """Connect a sender of a protocol; an HTTP request has as many records as the window."""
    load = Steady(protocol, batch=pace.window, name=f"fair-{secrets.token_hex(4)}")
    one = make_sender(load, topic, payloads, pace)
    await one.join(gateway.address(protocol))
    return one


async def _modest(gateway: GatewayProcess, topic: str, clients: int, rate: float, seconds: float) -> Waits:
    """Let modest clients of all protocols send at their rate, evenly spread; return how long they waited."""
    messages, senders = max(1, int(seconds * rate)), dict[Sender, str]()
    for number in range(clients):
        protocol, pace = PROTOCOLS[number % len(PROTOCOLS)], Pace(1, rate, phase=1 - number / clients)
        senders[await _connect(gateway, protocol, topic, [b"x"] * messages, pace)] = protocol

    for sender in senders:
        sender.pace.start()
    for error in await until_finished(senders, paced=True):
        if error is not None:
            raise error
    waits = {protocol: Latencies() for protocol in PROTOCOLS}
    for sender, protocol in senders.items():
        waits[protocol].merge(sender.latencies)
        if sender.refused:
            raise RuntimeError(f"a modest client of {protocol} was refused: {sender.refused}")
        sender.close()
    return waits


def _compare(stand: Stand, name: str, waits: Waits, alone: Waits | None, **more: Any) -> None:
    """Add a row, and problems where modest clients waited too long."""
    columns = {f"{protocol} p{at}": one.milliseconds(at) for protocol, one in waits.items() for at in (50, 99)}
    stand.row(**{"": name} | columns | more)
    for protocol, one in (alone or {}).items():
        before, after = one.milliseconds(99), waits[protocol].milliseconds(99)
        stand.check(after <= SLOWER * before, f"{name}: {protocol}: p99 of {after:.0f} ms, {before:.0f} ms alone")


async def _beside_greedy(stand: Stand, gateway: GatewayProcess, plan: Plan, kind: str) -> None:
    """Measure modest clients alone, and with greedy ones that send to another topic."""
    run = secrets.token_hex(3)
    quiet, flooded = f"fair-quiet-{run}", f"fair-flood-{run}"
    for topic in (quiet, flooded):
        await create_topic(gateway.kafka, topic)
    await _modest(gateway, quiet, 3, 10.0, WARM_S)
    alone = await _modest(gateway, quiet, 3, 10.0, plan.seconds)
    _compare(stand, f"{kind}: alone", alone, None)
    flood = await Apart.start(gateway.address("mqtt"), Order(flooded, size=plan.size, greedy=plan.greedy))
    try:
        await asyncio.sleep(WARM_S)
        waits = await _modest(gateway, quiet, 3, 10.0, plan.seconds)
    finally:
        await flood.stop()
    _compare(stand, f"{kind}: {plan.greedy} greedy clients", waits, alone)


async def _crowd(stand: Stand, gateway: GatewayProcess, plan: Plan) -> None:
    """Measure a crowd with a message per second each: alone, and with one greedy client of each protocol."""
    topic = f"fair-{secrets.token_hex(4)}"
    await create_topic(gateway.kafka, topic)
    await _modest(gateway, topic, plan.modest, 1.0, WARM_S)
    alone = await _modest(gateway, topic, plan.modest, 1.0, plan.seconds)
    _compare(stand, f"{plan.modest} modest clients: alone", alone, None)
    for protocol in PROTOCOLS:
        total = int((plan.seconds + 3 * WARM_S) * GREEDY_BYTES / GREEDY_SIZE)
        greedy = await _connect(gateway, protocol, topic, [b"x" * GREEDY_SIZE] * total, Pace(plan.window, None))
        greedy.start()
        await asyncio.sleep(WARM_S)
        before, began = greedy.answered, time.monotonic()
        waits = await _modest(gateway, topic, plan.modest, 1.0, plan.seconds)
        rate = (greedy.answered - before) * GREEDY_SIZE / (time.monotonic() - began)
        stand.check(rate > 0 and not greedy.finished.done(), f"the greedy client of {protocol} did not always send")
        greedy.abandon()
        name = f"{plan.modest} modest clients: one greedy client, {protocol}"
        _compare(stand, name, waits, alone, **{"greedy MiB/s": round(rate / MIB)})


async def _equal(gateway: GatewayProcess, protocols: Sequence[str], plan: Plan) -> list[int]:
    """Return the acknowledged messages of connections that keep equal windows full to one partition."""
    topic = f"fair-{secrets.token_hex(4)}"
    await create_topic(gateway.kafka, topic, 1)
    total = int((plan.seconds + WARM_S) * MOST_BYTES / plan.bytes / plan.connections)
    senders = [
        await _connect(
            gateway, protocols[number % len(protocols)], topic, [b"x" * plan.bytes] * total, Pace(plan.window, None)
        )
        for number in range(plan.connections)
    ]
    for sender in senders:
        sender.start()
    await asyncio.sleep(WARM_S)
    before = [sender.answered for sender in senders]
    await asyncio.sleep(plan.seconds)
    found = [sender.answered - count for sender, count in zip(senders, before, strict=True)]
    for sender in senders:
        sender.abandon()
    return found


KINDS: Final[Mapping[str, tuple[Mapping[str, str], tuple[str, ...]]]] = {
    "mqtt": ({}, ("mqtt",)),
    "amqp": ({}, ("amqp",)),
    "http": ({}, ("http",)),
    "mixed": ({}, PROTOCOLS),
    "tight, mqtt": (TIGHT, ("mqtt",)),
    "tight, amqp": (TIGHT, ("amqp",)),
    "tight, mixed": (TIGHT, ("mqtt", "amqp")),
}
"""Budgets, and the protocols of the equal connections. HTTP requests are admitted as a whole, so they cannot be equal
with a budget of only a few requests."""


async def _idle_links(stand: Stand, gateway: GatewayProcess, plan: Plan) -> None:
    for links in (0, plan.links):
        topic = f"fair-idle-{secrets.token_hex(4)}"
        await create_topic(gateway.kafka, topic, 1)
        others = [await _connect(gateway, "amqp", topic, [], Pace(1, None)) for _ in range(links)]
        (count,) = await _equal(gateway, ["amqp"], plan._replace(connections=1))
        stand.row(**{"": f"one AMQP link beside {links} idle ones", "per second": count / plan.seconds})
        for one in others:
            one.abandon()


async def run(stand: Stand, plan: Plan) -> None:
    """Run the wanted parts, each with its own gateway."""
    for kind, rules in (("beside", {}), ("beside, limited", LIMITED)):
        if stand.wants(kind):
            async with stand.gateway(rules, kind) as gateway:
                await _beside_greedy(stand, gateway, plan, kind)
    if stand.wants("crowd"):
        async with stand.gateway(name="crowd") as gateway:
            await _crowd(stand, gateway, plan)
    for kind, (settings, protocols) in KINDS.items():
        if stand.wants(f"equal {kind}"):
            async with stand.gateway(settings, kind) as gateway:
                counts = await _equal(gateway, protocols, plan._replace(bytes=plan.large) if settings else plan)
            index = jain(counts)
            stand.row(**{"": f"equal {kind}", "per second": sum(counts) / plan.seconds, "Jain's index": index})
            stand.check(index >= EQUAL, f"{kind}: Jain's index is {index:.3f} of {counts}")
    if stand.wants("idle"):
        async with stand.gateway(TIGHT, "idle") as gateway:
            await _idle_links(stand, gateway, plan)


SCENARIOS = (
    Scenario(
        "fair", "check that greedy clients get equal shares and modest ones what they ask for", Plan(), run,
        "parts whose name contains this: beside, crowd, equal mqtt, equal tight, mixed, idle and so on",
    ),
)  # fmt: skip
