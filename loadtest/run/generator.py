"""One generator process of a load test: `python -m loadtest.run.generator`, started by `loadtest.run.pool`.

It reads orders from its standard input, one JSON object per line, and answers on its standard output. The first order
describes its connections, later ones the steps. It ends when its standard input closes, also if its parent is killed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import heapq
import json
import ssl
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import uvloop
from hdrh.histogram import HdrHistogram

from loadtest.clients import amqp, amqp_receiver, mqtt, rest
from loadtest.clients.connection import join
from loadtest.clients.crowd.events import EventStream
from loadtest.clients.pace import Pace
from loadtest.clients.sender import Sender
from loadtest.numbering import Numbering
from loadtest.report import Latencies, histogram
from loadtest.run.scenario import Scenario
from loadtest.run.shapes import DUE, Packets, Requests, Shape

AT_ONCE: Final = 50  # connections opened at the same time
AGAIN_S: Final = 0.005  # before a blocked sender is checked again
TICK_S: Final = 0.001
ENDLESS: Final = 1 << 60


class Runs:
    """Message numbers as ranges, `[first, end]` each with exclusive end."""

    def __init__(self) -> None:
        self.runs: list[list[int]] = []

    def add(self, first: int, behind: int) -> None:
        """Add the numbers from `first` to before `behind`."""
        if self.runs and self.runs[-1][1] == first:
            self.runs[-1][1] = behind
        else:
            self.runs.append([first, behind])


class Listener(EventStream):
    """Passes on complete events."""

    def __init__(self, path: str, fields: str, on_events: Callable[[bytes, float], None]) -> None:
        super().__init__(path, fields)
        self._on_events = on_events
        self._rest = b""

    def _events(self, data: bytes, now: float) -> None:
        whole = self._rest + data
        end = whole.rfind(b"\n\n") + 2 if b"\n\n" in data else 0
        self._rest = whole[end:]
        if end:
            self._on_events(whole[:end], now)


class Generator:
    """The process's share of a load test."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._scenario = Scenario.model_validate(order["scenario"])
        self._numbering = Numbering(order["run"])
        self._topic: str = order["topic"]
        self._senders: dict[int, tuple[int, Sender]] = {}
        self._acknowledged: dict[int, Runs] = {}
        self._readers: list[Any] = []
        self._order = order
        self._latencies, self._late, self._through = Latencies(), Latencies(), Latencies()
        self._received = 0
        target = self._scenario.target
        self._login: tuple[str | None, str | None] = (target.user, order["password"])
        token = base64.b64encode(":".join(map(str, self._login)).encode()).decode()
        self._fields = "" if target.user is None else f"Authorization: Basic {token}\r\n"
        self._tls = ssl.create_default_context(cafile=str(target.ca)) if target.ca is not None else None

    async def connect(self) -> None:
        """Open all connections; OSError if one fails or is refused."""
        parts = [self._reader(*one) for one in self._order["readers"]]
        parts += [self._sender(*one) for one in self._order["senders"]]
        for first in range(0, len(parts), AT_ONCE):
            async with asyncio.timeout(self._scenario.patience):
                await asyncio.gather(*parts[first : first + AT_ONCE])

    async def _join(self, protocol: str, made: Any) -> None:
        await join(made, self._scenario.target.address(protocol), ssl=self._tls)

    async def _sender(self, part: int, number: int) -> None:
        plan = self._scenario.send[part]
        runs = self._acknowledged[number] = Runs()
        pace = Pace(plan.in_flight, None, phase=1 - number / self._order["total"])
        shape = Shape(
            plan.protocol, plan.messages, self._topic, plan.size, plan.topics, self._numbering, number,
            seed=self._scenario.seed, qos=plan.qos, batch=plan.batch,
            host="{}:{}".format(*self._scenario.target.address(plan.protocol)), login=self._fields,
        )  # fmt: skip
        name = f"load-{self._numbering.run}-{number}"
        sender: Sender
        if plan.protocol == "mqtt":
            sender = mqtt.Publisher(name, Packets(shape, pace), pace, runs.add, qos=plan.qos, login=self._login)
        elif plan.protocol == "amqp":
            sender = amqp.Sender(name, self._topic, Packets(shape, pace), pace, runs.add, login=self._login)
        else:
            pace.window = max(plan.in_flight, plan.batch)
            sender = rest.Producer(Requests(shape, pace), 0, pace, runs.add, batch=plan.batch)
        sender.latencies, sender.late = self._latencies, self._late
        await self._join(plan.protocol, sender)
        await sender.connected
        self._senders[number] = part, sender

    async def _reader(self, part: int, number: int) -> None:
        protocol = self._scenario.receive[part].protocol
        name = f"load-{self._numbering.run}-reader-{number}"
        one: Any
        if protocol == "mqtt":
            one = mqtt.Subscriber(
                name, f"{self._topic}/#", 1, lambda data: self._got(data, time.perf_counter()), login=self._login
            )
            begun = one.subscribed
        elif protocol == "amqp":
            one = amqp_receiver.Receiver(name, self._topic, size=0, on_message=self._got, keep=False, login=self._login)
            begun = one.attached
        else:
            one = Listener(f"/topics/{self._topic}/stream?format=text", self._fields, self._got)
            begun = one.subscribed
        await self._join(protocol, one)
        await begun
        self._readers.append(one)

    def _got(self, data: bytes, now: float) -> None:
        """Record a message, or several events."""
        for run, _, _, due in DUE.findall(data):
            if run.decode() == self._numbering.run:
                self._received += 1
                self._through.record(now - int(due) / 1e6)

    @property
    def _answered(self) -> int:
        return sum(sender.answered for _, sender in self._senders.values())

    async def step(self, begin: float, duration: float, total: float | None) -> None:
        """Send for `duration` seconds from `begin` (`time.perf_counter`), at a total rate or as fast as answered."""
        end = begin + duration
        senders = [sender for _, sender in self._senders.values()]
        for part, sender in self._senders.values():
            plan = self._scenario.send[part]
            sender.pace.rate = None if total is None else self._scenario.rate_of(part, total)
            count = ENDLESS if sender.pace.rate is None else round(sender.pace.rate * duration)
            sender.more(count // plan.batch * plan.batch if plan.protocol == "http" else count)
            sender.pace.start(sender.sent, begin)
        planned = sum(sender.total - sender.sent for sender in senders)
        sent, answered = sum(sender.sent for sender in senders), self._answered
        self._late.take()
        latencies, through, late = histogram(), histogram(), histogram()
        await asyncio.sleep(begin - time.perf_counter())
        cpu, waited = _processor()

        def tick(now: float) -> None:
            second, delivered = self._latencies.take(), self._through.take()
            for whole, some in ((latencies, second), (through, delivered), (late, self._late.take())):
                whole.add(some)
            send({"tick": {
                "at": now - begin, "answered": self._answered - answered, "received": self._received,
                "latencies": _encoded(second),
            }})  # fmt: skip

        await self._send(senders, begin, end, tick, paced=total is not None)
        cpu, waited = (after - before for after, before in zip(_processor(), (cpu, waited), strict=True))
        took = time.perf_counter() - begin
        in_time = self._answered - answered
        unsent = 0
        for sender in senders:
            if total is not None:  # count the wait of unsent messages too, or an overload would look good
                waiting = range(sender.sent, sender.total)
                unsent += len(waiting)
                self._latencies.extend([end - sender.pace.due(index) for index in waiting])
            sender.halt()
        finished = [sender.finished for sender in senders]
        _, waiting_for = await asyncio.wait(finished, timeout=self._scenario.patience)
        tick(time.perf_counter())
        refused: dict[str, int] = {}
        for part, sender in self._senders.values():
            for code, count in sender.refused.items():
                name = f"{self._scenario.send[part].protocol} 0x{code:x}"
                refused[name] = refused.get(name, 0) + count
            sender.refused.clear()
        send({
            "planned": planned if total is not None else None, "unsent": unsent, "in_time": in_time,
            "sent": sum(sender.sent for sender in senders) - sent, "answered": self._answered - answered,
            "unanswered": len(waiting_for) and sum(sender.total - sender.answered for sender in senders),
            "received": self._received, "refused": refused,
            "errors": sorted({str(one.exception()) for one in finished if one.done() and one.exception()}),
            "cpu": cpu, "waited": waited, "seconds": took,
            "latencies": _encoded(latencies), "through": _encoded(through),
            "late": _encoded(late),
        })  # fmt: skip

    async def _send(
        self, senders: Iterable[Sender], begin: float, end: float, tick: Callable[[float], None], *, paced: bool
    ) -> None:
        """Push the senders that are due, until the end."""
        queue = [(sender.pace.due(sender.sent) if paced else begin, number) for number, sender in enumerate(senders)]
        of = list(senders)
        heapq.heapify(queue)
        next_tick = begin + 1.0
        while (now := time.perf_counter()) < end:
            while queue and queue[0][0] <= now:
                _, number = heapq.heappop(queue)
                sender = of[number]
                sender.push()
                if paced and sender.sent < sender.total:
                    due = sender.pace.due(sender.sent)
                    heapq.heappush(queue, (due if due > now else now + AGAIN_S, number))
            if now >= next_tick:
                tick(now)
                next_tick += 1.0
            wake = min(end, next_tick, queue[0][0] if queue else end)
            await asyncio.sleep(max(TICK_S, wake - time.perf_counter()))

    def counts(self) -> dict[str, Any]:
        """Return each sender's acknowledged ranges and number of sent messages."""
        return {
            "acknowledged": {number: runs.runs for number, runs in self._acknowledged.items()},
            "sent": {number: sender.sent for number, (_, sender) in self._senders.items()},
            "received": self._received,
        }

    def received(self) -> dict[str, int]:
        """Return how many messages the readers received, and how many the senders had acknowledged."""
        return {"received": self._received, "expected": self._answered}

    def close(self) -> None:
        """Close all connections."""
        for one in (*self._readers, *(sender for _, sender in self._senders.values())):
            one.close()


def _processor() -> tuple[float, float]:
    """Return the seconds that this single-threaded process ran, and waited for a processor (Linux)."""
    ran, waited, _ = Path("/proc/self/schedstat").read_text().split()
    return int(ran) / 1e9, int(waited) / 1e9


def _encoded(one: HdrHistogram) -> str:
    return str(one.encode().decode())


def send(answer: Any) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def main() -> None:
    """Run the process."""
    reader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    generator = Generator(json.loads(await reader.readline()))
    try:
        await generator.connect()
    except (OSError, TimeoutError, ExceptionGroup) as error:
        send({"failed": f"cannot connect: {str(error) or type(error).__name__}"})
        return
    gc.freeze()
    gc.disable()  # there are no reference cycles, and a collection would delay messages
    send({"connected": True})
    while line := await reader.readline():
        order = json.loads(line)
        if "step" in order:
            begin, duration, total = order["step"]
            await generator.step(begin, duration, total)
        elif "received" in order:
            send(generator.received())
        else:
            send(generator.counts())
    generator.close()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the parent has ended
        uvloop.run(main())
