"""A test that hangs fails and shows where it hung; the event loop keeps running for the tests that follow.

pytest-timeout ends a test by raising in a signal handler. While the event loop waits, uvloop runs the handler as a
callback and only logs its exception, so the test would hang forever.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import warnings
from typing import Any, ClassVar, Final

import pytest
import pytest_timeout
import uvloop

GRACE_S: Final = 10.0
"""Time for a cancelled coroutine to clean up."""


class Loop(uvloop.Loop):
    """uvloop's event loop, which `set_timer` can interrupt.

    Attributes:
        failed: whether a test has failed. Transports that are open at the end may be its, and are only reported.
    """

    failed = False
    _main: Any = None  # the future of `run_until_complete`
    _interrupted: Any = None  # the one that was cancelled
    _stopped = False
    _opened_by: ClassVar[dict[Any, str]] = {}  # our address -> the test that connected from it last, in any loop

    async def create_connection(self, *args: Any, **options: Any) -> Any:
        """Connect, and remember which test did."""
        transport, protocol = await super().create_connection(*args, **options)
        self._opened_by[transport.get_extra_info("sockname")] = os.environ.get("PYTEST_CURRENT_TEST", "no test")
        return transport, protocol

    def run_until_complete(self, future: Any) -> Any:
        """Run a future.

        Raises:
            TimeoutError: the run was interrupted.
        """
        self._main = main = asyncio.ensure_future(future, loop=self)
        try:
            return super().run_until_complete(main)
        except asyncio.CancelledError as error:
            if self._interrupted is main:
                raise TimeoutError("cancelled; standard error tells what every task waited for") from error
            raise
        finally:
            self._main = None
            if self._stopped:
                self._stopped = False
                self.stop()
                self.run_forever()  # consume a late stop, which would end the next run

    def interrupt(self) -> bool:
        """Cancel the running future; the second call stops the loop and leaves its tasks as they are.

        Returns:
            False for the second call.
        """
        if self._interrupted is self._main:
            self._stopped = True
            self.stop()
            return False
        self._interrupted = self._main
        print_tasks(self)
        self._main.cancel()
        return True

    def close(self) -> None:
        """Close the loop.

        uvloop warns about each open transport and then closes it. If the warning is an error, uvloop does not close the
        transport and waits forever.

        Raises:
            ResourceWarning: a transport is open although no test has failed; names its addresses, its protocol and the
                test that opened it.
        """
        left = [
            f"{_ends(one)}, opened by {self._opened_by.get(one.get_extra_info('sockname'))}" for one in _connections()
        ]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            super().close()
        if caught:
            found = "; ".join([*(str(warning.message) for warning in caught), *left])
            if not self.failed:
                raise ResourceWarning(found)
            print(found, file=sys.stderr)


def _connections() -> list[Any]:
    """Return the TCP connections of all loops that are not closing."""
    return [one for one in gc.get_objects() if type(one).__name__ == "TCPTransport" and not one.is_closing()]


def _ends(transport: Any) -> str:
    ours, theirs = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
    return f"from {ours} to {theirs}: {transport.get_protocol()!r}"


def set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Set the timer for tests and fixtures that wait in a `Loop`; for others, leave it to pytest-timeout."""
    if threading.current_thread() is not threading.main_thread():
        return None

    def expired(_signum: int, _frame: object) -> None:
        __tracebackhide__ = True
        with contextlib.suppress(RuntimeError):  # none is running
            loop = asyncio.get_running_loop()
            if isinstance(loop, Loop) and loop.interrupt():
                signal.setitimer(signal.ITIMER_REAL, GRACE_S)
                return
        pytest_timeout.timeout_sigalrm(item, settings)

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel  # type: ignore[attr-defined]  # called by pytest-timeout
    signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    return True


def print_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Print to standard error where each task of a loop waits."""
    for task in asyncio.all_tasks(loop):
        print(f"{task.get_name()}:", file=sys.stderr)
        waiting: Any = task.get_coro()
        while waiting is not None:
            frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
            place = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}" if frame else repr(waiting)
            print(f"  {place}", file=sys.stderr)
            waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
