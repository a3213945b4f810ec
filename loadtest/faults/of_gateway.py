"""Faults of the gateway: killed, stopped, frozen, out of file descriptors; and kills of broker and gateway in turn."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from typing import Final

from loadtest.beside import beside
from loadtest.clients.mqtt_wire import connect_packet
from loadtest.faults.bench import Stage, fault
from loadtest.gateway import frozen, process_descriptors

SPARE: Final = 100  # the gateway reserves 64 of them
WANTED: Final = 300


@fault("gateway killed", connected=False)
async def kill(stage: Stage) -> None:
    """SIGKILL to the gateway, restarted immediately."""
    await stage.gateway.kill()
    await stage.gateway.start()


@fault("gateway stopped", connected=False)
async def stop(stage: Stage) -> None:
    """SIGTERM to the gateway, which drains it, restarted when it has ended."""
    await stage.gateway.stop()
    await stage.gateway.start()


@fault("gateway frozen", silent=True)
async def freeze(stage: Stage) -> None:
    """SIGSTOP to the gateway for {short:g} s."""
    with frozen(stage.gateway.pid):
        await asyncio.sleep(stage.plan.short)


@fault("no descriptors", silent=True)
async def no_descriptors(stage: Stage) -> None:
    """The gateway may open 100 more files, 300 clients connect."""
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
    async with beside(_served(stage)) as (served,):
        await stage.until(served.done, "a new client is served when descriptors are available")


async def _served(stage: Stage) -> None:
    """Connect repeatedly until the gateway accepts."""
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


@fault("rounds", connected=False)
async def rounds(stage: Stage) -> None:
    """{rounds} kills and starts of broker and gateway in turn, each after all senders got acknowledgements."""
    for number in range(stage.plan.rounds):
        hurt = stage.kafka if number % 2 == 0 else stage.gateway
        await hurt.kill()
        await hurt.start()
        if not await stage.until(stage.load.progressed(), f"answers to all after kill {number + 1}"):
            return
    stage.seen["kills"] += stage.plan.rounds
