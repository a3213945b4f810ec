"""Closes what a failed test leaves open; freed later, its ResourceWarning would fail another test.

The traceback's frames hold clients, sockets and sessions, and pytest keeps the traceback until another test fails.
"""

from __future__ import annotations

import gc
import traceback
import warnings
from collections.abc import Iterator


def forget(error: BaseException) -> None:
    """Clear the frames of an error and of its causes, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for each in _with_causes(error, set()):
            traceback.clear_frames(each.__traceback__)
        gc.collect()


def _with_causes(error: BaseException | None, known: set[int]) -> Iterator[BaseException]:
    if error is None or id(error) in known:
        return
    known.add(id(error))
    yield error
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for other in (error.__cause__, error.__context__, *members):
        yield from _with_causes(other, known)
