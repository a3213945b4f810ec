"""The generator processes of a load test, each with a share of the connections."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from loadtest.child import command_line
from loadtest.run.scenario import Scenario
from loadtest.start import start_process

END_S: Final = 10.0
"""How long a generator may take to end before it is killed."""

Answer = dict[str, Any]


class GeneratorError(Exception):
    """A generator failed; the text is for the user."""


class Generator:
    """A generator process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._busy = False

    @classmethod
    async def start(cls) -> Generator:
        """Start a generator in its own session, so that signals to us do not reach it directly."""
        process = await start_process(
            *command_line(sys.executable, "-m", "loadtest.run.generator"),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 27, start_new_session=True,
        )  # fmt: skip
        return cls(process)

    def order(self, what: Answer) -> None:
        """Send an order."""
        assert self._process.stdin is not None
        self._busy = True
        self._process.stdin.write(json.dumps(what).encode() + b"\n")

    async def answer(self) -> Answer:
        """Return the next answer; GeneratorError if the process has ended."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise GeneratorError(f"a generator has ended: exit code {await self._process.wait()}")
        answer: Answer = json.loads(line)
        self._busy = "tick" in answer
        if "failed" in answer:
            raise GeneratorError(answer["failed"])
        return answer

    async def end(self) -> None:
        """Let the generator close its connections, unless it is busy; kill it if that takes too long."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._busy and self._process.returncode is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(END_S):
                await self._process.wait()
        except BaseException:
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
            raise


class Pool:
    """All connected generators."""

    def __init__(self, generators: Sequence[Generator]) -> None:
        self._generators = generators

    def __len__(self) -> int:
        """Return the number of generators."""
        return len(self._generators)

    async def ask(self, what: Answer, on_tick: Callable[[int, Answer], None] | None = None) -> list[Answer]:
        """Give all generators an order and return their answers; each earlier `tick` is passed to `on_tick`."""
        for one in self._generators:
            one.order(what)

        async def whole(number: int, one: Generator) -> Answer:
            while "tick" in (answer := await one.answer()):
                if on_tick is not None:
                    on_tick(number, answer["tick"])
            return answer

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(whole(number, one)) for number, one in enumerate(self._generators)]
        return [task.result() for task in tasks]


@asynccontextmanager
async def generators(scenario: Scenario, run: str, topic: str) -> AsyncIterator[Pool]:
    """Start and connect the generators; they end with the block.

    Raises:
        GeneratorError: a generator cannot connect.
    """
    senders = [part for part, one in enumerate(scenario.send) for _ in range(one.connections)]
    readers = [part for part, one in enumerate(scenario.receive) for _ in range(one.connections)]
    count = min(scenario.processes, max(len(senders), len(readers)))
    started: list[Generator] = []
    try:
        while len(started) < count:
            started.append(await Generator.start())
        for number, one in enumerate(started):
            one.order({
                "scenario": scenario.model_dump(mode="json"), "password": scenario.target.password, "run": run,
                "topic": topic, "total": len(senders),
                "senders": [(senders[at], at) for at in range(number, len(senders), count)],
                "readers": [(readers[at], at) for at in range(number, len(readers), count)],
            })  # fmt: skip
        async with asyncio.TaskGroup() as group:
            for one in started:
                group.create_task(one.answer())
        yield Pool(started)
    except ExceptionGroup as several:
        raise several.exceptions[0] from None
    finally:
        await asyncio.gather(*(one.end() for one in started), return_exceptions=True)
