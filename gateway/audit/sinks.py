"""Destinations of the audit trail: a file and a Kafka topic. Neither blocks; lines that they drop are counted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import structlog

from gateway.audit.trail import AuditTrail
from gateway.kafka.cluster.topic_info import InternalTopic
from gateway.kafka.cluster.topics import Topics
from gateway.kafka.contracts import Owner, Result
from gateway.kafka.publish.publisher import Publisher
from gateway.runtime.failures import Repeats
from gateway.runtime.spawn import Spawn
from gateway.settings.config import ConfigError
from mapping.outcomes import Outcome
from mapping.record import Record

log = structlog.get_logger(__name__)

WAITING: Final = 4 * 1024 * 1024  # bytes of lines that wait for the disk
ON_THE_WAY: Final = 1_000  # lines that wait for Kafka
MODE: Final = 0o600
LOG_S: Final = 60.0  # between two log lines about a file that cannot be written
LAST_S: Final = 1.0  # for the last lines, when the gateway stops


class FileSink:
    """Appends to a file, in a thread, so that a slow disk blocks nothing."""

    def __init__(self, path: Path, audit: AuditTrail, spawn: Spawn) -> None:
        """Open the file; raises ConfigError on failure."""
        self._path = path
        self._audit = audit
        self._spawn = spawn
        self._waiting: list[bytes] = []
        self._size = 0
        self._writing: asyncio.Task[None] | None = None
        self._reopens = False
        self._torn = False  # the last line is incomplete
        self._repeats = Repeats(LOG_S)
        try:
            self._file = self._open()
        except OSError as error:
            raise ConfigError(f"audit.file: {path}: {error.strerror}") from error

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)

    def write(self, line: bytes) -> bool:
        """Take a line; False if too much is waiting, and the line is lost."""
        if self._size + len(line) > WAITING:
            return False
        self._waiting.append(line)
        self._size += len(line)
        if self._writing is None:
            self._writing = self._spawn(self._write())
        return True

    def reopen(self) -> None:
        """Reopen the file before the next line, because it may have been renamed (log rotation)."""
        self._reopens = True
        if self._writing is None:
            self._writing = self._spawn(self._write())

    async def _write(self) -> None:
        """Write until no line is waiting."""
        try:
            while self._waiting or self._reopens:
                lines, self._waiting = self._waiting, []
                size, reopens, self._reopens = self._size, self._reopens, False
                try:
                    await asyncio.to_thread(self._append, lines, reopen=reopens)
                except OSError as error:
                    self._audit.counts.write_errors_total += 1
                    self._audit.counts.dropped_total += len(lines)
                    if self._repeats.suppressed() is not None:
                        log.error(
                            "the audit file cannot be written",
                            file=str(self._path),
                            reason=error.strerror,
                            lines=len(lines),
                        )
                self._size -= size
        finally:
            self._writing = None

    def _append(self, lines: Sequence[bytes], *, reopen: bool) -> None:
        """Append lines; runs in a thread and raises OSError."""
        if reopen or self._file < 0:
            old, self._file = self._file, -1
            if old >= 0:
                os.close(old)
            self._file = self._open()
        data = memoryview((b"\n" if self._torn else b"") + b"".join(line + b"\n" for line in lines))
        whole = len(data)
        try:
            while data:
                data = data[os.write(self._file, data) :]
            self._torn = False
        except OSError:
            self._torn |= len(data) < whole  # the next line must still start on a new line
            os.close(self._file)
            self._file = -1  # reopened for the next lines
            raise

    async def stop(self) -> None:
        """Write the remaining lines, for at most `LAST_S` seconds, and close the file."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=LAST_S)
        if self._writing is None and self._file >= 0:
            os.close(self._file)
            self._file = -1


class AuditTopicSink(Owner):
    """Publishes to an internal topic, which clients can neither read nor write. Owns the records that it submits."""

    def __init__(self, topic: str, audit: AuditTrail, publisher: Publisher, topics: Topics) -> None:
        """Declare the topic, which is created with the first line."""
        self._topic = topic
        self._audit = audit
        self._publisher = publisher
        self._waiting = 0
        topics.declare(InternalTopic(topic, 1, ()))

    def write(self, line: bytes) -> bool:
        """Take a line; False if too much is waiting, and the line is lost."""
        if self._waiting >= ON_THE_WAY:
            return False
        self._waiting += 1
        record = Record(topic=self._topic, key=None, value=line)
        self._publisher.submit(record, self, None, internal=True)
        return True

    def settle(self, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        """Count lines that Kafka did not store; see `gateway.kafka.contracts.Owner`."""
        self._waiting -= len(tokens)
        if result.outcome is not Outcome.STORED:
            self._audit.counts.dropped_total += len(tokens)
