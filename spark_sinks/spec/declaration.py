"""What every job file has, whatever runs it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from spark_sinks.spec.parts import Section


class Declaration(Section):
    """A job of a file. `job` names the kind."""

    SUMMARY: ClassVar[str]
    SPARK: ClassVar[bool] = True
    """Whether it starts Spark, and so Java."""
    job: str
    """the kind of job"""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] | None = None
    """of the query in progress and logs; not set: the kind"""
    run: Any

    @property
    def title(self) -> str:
        """The name, or else the kind."""
        return self.name or self.job

    @property
    def topics(self) -> tuple[str, ...]:
        """Every topic that must exist."""
        raise NotImplementedError
