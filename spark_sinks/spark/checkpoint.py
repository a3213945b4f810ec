"""Reads a query's checkpoint: its finished batches, the offset range of each, and the last batch examined.

Spark writes `offsets/N` before it runs a micro-batch (in real time at the batch's end), with the watermark that the
batch applies and its end offsets, and `commits/N` when the batch is finished. It keeps the newest hundred
(`spark.sql.streaming.minBatchesToRetain`). Files are read through Hadoop, so a checkpoint may be on any file system.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Collection
from typing import Final, NamedTuple

import msgspec
from pyspark.sql import SparkSession

from spark_sinks.spark.java import Files
from spark_sinks.spark.progress import Offsets
from spark_sinks.spec.meaning import Meaning

EXAMINED = "examined"
"""A file beside Spark's own, with the number of the newest batch that `RejectScanner` has examined."""
_NEW_EXAMINED = f".{EXAMINED}.new"
MEANING = "meaning"
"""Another one, with the `Meaning` of the state."""
_NEW_MEANING = f".{MEANING}.new"
HELD = "held"
"""Another one, empty, while a driver holds the checkpoint."""
WRITING_S: Final = 0.05
_LOGS: Final = ("offsets", "commits")  # Spark's directories with a numbered file per batch


class PlannedBatch(NamedTuple):
    """A finished batch."""

    number: int
    start: Offsets  # a partition that is not listed is read from its beginning
    end: Offsets  # exclusive
    watermark_ms: int  # a reading whose windows all end at or before it was dropped; 0: none was


class JobCheckpoint:
    """The checkpoint directory of one query."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self.path = path
        self._files = Files(spark, path)

    def newest(self) -> int | None:
        """Return the number of the newest finished batch; None if there is none."""
        numbers = self._numbers("commits")
        return max(numbers) if numbers else None

    def oldest(self) -> int:
        """Return the number of the oldest finished batch whose metadata is complete."""
        kept = self._numbers("offsets")
        return next((number for number in sorted(kept) if number == 0 or number - 1 in kept), 0)

    def batch(self, number: int) -> PlannedBatch | None:
        """Return a batch; None if it is not finished, or so old that Spark has deleted its metadata."""
        if self._read(f"commits/{number}") is None:
            return None
        log = self._read(f"offsets/{number}")
        start = self._end(number - 1) if number else self._beginning()
        if log is None or start is None:
            return None
        return PlannedBatch(number, start, _offsets(log), json.loads(log.splitlines()[1])["batchWatermarkMs"])

    def position(self) -> Offsets | None:
        """Return the offsets up to which finished batches have read everything; None if there is none."""
        newest = self.newest()
        return None if newest is None else self._end(newest)

    def check_real_time(self) -> None:
        """Raise ValueError if real time cannot continue from this checkpoint."""
        newest = self.newest()
        commit = None if newest is None else self._read(f"commits/{newest}")
        if commit is not None and commit.startswith("v1"):
            raise ValueError(
                f"the checkpoint {self.path} was created with state that real time cannot use (in the heap, or by an "
                "older version): continue in micro-batches, or use a new checkpoint, which reads the topic again"
            )

    def forget_unfinished_start(self) -> None:
        """Remove what a stopped first batch left; by its logs, the query has read nothing.

        That is its state in real time, and temporary files of the logs. Spark would take them for another query's, and
        refuse to start (SPARK-53103).
        """
        if self._files.exists(f"{self.path}/metadata") and self.is_unread():
            for name in ("state", *_LOGS):
                self._files.delete(f"{self.path}/{name}")

    def lacks_in_state(self, column: str) -> bool:
        """Whether the query has aggregates in its state that were written without a column of this name."""
        schema = self._read("state/0/0/_metadata/schema")  # as JSON between lengths
        return schema is not None and f'"name":"{column}"' not in schema

    def examined(self) -> int | None:
        """Return the number of the newest examined batch; None if there is none."""
        text = self._read(EXAMINED) or self._read(_NEW_EXAMINED)
        return int(text) if text and text.isdecimal() else None

    def mark_examined(self, number: int) -> None:
        """Record that every batch up to this one was examined."""
        self._files.replace(f"{self.path}/{EXAMINED}", str(number), f"{self.path}/{_NEW_EXAMINED}")

    def query_id(self) -> str:
        """Return the id of the checkpoint's query. The first driver to ask chooses it, before Spark would."""
        name = f"{self.path}/metadata"
        if not self._files.exists(name):
            self._files.create(name, json.dumps({"id": str(uuid.uuid4())}))
        while not (text := self._files.read(name)):  # another driver is writing it
            time.sleep(WRITING_S)
        return str(json.loads(text)["id"])

    def is_held(self) -> bool:
        """Whether a driver holds the checkpoint, or has died with it."""
        return self._files.exists(f"{self.path}/{HELD}")

    def hold(self) -> None:
        """Mark it as held."""
        self._files.create(f"{self.path}/{HELD}", "")

    def let_go(self) -> None:
        """Mark it as free: its driver has ended its query."""
        self._files.delete(f"{self.path}/{HELD}")

    def is_unread(self) -> bool:
        """Whether no batch was ever planned."""
        return not any(map(self._numbers, _LOGS))

    def meaning(self) -> Meaning | None:
        """Return what the checkpoint was written by; None if that is unknown, in one of an older version."""
        text = self._read(MEANING) or self._read(_NEW_MEANING)
        return None if text is None else msgspec.json.decode(text, type=Meaning)

    def keep_meaning(self, meaning: Meaning) -> None:
        """Store what the checkpoint is written by from now on."""
        text = msgspec.json.encode(meaning).decode()
        if self._read(MEANING) != text:
            self._files.replace(f"{self.path}/{MEANING}", text, f"{self.path}/{_NEW_MEANING}")

    def planned(self) -> int | None:
        """Return the number of the batch that was planned and has not finished; None if there is none."""
        newest, planned = self.newest(), max(self._numbers("offsets"), default=None)
        return None if planned is None or (newest is not None and planned <= newest) else planned

    def forget_planned(self, number: int) -> None:
        """Have the next start plan this batch anew; no sink may have it."""
        self._files.delete(f"{self.path}/offsets/{number}")
        self._forget_checksum(number)

    def forget_position(self, topics: Collection[str]) -> None:
        """Have the next batches read these topics from their beginnings: Spark takes them for new ones."""
        for number in sorted(self._numbers("offsets"))[-2:]:  # a planned batch, and the one before it
            name = f"{self.path}/offsets/{number}"
            lines = [_without(line, topics) for line in (self._files.read(name) or "").splitlines()]
            self._files.replace(name, "\n".join(lines), f"{self.path}/.{number}.new")
            self._forget_checksum(number)

    def exists(self) -> bool:
        """Whether there is a checkpoint."""
        return self._files.exists(self.path)

    def move_aside(self) -> str:
        """Rename the directory, so that the next start begins anew; return its new name."""
        aside = next(name for n in itertools.count(1) if not self._files.exists(name := f"{self.path}.{n}"))
        if not self._files.rename(self.path, aside):
            raise ValueError(f"the checkpoint {self.path} cannot be renamed to {aside}")
        return aside

    def _forget_checksum(self, number: int) -> None:
        for left in self._files.names(f"{self.path}/offsets"):
            if left.startswith(f"{number}."):
                self._files.delete(f"{self.path}/offsets/{left}")  # Spark's own checksum, on a cluster

    def _end(self, number: int) -> Offsets | None:
        log = self._read(f"offsets/{number}")
        return None if log is None else _offsets(log)

    def _beginning(self) -> Offsets | None:
        text = self._read("sources/0/0")
        return None if text is None else json.loads(text[text.index("{") :])

    def _numbers(self, directory: str) -> set[int]:
        return {int(name) for name in self._files.names(f"{self.path}/{directory}") if name.isdecimal()}

    def _read(self, name: str) -> str | None:
        return self._files.read(f"{self.path}/{name}")


def _without(line: str, topics: Collection[str]) -> str:
    """Return a source's line of a log without these topics; other lines as they are."""
    entry = json.loads(line) if line.startswith("{") else {}
    if "batchWatermarkMs" in entry or not any(topic in entry for topic in topics):
        return line
    return json.dumps({topic: offsets for topic, offsets in entry.items() if topic not in topics})


def _offsets(log: str) -> Offsets:
    """Return the offsets of all Kafka sources of a batch; the first two lines are the version and the metadata."""
    merged: Offsets = {}
    for line in log.splitlines()[2:]:
        if line.startswith("{"):
            merged.update(json.loads(line))
    return merged
