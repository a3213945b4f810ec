"""Writes the versions of Spark's jars in deploy/spark, which are those of gateway/embedded/jars.lock."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gateway.embedded.jars import locked_version

HERE: Final = Path(__file__).parents[1] / "deploy" / "spark"
ARTIFACTS: Final = ("spark-sql-kafka-0-10_2.13", "spark-avro_2.13")
"""The jars that Spark's own distribution lacks; what they need comes with them."""
FORMS: Final = {
    "sparkapplication.yaml": (r"(?<=packages: )\[.*\]", "[{}]", '"{}"', ", "),
    "spark-submit.yaml": (r"(?<=--packages=)\S+", "{}", "{}", ","),
}
"""By file: the pattern of its packages, the form of all of them and of one, and what is between two."""


def packages() -> list[str]:
    """Return the Maven coordinates that a job needs."""
    return [f"org.apache.spark:{name}:{locked_version('spark', name)}" for name in ARTIFACTS]


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each manifest with its text as it must be."""
    for name, (pattern, whole, one, between) in FORMS.items():
        text = (HERE / name).read_text(encoding="utf-8")
        listed = whole.format(between.join(one.format(package) for package in packages()))
        yield HERE / name, re.sub(pattern, listed, text)
