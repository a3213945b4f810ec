"""Notices that the files of certificates, passwords and token keys have changed, such as a mounted Secret's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from gateway.runtime.files import stamp


def files_in(config: Any) -> Iterator[Path]:
    """Yield the path of every file that a part of the configuration names."""
    if isinstance(config, BaseModel):
        for name in type(config).model_fields:
            yield from files_in(getattr(config, name))
    elif isinstance(config, list | tuple):
        for value in config:
            yield from files_in(value)
    elif isinstance(config, Path):
        yield config


async def watch_files(parts: Sequence[BaseModel], period_s: float, changed: Callable[[], None]) -> None:
    """Look at the files in these parts every `period_s` seconds, for ever; call `changed` when one is another.

    Files that are replaced one after the other, as a certificate and its key, are noticed together if nothing changes
    any more for a period.
    """
    paths = sorted({path for part in parts for path in files_in(part)})
    known = seen = [stamp(path) for path in paths]
    while paths:
        await asyncio.sleep(period_s)
        now = [stamp(path) for path in paths]
        if now == seen != known:
            known = now
            changed()
        seen = now
