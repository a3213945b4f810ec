"""Damaged AMQP conversations and damaged HTTP requests, and how they end."""

from __future__ import annotations

import asyncio
import collections
import itertools
import random
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from loadtest.beside import in_turn
from loadtest.clients.hostile.amqp_damage import damaged
from loadtest.clients.hostile.amqp_record import Pieces
from loadtest.clients.hostile.http_damage import CONTINUE, attack
from loadtest.clients.hostile.http_departures import depart
from loadtest.clients.http_wire import Splitter
from loadtest.clients.talk import reset

CLOSE_S: Final = 60.0  # until an answer, or the gateway's close
STEP_S: Final = 0.02  # for the gateway's answer to a frame
Problem = Callable[[str], None]


class Fuzz(NamedTuple):
    """Parameters.

    Attributes:
        seconds: the duration.
        at_once: connections at the same time.
        seed: of all random choices.
        first: number of the first conversation; each depends only on the seed and its number.
        silent: share of conversations that end in silence, which the gateway must close.
    """

    seconds: float = 600.0
    at_once: int = 20
    seed: int = 0
    first: int = 0
    silent: float = 0.005


class Conversations:
    """Damaged AMQP conversations, and how they ended."""

    def __init__(self, problem: Problem, address: tuple[str, int], recordings: list[Pieces], plan: Fuzz) -> None:
        self.ended: collections.Counter[str] = collections.Counter()
        self._problem, self._address, self._recordings, self._plan = problem, address, recordings, plan
        self._numbers = itertools.count(plan.first)

    async def storm(self, share: float) -> None:
        """Converse for a share of the time."""
        until = time.monotonic() + self._plan.seconds * share
        numbers = itertools.takewhile(lambda _: time.monotonic() < until, self._numbers)
        await in_turn(numbers, self._converse, self._plan.at_once)

    async def _converse(self, number: int) -> None:
        rng = random.Random(f"{self._plan.seed}/{number}")
        pieces = damaged(self._recordings, rng)
        patient = rng.random() < 0.7
        ending = (
            "silence"
            if rng.random() < self._plan.silent
            else rng.choice(("half-close", "half-close", "reset", "leave"))
        )
        answered = 0
        self.ended["conversations"] += 1
        try:
            reader, writer = await asyncio.open_connection(*self._address)
            try:
                for piece in _splits(pieces, rng):
                    if writer.is_closing():
                        break
                    writer.write(piece)
                    if patient:
                        answered += await _read_some(reader, STEP_S)
                if ending == "reset":
                    reset(writer)
                elif ending != "leave":
                    if ending == "half-close" and not writer.is_closing():
                        writer.write_eof()
                    async with asyncio.timeout(CLOSE_S):
                        while data := await reader.read(65536):
                            answered += len(data)
            finally:
                writer.transport.abort()
        except ConnectionError:
            answered += 1  # closed while we wrote
        except TimeoutError:
            self._problem(f"conversation {number}: neither answered nor closed after our {ending}")
        self.ended["answered"] += bool(answered)
        self.ended[ending] += 1


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


class Requests(NamedTuple):
    """Parameters.

    Attributes:
        requests: number of attacks.
        at_once: at the same time.
        seed: of all random choices.
    """

    requests: int = 10_000
    at_once: int = 20
    seed: int = 0


class Attacks:
    """Damaged HTTP requests, and their answers."""

    def __init__(self, problem: Problem, address: tuple[str, int], topics: tuple[str, str], plan: Requests) -> None:
        self.statuses: collections.Counter[str] = collections.Counter()
        self._problem, self._address, self._plan = problem, address, plan
        self._target, self._silent = topics
        self._numbers = itertools.count()

    async def storm(self, share: float) -> None:
        """Send a share of the requests."""
        count = round(self._plan.requests * share)
        await in_turn(itertools.islice(self._numbers, count), self._one, self._plan.at_once)

    async def _one(self, number: int) -> None:
        rng = random.Random(f"{self._plan.seed}/{number}")
        if number % 10 == 0:
            way = await depart(rng, self._address, self._target, self._silent)
            self.statuses[f"left in mid-{way}"] += 1
            return
        pieces, ending, refused, first = attack(rng, self._target)
        reader, writer = await asyncio.open_connection(*self._address)
        answer = b""
        try:
            async with asyncio.timeout(CLOSE_S):
                if first:
                    await _known(reader, writer, first)
                for piece in pieces:
                    if writer.transport.is_closing():
                        break  # the gateway closed the connection
                    writer.write(piece)
                    await asyncio.sleep(STEP_S / 10)
                if ending == "wait":
                    answer = await reader.read(-1)
                elif ending == "reset":
                    reset(writer)
        except ConnectionError:
            pass  # closed
        except TimeoutError:
            self._problem(f"request {number}: neither answered nor closed within {CLOSE_S:g} s")
        finally:
            writer.close()
        answer = answer.removeprefix(CONTINUE)
        status = answer[9:12].decode(errors="replace") if answer.startswith(b"HTTP/1.") else "none"
        self.statuses[status if ending == "wait" else ending] += 1
        if status == "500" or (refused and status.startswith("2")):
            self._problem(f"request {number}: {answer[:300]!r}")


async def _known(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    """Send a valid request and read its response, so that its head is known."""
    writer.write(request)
    splitter = Splitter()
    while (data := await reader.read(1 << 16)) and not splitter.feed(data):  # refused, it may be closed
        pass
