"""Keeps the access list as Kafka's ACLs are: reads them every few seconds, and at SIGHUP.

    source = AclSource(config.security, access_list, clock=loop.time)
    await source.run(queries.request)       # for ever

While Kafka does not tell them the last ones stay; before the first ones nobody is let in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Final

import msgspec
import structlog

from gateway.config import SecurityConfig
from gateway.kafka.contracts import Refused
from gateway.kafka.driver.acl_requests import AclsUnknown, all_acls, read_acls
from gateway.kafka.driver.wire import Question
from gateway.security.authorization import AccessList
from gateway.security.kafka_acls import AclBook, principal_template
from gateway.statistics import counter, gauge

log = structlog.get_logger(__name__)

ANSWER_S: Final = 8.0
FIRST_RETRY_S: Final = 0.5
"""Between two attempts before the first ACLs are known: everybody waits for them."""
THROTTLE_BYTES: Final = 4  # at the beginning of an answer: how long Kafka would have us wait


class AclStatistics(msgspec.Struct, frozen=True):
    """Kafka's ACLs, where they are the access list."""

    age_seconds: Annotated[
        float, gauge("seconds since Kafka's ACLs were read, or since the start; 0: they are not the access list")
    ] = 0.0
    acls: Annotated[int, gauge("Kafka's ACLs on topics, groups, transactional ids and the cluster")] = 0
    reads_total: Annotated[int, counter("times that Kafka's ACLs were read")] = 0
    failures_total: Annotated[int, counter("times that Kafka's ACLs could not be read")] = 0
    changes_total: Annotated[int, counter("times that they were others than before")] = 0


class AclSource:
    """Reads them, and has the access list judge by them.

    Attributes:
        problem: why they cannot be read, in a sentence; None: they can, or are not wanted.
    """

    def __init__(self, config: SecurityConfig, access: AccessList, *, clock: Callable[[], float]) -> None:
        """Nothing is read before `run`; `clock` gives monotonic seconds.

        Raises:
            ConfigError: a principal that cannot be meant.
        """
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
        self.problem: str | None = "Kafka's ACLs are not known yet" if self.enabled else None

    @property
    def has_rules(self) -> bool:
        """Whether somebody can be let in."""
        return self._access.is_known

    async def run(self, ask: Callable[[Question], Awaitable[bytes]]) -> None:
        """Read them again and again, for ever; returns at once where they are not the access list.

        `ask` sends a request to any broker; it raises Refused.
        """
        while self.enabled:
            await self._read(ask)
            pause_s = self._refresh_s if self._access.is_known else min(FIRST_RETRY_S, self._refresh_s)
            try:
                async with asyncio.timeout(pause_s):
                    await self._again.wait()
            except TimeoutError:
                pass
            self._again.clear()

    def refresh(self) -> None:
        """Read them now."""
        self._again.set()

    async def _read(self, ask: Callable[[Question], Awaitable[bytes]]) -> None:
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
        self._counts = msgspec.structs.replace(self._counts, reads_total=self._counts.reads_total + 1)
        if self.problem is not None:
            self.problem = None
            log.info("Kafka's ACLs are read", acls=self._counts.acls)

    async def _use(self, answer: bytes) -> None:
        """Judge by what an answer tells, if that is something else than before."""
        acls = read_acls(answer)
        self._last = answer[THROTTLE_BYTES:]
        if self._book is not None and self._book.acls == AclBook.relevant(acls):
            return  # in another order
        # A hundred thousand are compiled in a second: not in the event loop.
        book = await asyncio.to_thread(AclBook, acls, self._principal, everyone=self._everyone, before=self._book)
        self._counts = msgspec.structs.replace(
            self._counts, acls=len(book.acls), changes_total=self._counts.changes_total + (self._book is not None)
        )
        self._book = book
        self._access.use(book)

    def _failed(self, why: str) -> None:
        self._counts = msgspec.structs.replace(self._counts, failures_total=self._counts.failures_total + 1)
        if why != self.problem:
            self.problem = why
            what = "the last ones stay" if self._access.is_known else "nobody is let in"
            log.error("Kafka's ACLs cannot be read", reason=why, consequence=what)

    def statistics(self) -> AclStatistics:
        """As of now."""
        age = self._clock() - self._read_at if self.enabled else 0.0
        return msgspec.structs.replace(self._counts, age_seconds=age)
