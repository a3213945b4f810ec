"""What a failed test leaves open is closed with it: freed later, its complaint would fail whichever test runs then.

The frames of its traceback keep clients, sockets and sessions, and pytest keeps the traceback until another test fails.
"""

from __future__ import annotations

import gc
import traceback
import warnings
from collections.abc import Iterator


def forget(error: BaseException) -> None:
    """Let go of everything that the frames of an error hold, and of the errors that it came from, without a warning."""
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
