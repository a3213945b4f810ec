"""Scenario `fuzz`: damaged conversations of real AMQP clients, and noise, against a running gateway.

The gateway must answer or close every connection, log no traceback, release memory and descriptors, and continue to
serve an honest client.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from loadtest.beside import beside
from loadtest.clients.amqp_damage import damaged
from loadtest.clients.amqp_record import Pieces, record
from loadtest.clients.kept_amqp import KeptSender
from loadtest.clients.topics import create_topic
from loadtest.gateway import GatewayProcess, process_descriptors, process_resident
from loadtest.numbering import Numbering
from loadtest.waiting import until

CLOSE_S: Final = 60.0  # from our half-close to the gateway's close
SILENCE_S: Final = 45.0  # from our silence to the gateway's close: see `SETTINGS`; its limit for an open is 10 s
STEP_S: Final = 0.02  # for the gateway's response to a frame
SETTLED_S: Final = 60.0
QUIET_S: Final = 3.0  # for remaining group and lookup work
HONEST_RATE: Final = 50.0
_POLL_S: Final = 0.05
_ENDINGS: Final = ("half-close", "half-close", "reset", "close")

POOLED: Final = 40
"""Descriptors that may stay open: transactional producers wait five minutes for the next transaction."""

GROWTH: Final = 64 * 1024 * 1024
"""Resident memory, in bytes, that large messages of several connections may leave in the allocator."""


SETTINGS: Final = {"TRIVIUM_KAFKA__CREATE_TOPICS": "false", "TRIVIUM_AMQP__IDLE_TIMEOUT_S": "20"}
"""The gateway's settings: damaged addresses create no topics, and silent clients are closed soon."""


REPLIES: Final = "replies"  # the topic of temporary queues; it may exist already


class Plan(NamedTuple):
    """Parameters.

    Attributes:
        seconds: the duration.
        at_once: connections at the same time.
        seed: of all random choices.
        first: number of the first conversation; each depends only on the seed and its number.
        warm_up: share of the time before the first measurement.
        silent: share of conversations that end in silence, which the gateway must close.
    """

    seconds: float = 600.0
    at_once: int = 20
    seed: int = 0
    first: int = 0
    warm_up: float = 0.2
    silent: float = 0.005


class Outcome(NamedTuple):
    """The result; memory in bytes, from after the warm-up to the end."""

    seconds: float
    conversations: int
    sent_bytes: int
    answered: int  # conversations that got any response
    answer_bytes: int
    resets: int  # ended by our reset
    closed: int  # closed by the gateway
    honest: int
    descriptors: tuple[int, int]
    resident: tuple[int, int]
    problems: list[str]

    def row(self) -> dict[str, Any]:
        """Return the columns of a report."""
        return {
            **self._asdict(),
            "seconds": round(self.seconds, 1),
            "descriptors": "{} -> {}".format(*self.descriptors),
            "resident": "{:,} -> {:,}".format(*self.resident),
            "problems": len(self.problems),
        }


class Fuzz:
    """One run."""

    def __init__(self, gateway: GatewayProcess, plan: Plan, say: Callable[[str], None]) -> None:
        self._gateway = gateway
        self._plan = plan
        self._say = say
        self._numbers = iter(range(plan.first, 1 << 62))
        self._recordings: list[Pieces] = []
        self._problems: list[str] = []
        self._conversations = self._sent = self._answered = self._answers = self._resets = self._closed = 0

    async def run(self) -> Outcome:
        """Record, warm up, attack, measure."""
        numbering = Numbering()
        topic = f"fuzz-{numbering.run}"
        for name in (topic, REPLIES):
            await create_topic(self._gateway.kafka, name)
        address = self._gateway.address("amqp")
        self._recordings = await record(address, topic)
        honest = KeptSender(
            address, "honest", topic, key="honest", payload=lambda sequence: numbering.payload(0, sequence, 64),
            on_accepted=lambda sequence: None, window=10,
        )  # fmt: skip
        log_before = self._gateway.log.stat().st_size
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(honest.run())
            async with beside(_push(honest)):
                await self._storm(self._plan.seconds * self._plan.warm_up)  # caches fill, Kafka's connections open
                before = await self._look(1)
                await self._storm(self._plan.seconds * (1 - self._plan.warm_up))
                after = await self._look(1)
            with contextlib.suppress(TimeoutError):
                await until(lambda: honest.finished, "the honest client is answered", SETTLED_S, _POLL_S)
            honest.stop()
        self._check(honest, log_before, before, after)
        return Outcome(
            time.monotonic() - began, self._conversations, self._sent, self._answered, self._answers, self._resets,
            self._closed, honest.answered, (before[0], after[0]), (before[1], after[1]), self._problems,
        )  # fmt: skip

    def _check(self, honest: KeptSender, log_before: int, before: tuple[int, int], after: tuple[int, int]) -> None:
        problems = self._problems
        with self._gateway.log.open("rb") as log:
            log.seek(log_before)
            text = log.read().decode(errors="replace")
        bad = re.findall(r'^.*(?:Traceback|"exception"|"level": "(?:error|critical)").*$', text, re.MULTILINE)
        problems += [f"in the gateway's log: {line[:2000]}" for line in bad[:3]]
        problems += [f"honest client: {fault}" for fault in honest.faults]
        if honest.connects != 1 or not honest.finished or not honest.total:
            problems.append(f"honest client: {honest.connects} connections, {honest.answered} of {honest.total}")
        if after[1] > before[1] + GROWTH:
            problems.append(f"memory: {before[1]:,} bytes before, {after[1]:,} after")
        if after[0] > before[0] + POOLED:
            problems.append(f"descriptors: {before[0]} before, {after[0]} after")

    async def _storm(self, seconds: float) -> None:
        until = time.monotonic() + seconds

        async def attacker() -> None:
            while time.monotonic() < until:
                await self._converse(next(self._numbers))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._plan.at_once):
                tasks.create_task(attacker())
        self._say(f"{self._conversations} conversations, {process_resident(self._gateway.pid):,} bytes resident")

    async def _look(self, honest: int) -> tuple[int, int]:
        """Return (descriptors, resident bytes) when only `honest` connections are left."""
        await until(
            lambda: _connections(self._gateway.address("amqp")[1]) <= honest,
            "the others are closed",
            SETTLED_S,
            _POLL_S,
        )
        await asyncio.sleep(QUIET_S)
        return process_descriptors(self._gateway.pid), process_resident(self._gateway.pid)

    async def _converse(self, number: int) -> None:
        """Run one hostile connection, with one of the ways to end it."""
        rng = random.Random(f"{self._plan.seed}/{number}")
        pieces = damaged(self._recordings, rng)
        patient = rng.random() < 0.7
        ending = "silence" if rng.random() < self._plan.silent else rng.choice(_ENDINGS)
        self._conversations += 1
        answered = 0
        try:
            reader, writer = await asyncio.open_connection(*self._gateway.address("amqp"))
            try:
                for piece in _splits(pieces, rng):
                    if writer.is_closing():
                        break
                    writer.write(piece)
                    self._sent += len(piece)
                    if patient:
                        answered += await _read_some(reader, STEP_S)
                answered += await self._end(number, ending, reader, writer)
            finally:
                writer.transport.abort()
        except ConnectionError:
            self._closed += 1  # closed while we wrote
            answered += 1
        self._answered += bool(answered)
        self._answers += answered

    async def _end(self, number: int, ending: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        if ending == "reset":
            self._resets += 1
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return 0
        if ending == "close":
            return 0
        if ending == "half-close" and not writer.is_closing():
            writer.write_eof()
        answered = 0
        try:
            async with asyncio.timeout(SILENCE_S if ending == "silence" else CLOSE_S):
                while data := await reader.read(65536):
                    answered += len(data)
        except TimeoutError:
            self._problems.append(f"conversation {number}: neither answered nor closed after our {ending}")
        else:
            self._closed += 1
        return answered


async def _push(honest: KeptSender) -> None:
    began = time.monotonic()
    while True:
        honest.total = int((time.monotonic() - began) * HONEST_RATE)
        honest.push()
        await asyncio.sleep(_POLL_S)


def _splits(pieces: Pieces, rng: random.Random) -> Pieces:
    """Split the same bytes differently, sometimes."""
    if rng.random() < 0.7:
        return [piece for piece in pieces if piece]
    data = b"".join(pieces)
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(8)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if start < end]


async def _read_some(reader: asyncio.StreamReader, seconds: float) -> int:
    try:
        async with asyncio.timeout(seconds):
            return len(await reader.read(65536))
    except TimeoutError:
        return 0


def _connections(port: int) -> int:
    """Return the number of established connections to this local port (Linux)."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(1 for row in rows if row[3] == "01" and int(row[1].rpartition(":")[2], 16) == port)
