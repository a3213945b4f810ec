"""Metrics of Spark jobs for the console: fetched in the background, and only while a console is open."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Final

import aiohttp
import msgspec

from gateway.runtime.spawn import start_contained
from gateway.settings.values import Address
from telemetry.job_figures import Figures, figures

PERIOD_S: Final = 2.0  # between two requests
ANSWER_S: Final = 2.0
LARGEST: Final = 256 * 1024  # bytes of a response
QUERIES: Final = 16  # per job


class SparkJob(msgspec.Struct, frozen=True):
    """A job at an address, or the error in reaching it."""

    address: str
    queries: tuple[Figures, ...] = ()
    error: str = ""


class SparkJobs:
    """The last responses of the jobs.

    Args:
        addresses: where the jobs serve their metrics.
    """

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = tuple(map(str, addresses))  # plain `str`, which JSON accepts
        self._last: tuple[SparkJob, ...] | None = None if not addresses else ()
        self._next = 0.0
        self._asking: asyncio.Task[None] | None = None

    def last(self) -> tuple[SparkJob, ...] | None:
        """Return the last responses and request new ones in the background. None means no configured jobs."""
        if self._addresses and (self._asking is None or self._asking.done()) and time.monotonic() >= self._next:
            self._asking = start_contained(self._ask(), "SparkJobs._ask")
        return self._last

    async def stop(self) -> None:
        """Cancel a running request."""
        if self._asking is not None:
            self._asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._asking

    async def _ask(self) -> None:
        limits = aiohttp.ClientTimeout(total=ANSWER_S)
        try:
            # Jobs are reached directly, not through a proxy.
            async with aiohttp.ClientSession(timeout=limits, trust_env=False) as session:
                self._last = tuple(await asyncio.gather(*(_job(session, address) for address in self._addresses)))
        finally:
            self._next = time.monotonic() + PERIOD_S


async def _job(session: aiohttp.ClientSession, address: str) -> SparkJob:
    try:
        async with session.get(f"http://{address}/metrics", allow_redirects=False) as answer:
            if answer.status != 200:
                return SparkJob(address, error=f"answers with status {answer.status}")
            body = b""
            async for part in answer.content.iter_chunked(65_536):
                body += part
                if len(body) > LARGEST:
                    return SparkJob(address, error=f"sends more than {LARGEST:,} bytes")
        job_figures = await asyncio.to_thread(figures, body.decode())
    except TimeoutError:
        return SparkJob(address, error=f"does not answer within {ANSWER_S:g} s")
    except aiohttp.ClientError:
        return SparkJob(address, error="does not answer")
    except ValueError:
        return SparkJob(address, error="sends no metrics")
    return SparkJob(address, queries=job_figures[:QUERIES], error="" if job_figures else "reports no query yet")
