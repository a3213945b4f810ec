"""A gateway without garbage collection that reports, on SIGUSR1, the garbage since its previous report.

`python -m tests.support.uncollected FILE up ...`: the counts by type go to FILE, as JSON, moved into place.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import json
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

from gateway.process.cli import main
from tests.support.gateway import GatewayProcess
from tests.support.waiting import wait_until

NAMED = (dict, list, tuple, set, types.CellType, types.FunctionType, types.MethodType, types.TracebackType)
"""Types that are too common to identify garbage; the types beside them say more."""


class Uncollected(GatewayProcess):
    """One such `trivium up` process."""

    def __init__(self, directory: Path, bootstrap: str | None, *options: str, config: str = "") -> None:
        super().__init__(directory, bootstrap, *options, config=config)
        self.found = directory / "garbage.json"
        at = self._argv.index("gateway")
        self._argv[at : at + 1] = ["tests.support.uncollected", str(self.found)]

    async def garbage(self) -> dict[str, int]:
        """Return the number of objects in cycles since the last call, by type."""
        self.found.unlink(missing_ok=True)
        os.kill(self.pid, signal.SIGUSR1)
        await wait_until(self.found.exists, 60)
        counted: dict[str, int] = json.loads(self.found.read_text())
        return counted


def write_garbage(path: Path) -> None:
    """Write the garbage that the collector finds now."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = gc.garbage[:]
    gc.garbage.clear()
    counted = collections.Counter(name(one) for one in found)
    del found
    gc.collect()  # DEBUG_SAVEALL did not free them
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(dict(counted.most_common())))
    temporary.replace(path)


def name(one: Any) -> str:
    """Describe an object: its type, where a function is defined, whose a transport is, or some keys of a dictionary."""
    kind = type(one)
    text = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    with contextlib.suppress(Exception):
        if isinstance(one, types.FunctionType | types.MethodType):
            return f"{text} {one.__module__}.{one.__qualname__}"
        if isinstance(one, types.CoroutineType | types.GeneratorType):
            return f"{text} {one.__qualname__}"
        if isinstance(one, types.FrameType):
            return f"{text} {one.f_code.co_qualname}"
        if isinstance(one, BaseException):
            return f"{text} {one}"[:100]
        if text.startswith("uvloop.loop.") and one.get_protocol() is not None:
            owner = type(one.get_protocol())
            return f"{owner.__module__}.{owner.__qualname__}'s {text}"
        if isinstance(one, asyncio.Task):
            return f"{text} {one.get_coro()}"[:100]
        if isinstance(one, dict):
            return f"{text} {sorted(map(str, one))[:4]}"
    return text


if __name__ == "__main__":
    file = Path(sys.argv.pop(1))
    gc.disable()
    signal.signal(signal.SIGUSR1, lambda *_: write_garbage(file))
    main()
