"""Keeps the access list equal to Kafka's ACLs: reads them every few seconds and on SIGHUP.

    source = AclSource(config.security, access_list, clock=loop.time)
    await source.run(queries.request)       # until cancelled

While Kafka does not answer, the ACLs read last stay in force. Before the first read no client can log in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated, Final

import msgspec
import structlog

from gateway.kafka.contracts import Refused
from gateway.kafka.driver.acl_requests import AclsUnknown, all_acls, read_acls
from gateway.kafka.driver.wire import EncodedRequest
from gateway.security.rights.authorization import AccessList
from gateway.security.rights.kafka_acls import AclBook, principal_template
from gateway.settings.config import SecurityConfig
from telemetry.statistics import counter, gauge

log = structlog.get_logger(__name__)

ANSWER_S: Final = 8.0
FIRST_RETRY_S: Final = 0.5
"""Between two attempts until the ACLs have been read once: no client can log in before."""
THROTTLE_BYTES: Final = 4  # throttle_time_ms at the start of a response


class AclStatistics(msgspec.Struct):
    """Statistics of reading Kafka's ACLs; all zero if they are not the access list."""

    age_seconds: Annotated[
        float, gauge("seconds since Kafka's ACLs were read, or since the start; 0 if they are not used")
    ] = 0.0
    acls: Annotated[int, gauge("Kafka's ACLs on topics, groups, transactional ids and the cluster")] = 0
    reads_total: Annotated[int, counter("reads of Kafka's ACLs")] = 0
    failures_total: Annotated[int, counter("failed reads of Kafka's ACLs")] = 0
    changes_total: Annotated[int, counter("changes of Kafka's ACLs")] = 0


class AclSource:
    """Reads the ACLs and applies them to the access list."""

    def __init__(self, config: SecurityConfig, access: AccessList, *, clock: Callable[[], float]) -> None:
        """Validate the settings (raises ConfigError); `run` reads the ACLs. `clock` returns monotonic seconds."""
        self.enabled = config.access_source == "kafka"
        self._principal = principal_template(config)
        self._everyone = config.allow_everyone_if_no_acl_found
        self._refresh_s = config.access_refresh_s
        self._access = access
        self._clock = clock
        self._read_at = clock()
        self._last = b""
        self._book: AclBook | None = None
        self._again = asyncio.Event()
        self._counts = AclStatistics()
        self.problem = "Kafka's ACLs have not been read yet" if self.enabled else None
        """A sentence that says why the ACLs cannot be read, or None."""

    @property
    def has_rules(self) -> bool:
        """Whether rules are loaded, so that clients can log in."""
        return self._access.is_known

    async def run(self, ask: Callable[[EncodedRequest], Awaitable[bytes]]) -> None:
        """Read the ACLs periodically until cancelled. Returns immediately if they are not the access list.

        `ask` sends a request to any broker and raises Refused.
        """
        while self.enabled:
            await self._read(ask)
            pause_s = self._refresh_s if self._access.is_known else min(FIRST_RETRY_S, self._refresh_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._again.wait()
            self._again.clear()

    def refresh(self) -> None:
        """Read the ACLs now."""
        self._again.set()

    async def _read(self, ask: Callable[[EncodedRequest], Awaitable[bytes]]) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await ask(all_acls())
            if answer[THROTTLE_BYTES:] != self._last or self._book is None:
                await self._use(answer)
        except (AclsUnknown, Refused) as error:
            self._failed(str(error))
            return
        except TimeoutError:
            self._failed("Kafka does not answer")
            return
        self._read_at = self._clock()
        self._counts.reads_total += 1
        if self.problem is not None:
            self.problem = None
            log.info("Kafka's ACLs are read", acls=self._counts.acls)

    async def _use(self, answer: bytes) -> None:
        """Apply the ACLs of a response if they have changed."""
        # Decoding and compiling a hundred thousand ACLs take a second, so they do not run in the event loop.
        acls = await asyncio.to_thread(read_acls, answer)
        self._last = answer[THROTTLE_BYTES:]
        if self._book is not None and self._book.acls == AclBook.relevant(acls):
            return  # same ACLs in another order
        book = await asyncio.to_thread(AclBook, acls, self._principal, everyone=self._everyone, before=self._book)
        self._counts.acls = len(book.acls)
        self._counts.changes_total += self._book is not None
        self._book = book
        self._access.use(book)

    def _failed(self, why: str) -> None:
        self._counts.failures_total += 1
        if why != self.problem:
            self.problem = why
            what = "the last ones stay in force" if self._access.is_known else "no client can log in"
            log.error("Kafka's ACLs cannot be read", reason=why, consequence=what)

    def statistics(self) -> AclStatistics:
        """Return the current counts."""
        age = self._clock() - self._read_at if self.enabled else 0.0
        return msgspec.structs.replace(self._counts, age_seconds=age)
