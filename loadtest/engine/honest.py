"""Honest clients of every protocol beside whatever else happens to a gateway, and what it must return afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Collection
from typing import Final, NamedTuple

from loadtest.beside import until
from loadtest.engine.load import Load, Terms
from loadtest.engine.stand import Stand
from loadtest.gateway import GatewayProcess, process_descriptors, process_resident

TERMS: Final = Terms(connections=2, window=10, rate=50.0, size=64, exactly=1)
LIMIT_S: Final = 60.0
TASKS: Final = "trivium_event_loop_tasks"
STEP_S: Final = 0.2


class Figures(NamedTuple):
    """What a gateway holds."""

    descriptors: int
    tasks: int
    resident: int


@contextlib.asynccontextmanager
async def honest(stand: Stand, gateway: GatewayProcess, terms: Terms = TERMS) -> AsyncIterator[Load]:
    """Run a load during the block, and verify it.

    What was acknowledged must be in Kafka, in order, at QoS 2 once; no client may be refused or lose its connection.
    """
    load = Load(gateway, gateway.kafka, terms)
    async with asyncio.TaskGroup() as group:
        await load.start(group)
        await until(load.progressed(), "the honest clients are answered", LIMIT_S)
        try:
            yield load
        finally:
            late = await load.finish(LIMIT_S)
    stored = await load.verify()
    refusals = {protocol: dict(found) for protocol, found in load.refusals().items() if found}
    stand.problems += [*([late] if late else []), *load.faults(), *stored.problems()]
    stand.check(not stored.doubled, f"{stored.doubled} messages at QoS 2 are stored twice")
    stand.check(not refusals, f"honest clients were refused: {refusals}")
    connects = sum(one.connects for one in load.all) - len(load.all)
    stand.check(not connects, f"honest clients had to connect {connects} times more")


async def settled(
    stand: Stand, gateway: GatewayProcess, before: Figures, pooled: int, back: Collection[str] = ()
) -> Figures:
    """Wait until a gateway has released what others left; what it keeps after `LIMIT_S` is a problem.

    Args:
        stand: takes the problem.
        gateway: is measured.
        before: the figures to return to.
        pooled: descriptors and tasks that it may keep: connections to Kafka.
        back: metrics that must return to 0.
    """
    deadline = time.monotonic() + LIMIT_S
    while True:
        found = await figures(gateway)
        metrics = await gateway.metrics()
        left = {name: metrics[name] for name in back if metrics[name]}
        now = zip(("descriptors", "tasks"), found[:2], before[:2], strict=True)
        left |= {name: count for name, count, was in now if count > was + pooled}
        if not left:
            return found
        if time.monotonic() > deadline:
            stand.problems.append(f"left behind: {left}")
            return found
        await asyncio.sleep(STEP_S)


async def figures(gateway: GatewayProcess) -> Figures:
    """Return what a gateway holds now."""
    metrics = await gateway.metrics()
    return Figures(process_descriptors(gateway.pid), int(metrics[TASKS]), process_resident(gateway.pid))
