"""Hostile conversations, several at a time, and how they end: the gateway must answer or close each of them."""

from __future__ import annotations

import asyncio
import collections
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from loadtest.beside import in_turn
from loadtest.clients.http_wire import Splitter
from loadtest.clients.talk import reset

CLOSE_S: Final = 60.0  # until an answer, or the gateway's close


class Conversation(NamedTuple):
    """What a hostile client says, and how it ends.

    Attributes:
        pieces: its bytes.
        ending: `wait` for the gateway's close, `half-close` before this, `leave` without it, or `reset`.
        patience: seconds for an answer to each piece.
        first: valid HTTP requests, each sent and answered before.
        refused: whether nothing of it may be stored.
        kind: its name in the report, if it is not counted by its answer or its ending.
    """

    pieces: Sequence[bytes]
    ending: str
    patience: float = 0.0
    first: Sequence[bytes] = ()
    refused: bool = False
    kind: str = ""


class Storm:
    """Conversations that depend only on a seed and their number.

    Attributes:
        ended: how they ended.
    """

    def __init__(
        self,
        address: tuple[str, int],
        seed: int,
        make: Callable[[random.Random], Conversation],
        judge: Callable[[Conversation, bytes | None], tuple[Sequence[str], str]],
        problem: Callable[[str], None],
    ) -> None:
        """`judge` gets the answer, None if the connection broke; it returns what to count, and a problem or ""."""
        self.ended: collections.Counter[str] = collections.Counter()
        self._address, self._seed, self._make, self._judge, self._problem = address, seed, make, judge, problem

    async def rage(self, numbers: Iterable[int], at_once: int) -> None:
        """Have the conversations of these numbers."""
        await in_turn(numbers, self._converse, at_once)

    async def _converse(self, number: int) -> None:
        one = self._make(random.Random(f"{self._seed}/{number}"))
        answer: bytes | None = b""
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            async with asyncio.timeout(CLOSE_S):
                answer = await _answer(one, reader, writer)
        except ConnectionError:
            answer = None
        except TimeoutError:
            self._problem(f"conversation {number}: neither answered nor closed within {CLOSE_S:g} s, {one.ending}")
        finally:
            writer.close()
        counted, wrong = self._judge(one, answer)
        self.ended.update(counted)
        if wrong:
            self._problem(f"conversation {number}: {wrong}")


async def _answer(one: Conversation, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Say everything, and return what the gateway answers."""
    answer, splitter = b"", Splitter()
    for request in one.first:
        writer.write(request)
        while (data := await reader.read(1 << 16)) and not splitter.feed(data):  # refused, it may be closed
            pass
    for piece in one.pieces:
        if writer.is_closing():
            return answer
        writer.write(piece)
        if one.patience:
            answer += await _read_some(reader, one.patience)
    if one.ending == "reset":
        reset(writer)
    elif one.ending != "leave":
        if one.ending == "half-close" and not writer.is_closing():
            writer.write_eof()
        answer += await reader.read(-1)
    return answer


async def _read_some(reader: asyncio.StreamReader, seconds: float) -> bytes:
    try:
        async with asyncio.timeout(seconds):
            return await reader.read(1 << 16)
    except TimeoutError:
        return b""
