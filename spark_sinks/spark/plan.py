"""Looks into a query's plan before it starts."""

from __future__ import annotations

from typing import Any, Final

from pyspark.sql import DataFrame

_STATEFUL: Final = frozenset(
    {
        "Aggregate", "Distinct", "Deduplicate", "DeduplicateWithinWatermark", "GlobalLimit", "FlatMapGroupsWithState",
        "FlatMapGroupsInPandasWithState", "TransformWithState", "TransformWithStateInPySpark",
    }
)  # fmt: skip
"""Spark's logical nodes that keep state in a stream; a join does if both of its sides are streams."""


def stateful_steps(frame: DataFrame) -> int:
    """Return how many steps of a streaming query keep state."""
    return _steps(frame._jdf.queryExecution().analyzed())


def _steps(plan: Any) -> int:
    if not plan.isStreaming():
        return 0
    listed = plan.children()
    children = [listed.apply(index) for index in range(listed.size())]
    kind = plan.getClass().getSimpleName()
    own = kind in _STATEFUL or (kind == "Join" and all(child.isStreaming() for child in children))
    return own + sum(map(_steps, children))
