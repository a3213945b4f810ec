"""What the state in a checkpoint means: stored beside it, and compared at each start (ADR 0102).

Spark compares only the types of a state's columns. With `max(a)` edited to `max(b)` it would go on, and mix both.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from spark_sinks.spec.parts import Source

ADVICE = "use another checkpoint, or start once with --fresh, which moves this one aside and begins anew"


class Meaning(msgspec.Struct, frozen=True):
    """What a checkpoint was written by."""

    job: dict[str, str]  # by the keys of the job file
    topics: dict[str, str]  # Kafka's id of each source topic; empty if it was not known yet

    def changes_to(self, other: Meaning) -> list[str]:
        """Return a sentence for each part of the job that has another value in `other`; new parts are no change."""
        changed = [
            f"{name} was {was}, and is {other.job[name]}"
            for name, was in self.job.items()
            if other.job.get(name, was) != was
        ]
        changed = changed or [
            f"{name} was {was}, and is not set" for name, was in self.job.items() if name not in other.job
        ]
        return changed + [
            f"source.topics had {name}, which is no longer read" for name in self.topics if name not in other.topics
        ]

    def recreated(self, ids: Mapping[str, str]) -> list[str]:
        """Return the topics that have another id now."""
        return [name for name, was in self.topics.items() if was and ids.get(name, was) != was]


def of_source(source: Source, columns: Sequence[str]) -> dict[str, str]:
    """Return what the values of these columns and the time of a reading mean."""
    meaning = {"source.decode": source.decode, "source.time": source.time or "not set"}
    if source.message is not None:
        meaning["source.message"] = source.message
    for name in columns:
        if (column := source.columns.get(name)) is not None:
            meaning[f"source.columns.{name}"] = f"the {column.type} {column.field or name}"
    return meaning


def of_code(path: Path) -> str:
    """Return a digest of a Python job's code, without its settings (`JOB`), docstrings and comments."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not _sets_job(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def _sets_job(node: ast.stmt) -> bool:
    targets: list[Any] = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(target, ast.Name) and target.id == "JOB" for target in targets)
