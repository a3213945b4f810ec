"""Runs `trivium` with a switch by which a test raises an unexpected exception in any background task.

`python -m tests.support.faulty PIPE up ...` reads commands from a named pipe, line by line, and answers each with a
line of JSON in the named pipe `PIPE.out`:

- `names`: the qualified names of all the gateway's coroutines that were ever started as tasks, and how many live now;
- `fail NAME`: raise in every live task of that name, at the point where it waits, and return their number. If none is
  live, the next one fails, after its first wait or at its end;
- `break MODULE:CLASS.METHOD`: the next call of the method raises.

The gateway does not know about it: the loop's task factory wraps each coroutine.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import importlib
import json
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import gateway


class InjectedError(Exception):
    """An exception that no code of the gateway expects."""


class Faulty(Coroutine[Any, Any, Any]):
    """A coroutine that raises where it waits, when asked to."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.__qualname__ = self.__name__ = inner.__qualname__
        self.armed = False  # raise instead of being cancelled
        self.next = False  # raise at the next step
        self.waits = False

    def send(self, value: Any) -> Any:
        if self.next and self.waits:
            self.next = False
            return self.inner.throw(InjectedError("on purpose"))
        self.waits = True
        try:
            return self.inner.send(value)
        except StopIteration:
            if self.next:
                raise InjectedError("on purpose") from None
            raise

    def throw(self, kind: Any, *rest: Any) -> Any:
        error = kind if isinstance(kind, BaseException) else kind()
        if self.armed and isinstance(error, asyncio.CancelledError):
            self.armed = False
            return self.inner.throw(InjectedError("on purpose"))
        return self.inner.throw(kind, *rest)

    def close(self) -> None:
        self.inner.close()

    def __await__(self) -> Any:
        return self.inner.__await__()


class Switch:
    """Finds all tasks by name."""

    def __init__(self) -> None:
        self.started: collections.Counter[str] = collections.Counter()
        self.living: dict[asyncio.Task[Any], tuple[str, Faulty]] = {}
        self.loop: asyncio.AbstractEventLoop | None = None
        self.wanted: set[str] = set()

    def factory(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        """Create tasks, as the loop's task factory; wrap the gateway's coroutines, but not those of libraries."""
        code = getattr(work, "cr_code", None)  # none when the loop closes the generator of a cancelled task
        if code is None or not code.co_filename.startswith(str(Path(gateway.__file__).parent)):
            return asyncio.Task(work, loop=loop, **options)
        name = _name(work)
        faulty = Faulty(work)
        if name in self.wanted:
            self.wanted.remove(name)
            faulty.next = True
        task = asyncio.Task(faulty, loop=loop, **options)
        self.started[name] += 1
        self.living[task] = (name, faulty)
        task.add_done_callback(lambda task: self.living.pop(task, None))
        return task

    def names(self) -> dict[str, int]:
        living = collections.Counter(name for name, _ in self.living.values())
        return {name: living[name] for name in self.started}

    def fail(self, wanted: str) -> int:
        count = 0
        for task, (name, faulty) in list(self.living.items()):
            if name == wanted and faulty.waits:
                faulty.armed = True
                task.cancel()
                task.uncancel()
                count += 1
        if not count:
            self.wanted.add(wanted)
        return count


def break_once(place: str) -> int:
    """Make the next call of a method raise; return 1."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    real = owner.__dict__[name]

    def broken(*arguments: Any, **options: Any) -> Any:
        setattr(owner, name, real)
        raise InjectedError("on purpose")

    setattr(owner, name, broken)
    return 1


def _name(work: Any) -> str:
    """Return the coroutine's qualified name, or that of the part that `keep_running` restarts."""
    found: str = work.__qualname__
    part = (work.cr_frame.f_locals if work.cr_frame is not None else {}).get("work")
    if found == "keep_running" and part is not None:
        part = getattr(part, "func", part)
        return f"keep_running {part.__qualname__}"
    return found


def listen(path: Path, switch: Switch) -> None:
    """Execute the commands from the pipe; runs in a thread."""
    out = path.with_name(path.name + ".out")
    with path.open() as lines, out.open("w") as answers:
        for line in lines:
            command, _, name = line.strip().partition(" ")
            found: concurrent.futures.Future[Any] = concurrent.futures.Future()

            def obey(command: str = command, name: str = name, found: Any = found) -> None:
                orders = {"fail": switch.fail, "break": break_once, "names": lambda _: switch.names()}
                try:
                    found.set_result(orders[command](name))
                except Exception as error:  # the method does not exist: report it to the test
                    found.set_result({"error": repr(error)})

            assert switch.loop is not None
            switch.loop.call_soon_threadsafe(obey)
            answers.write(json.dumps(found.result()) + "\n")
            answers.flush()


def main() -> None:
    """Run `trivium` with the switch."""
    from gateway.process import app
    from gateway.process.cli import app as command

    path = Path(sys.argv[1])
    switch = Switch()
    run = app.App.run

    async def run_with_switch(self: app.App) -> None:
        switch.loop = asyncio.get_running_loop()
        switch.loop.set_task_factory(switch.factory)
        await run(self)

    app.App.run = run_with_switch  # type: ignore[method-assign]
    threading.Thread(target=listen, args=(path, switch), daemon=True).start()
    command(sys.argv[2:])


if __name__ == "__main__":
    main()
