"""The keys that every job file has, with or without Spark."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from spark_sinks.spec.parts import Section


class Declaration(Section):
    """A job declared in a file. `job` names its kind."""

    SUMMARY: ClassVar[str]
    SPARK: ClassVar[bool] = True
    """Whether the job needs Spark, and therefore Java."""
    job: str
    """the kind of job"""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] | None = None
    """name of the query in progress reports and logs; not set: the kind"""
    run: Any

    @property
    def title(self) -> str:
        """The name, or the kind if the job has no name."""
        return self.name or self.job

    @property
    def topics(self) -> tuple[str, ...]:
        """Every topic that must exist before the job starts."""
        raise NotImplementedError
