"""A publisher in a process of its own: its clock is not held up by those who read what it sends.

`python -m loadtest.clients.timed HOST PORT TOPIC RUN MESSAGES SIZE WINDOW RATE` says when it is connected, waits for a
line, publishes at QoS 1, `RATE` a second (0: as the window allows), and writes what it found as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

import uvloop

from loadtest.clients.mqtt import Publisher, publishes
from loadtest.clients.pace import Pace
from loadtest.numbering import Numbering
from loadtest.start import start_process

_TICK_S: Final = 0.001
_LINE_BYTES: Final = 64 * 1024 * 1024


class Told(NamedTuple):
    """What it found; times are those of `time.perf_counter`, which is one for all processes of a machine.

    Attributes:
        due_at: when each message was due by the rate; without one, when it was written.
        seconds: until the last was answered.
        puback_ms: percentiles of what PUBACKs took, by name.
        refused: how many were answered with a failure.
    """

    due_at: list[float]
    seconds: float
    puback_ms: dict[str, float]
    refused: int


class TimedPublisher:
    """The process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, address: tuple[str, int], topic: str, run: str, load: Sequence[float]) -> TimedPublisher:
        """Start it; it is connected. `load`: messages, size, window, rate."""
        process = await start_process(
            sys.executable, "-m", "loadtest.clients.timed", *map(str, address), topic, run, *map(str, load),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_LINE_BYTES,
        )  # fmt: skip
        assert process.stdout is not None
        if not await process.stdout.readline():
            raise ConnectionRefusedError("the publisher has ended")
        return cls(process)

    async def publish(self) -> Told:
        """Let it begin, and wait for its end."""
        told, _ = await self._process.communicate(b"\n")
        return Told(*json.loads(told))


async def _publish(arguments: list[str]) -> None:
    host, port, topic, run, *load = arguments
    messages, size, window = (int(float(one)) for one in load[:3])
    rate = float(load[3])
    numbering = Numbering(run)
    payloads = [numbering.payload(0, sequence, size) for sequence in range(messages)]
    pace = Pace(window, rate or None)
    make = partial(Publisher, f"{topic}-publisher", publishes(topic, payloads), pace, lambda first, behind: None)
    loop = asyncio.get_running_loop()
    _, publisher = await loop.create_connection(make, host, int(port))
    await publisher.connected
    print(flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    pace.start()
    publisher.push()
    while not publisher.finished.done():
        await asyncio.wait((publisher.finished,), timeout=_TICK_S if rate else None)
        publisher.push()
    await publisher.finished
    seconds = time.perf_counter() - began
    publisher.close()
    print(json.dumps([list(publisher.due_at), seconds, publisher.latencies.summary(), sum(publisher.refused.values())]))


if __name__ == "__main__":
    uvloop.run(_publish(sys.argv[1:]))
