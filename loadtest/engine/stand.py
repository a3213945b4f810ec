"""What a scenario runs on: its directory, its Kafka and its gateways; and what it found."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final, Self

from loadtest.gateway import GatewayProcess

FILES: Final = 65_536
MIB: Final = 1 << 20


class Stand:
    """The systems of one run, and its result.

    Attributes:
        directory: for logs and data; it exists.
        only: parts whose name contains this are wanted.
        processors: those of the gateway, if it has its own.
        host: the gateway without clients that hosts Kafka, once it is started.
        rows: the columns of the report, a dictionary a row.
        problems: violations; none if everything was kept.
    """

    def __init__(self, directory: Path, bootstrap: str | None = None, *, only: str = "", pinned: bool = False) -> None:
        """`bootstrap` is Kafka's address; without it, one is started. `pinned` gives the gateway its own processor."""
        self.directory = directory
        self.only = only
        self.processors = make_way() if pinned else None
        self.host: GatewayProcess | None = None
        self.rows: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self._bootstrap = bootstrap
        directory.mkdir(parents=True, exist_ok=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop its own Kafka."""
        if self.host is not None:
            await self.host.stop()

    async def kafka(self) -> str:
        """Return Kafka's address. It survives the gateways."""
        if self._bootstrap is None:
            self.host = GatewayProcess(self.directory / "kafka", None)
            await self.host.start()
            self._bootstrap = self.host.kafka
        return self._bootstrap

    @contextlib.asynccontextmanager
    async def gateway(
        self, settings: Mapping[str, str] | None = None, name: str = "gateway", *, checkout: Path | None = None
    ) -> AsyncIterator[GatewayProcess]:
        """Run a gateway with these settings on Kafka, of a checkout or of this code; a sign of a bug is a problem."""
        gateway = GatewayProcess(
            self.directory / name, await self.kafka(), environment=settings, processors=self.processors,
            checkout=checkout,
        )  # fmt: skip
        try:
            await gateway.start()
            yield gateway
        finally:
            await gateway.stop()
            self.problems += gateway.bugs()

    def wants(self, part: str) -> bool:
        """Return whether a part was selected."""
        return self.only in part

    def say(self, text: str) -> None:
        """Print progress to the standard error."""
        print(text, file=sys.stderr, flush=True)

    def row(self, **columns: Any) -> None:
        """Add a row to the report, and print it."""
        self.rows.append(columns)
        self.say(str(columns))

    def check(self, kept: bool, problem: str) -> None:
        """Add a problem unless something was kept."""
        if not kept:
            self.problems.append(problem)


def make_way() -> set[int]:
    """Leave the first processor to the gateway: this process, and a Kafka that it starts, use the others.

    Returns:
        the processors for the gateway.
    """
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) > 1:
        os.sched_setaffinity(0, processors[1:])
    return set(processors[:1])


def allow_files() -> None:
    """Raise the limit of open files of this process and its children."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
