"""Faults of the gateway: killed, stopped, frozen, out of file descriptors; and kills of both in turn."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from typing import Final

from loadtest.clients.mqtt_wire import connect_packet
from loadtest.faults.bench import Fault, Plan, Stage
from loadtest.gateway import process_descriptors

SPARE: Final = 100  # of which the gateway keeps 64 for itself
WANTED: Final = 300


async def kill(stage: Stage) -> None:
    """And start it again at once."""
    await stage.gateway.kill()
    await stage.gateway.start()


async def stop(stage: Stage) -> None:
    """By SIGTERM; it drains and closes, and is started again."""
    await stage.gateway.stop()
    await stage.gateway.start()


async def freeze(stage: Stage) -> None:
    """SIGSTOP."""
    os.kill(stage.gateway.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(stage.plan.short)
    finally:
        os.kill(stage.gateway.pid, signal.SIGCONT)


async def no_descriptors(stage: Stage) -> None:
    """It may open a few files more, and strangers want many."""
    pid = stage.gateway.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (process_descriptors(pid) + SPARE, before[1]))
    writers: list[asyncio.StreamWriter] = []
    try:
        for number in range(WANTED):
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(*stage.gateway.address("mqtt"))
                writers.append(writer)
                writer.write(connect_packet(f"{stage.load.numbering.run}-many-{number}"))
                with contextlib.suppress(asyncio.IncompleteReadError, TimeoutError):
                    async with asyncio.timeout(stage.plan.short / WANTED):
                        code = (await reader.readexactly(4))[3]
                        stage.seen["stranger accepted" if not code else f"stranger CONNACK 0x{code:02x}"] += 1
                        continue
            stage.seen["stranger not answered"] += 1
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        for writer in writers:
            writer.close()
    served = asyncio.ensure_future(_served(stage))
    await stage.until(served.done, "a new client is served when there are descriptors again")
    served.cancel()


async def _served(stage: Stage) -> None:
    """Connect again and again until the gateway accepts."""
    begun = stage.load.now
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(*stage.gateway.address("mqtt"))
            writer.write(connect_packet(f"{stage.load.numbering.run}-afterwards"))
            code = (await reader.readexactly(4))[3]
            writer.close()
            if not code:
                break
        stage.seen["refused afterwards"] += 1
        await asyncio.sleep(0.1)
    stage.seen[f"a new client was served after {stage.load.now - begun:.1f} s"] += 1


async def rounds(stage: Stage) -> None:
    """Broker and gateway are killed and started in turn, each when everybody has had answers again."""
    for number in range(stage.plan.rounds):
        hurt = stage.kafka if number % 2 == 0 else stage.gateway
        await hurt.kill()
        await hurt.start()
        if not await stage.until(stage.load.progressed(), f"answers to all after kill {number + 1}"):
            return
    stage.seen["kills"] += stage.plan.rounds


def faults(plan: Plan) -> tuple[Fault, ...]:
    """All of them."""
    return (
        Fault("gateway killed", "SIGKILL to the gateway, started again at once", kill, connected=False),
        Fault("gateway stopped", "SIGTERM to the gateway, started again when it has ended", stop, connected=False),
        Fault("gateway frozen", f"SIGSTOP to the gateway for {plan.short:g} s", freeze, silent=True),
        Fault("no descriptors", f"the gateway may open {SPARE} files more, {WANTED} strangers connect", no_descriptors,
              silent=True),
        Fault("rounds", f"{plan.rounds} kills and starts of broker and gateway in turn", rounds, connected=False),
    )  # fmt: skip
