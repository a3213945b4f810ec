"""A publisher in its own process, so that its clock is not delayed by the readers of its messages.

`python -m loadtest.clients.crowd.timed HOST PORT TOPIC RUN MESSAGES SIZE WINDOW RATE` writes a line when it is
connected, waits for a line, publishes at QoS 1, `RATE` per second (0: as fast as the window allows), and writes its
results as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import uvloop

from loadtest.clients.mqtt import Publisher, publishes
from loadtest.clients.pace import Pace
from loadtest.numbering import Numbering
from loadtest.start import start_process

_TICK_S: Final = 0.001
_LINE_BYTES: Final = 64 * 1024 * 1024


class Results(NamedTuple):
    """The results; times are those of `time.perf_counter`, which all processes of a machine share.

    Attributes:
        due_at: when each message was due or, without a rate, written.
        seconds: until the last message was acknowledged.
        puback_ms: percentiles of PUBACK latency, by name.
        refused: number of refused messages.
    """

    due_at: list[float]
    seconds: float
    puback_ms: dict[str, float]
    refused: int


class TimedPublisher:
    """The process of the publisher."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, address: tuple[str, int], topic: str, run: str, load: Sequence[float]) -> TimedPublisher:
        """Start it, and return when it is connected. `load` is messages, size, window, rate."""
        process = await start_process(
            sys.executable, "-m", "loadtest.clients.crowd.timed", *map(str, address), topic, run, *map(str, load),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_LINE_BYTES,
        )  # fmt: skip
        assert process.stdout is not None
        if not await process.stdout.readline():
            raise ConnectionRefusedError("the publisher has ended")
        return cls(process)

    async def publish(self) -> Results:
        """Start publishing, and wait for the results."""
        output, _ = await self._process.communicate(b"\n")
        return Results(*json.loads(output))


async def _publish(arguments: list[str]) -> None:
    host, port, topic, run, *load = arguments
    messages, size, window = (int(float(one)) for one in load[:3])
    rate = float(load[3])
    numbering = Numbering(run)
    payloads = [numbering.payload(0, sequence, size) for sequence in range(messages)]
    publisher = Publisher(f"{topic}-publisher", publishes(topic, payloads), Pace(window, rate or None))
    await publisher.join((host, int(port)))
    print(flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    publisher.start()
    while not publisher.finished.done():
        await asyncio.wait((publisher.finished,), timeout=_TICK_S if rate else None)
        publisher.push()
    await publisher.finished
    seconds = time.perf_counter() - began
    publisher.close()
    print(json.dumps([list(publisher.due_at), seconds, publisher.latencies.summary(), sum(publisher.refused.values())]))


if __name__ == "__main__":
    uvloop.run(_publish(sys.argv[1:]))
