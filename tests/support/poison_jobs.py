"""A job of each kind for the topics of `poison_records`, and what its results count."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from loadtest.spark.lakes import FORMATS
from loadtest.spark.readings import Topics
from loadtest.verify import stored
from tests.support.poison_records import DEVICES, FAST

GOOD: Final = (*DEVICES, *FAST)
COLUMNS: Final = 'columns = { n = "long", x = "double", s = "string" }'
COMMON: Final = """
source = { topics = ["SOURCE"], COLUMNS, time = "at", dead_letters = "DEAD" }
sink = { kafka = "TARGET" SINK }
run = { checkpoint = "CHECKPOINT" }
"""
FUNCTIONS: Final = {
    "n": ("count", "min", "max", "sum", "mean", "stddev", "distinct"),
    "x": ("count", "min", "max", "sum", "mean", "stddev", "distinct"),
    "s": ("count", "min", "max", "distinct"),
}
AGGREGATES: Final = "\n".join(
    [
        '[aggregates]\nreadings = "count(*)"\nmedian = "percentile(n, 0.5)"\nmiddle = "percentile(x, 0.5)"',
        *(f'{name}_{column} = "{name}({column})"' for column, names in FUNCTIONS.items() for name in names),
    ]
)
TRANSFORM: Final = """
from pyspark.sql import functions as F

from spark_sinks.spec.jobs import Transform
from spark_sinks.spec.parts import ResultSink, Run, Source

JOB = Transform(
    source=Source(topics=("SOURCE",), columns={"n": "long", "x": "double", "s": "string"}, dead_letters="DEAD"),
    sink=ResultSink(kafka="TARGET"),
    run=Run(checkpoint="CHECKPOINT"),
)


def transform(readings):
    return readings.select("key", F.to_json(F.struct("n", "x", "s", "key", "time")).alias("value"))
"""
KINDS: Final = {
    "window-stats": 'job = "window-stats"\nwindow = { length = "10s", watermark = "10s" }\n' + COMMON + AGGREGATES,
    "sessionize": 'job = "sessionize"\nsession = { gap = "1s", watermark = "1s" }\n'
    + COMMON.replace("SINK", ', emit = "final"') + AGGREGATES,
    "last-known": 'job = "last-known"\n' + COMMON.replace("SINK", ", retained = true"),
    "enrich": 'job = "enrich"\nregistry = { file = "REGISTRY", columns = { place = "string", size = "double" } }\n'
    + COMMON,
    "anomalies": 'job = "anomalies"\nthresholds = { x = { above = 40.0, below = -1e300 }, n = { above = 1e18 } }\n'
    + COMMON,
    "deviations": 'job = "anomalies"\nthresholds = { x = { above = 40.0, deviations = 1.0, after = 2 } }\n' + COMMON,
    "transform": TRANSFORM,
}  # fmt: skip
NOT_IN_REAL_TIME: Final = re.compile("percentile|distinct")
IN_REAL_TIME: Final = ("window-stats", "last-known", "enrich", "anomalies", "transform")
ARCHIVE: Final = """
job = "archive"
source = { topics = ["SOURCE"], COLUMNS, time = "at" }
sink = { SINK }
run = { checkpoint = "CHECKPOINT" }
"""

LAKES: Final = tuple(FORMATS)
NOT_FINITE: Final = {"nan", "inf", "-inf", "NaN", "Infinity", "-Infinity"}


def suffix(kind: str) -> str:
    """Return the suffix of a kind's job file."""
    return ".py" if kind == "transform" else ".toml"


def job_file(kind: str, topics: Topics, directory: Path, *, real_time: bool) -> str:
    """Return the text of a job file of one of `KINDS`, or of an archive in one of `LAKES`.

    The job is named by its kind. Its checkpoint, its registry and its archive are in a directory of this name.
    """
    own = directory / kind
    own.mkdir(exist_ok=True)
    registry = own / "registry.jsonl"
    rows = [{"key": device, "place": "x", "size": 1} for device in (*GOOD, "poison", "long")]
    registry.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = KINDS[kind] if kind in KINDS else ARCHIVE.replace("SINK", FORMATS[kind](own).sink)
    for name, value in {
        "SINK": "",
        "SOURCE": topics.source,
        "TARGET": topics.target,
        "DEAD": topics.dead_letter,
        "REGISTRY": str(registry),
        "CHECKPOINT": str(own / "checkpoint"),
        "COLUMNS": COLUMNS,
    }.items():
        text = text.replace(name, value)
    if real_time:
        text = "\n".join(line for line in text.splitlines() if not NOT_IN_REAL_TIME.search(line))
    return re.sub(r"^job = .*", rf'\g<0>\nname = "{kind}"', text, count=1, flags=re.MULTILINE)


async def counted(bootstrap: str, target: str) -> Mapping[str, int]:
    """Return how many readings of each good device the newest results have; ValueError for a number that is none."""
    found: dict[tuple[str, int], int] = {}
    place = 0
    async for record in stored(bootstrap, target):
        place += 1
        value = json.loads(record.value) if record.value else {}
        if not isinstance(value, dict):
            continue
        if NOT_FINITE.intersection(map(str, value.values())):
            raise ValueError(f"a result is not finite: {value}")
        if (key := (record.key or b"").decode(errors="replace")) in GOOD:
            counts: dict[str, int] = {"count": 1, **value}
            found[key, counts.get("start", place)] = counts.get("readings", counts["count"])
    return {device: sum(count for (key, _), count in found.items() if key == device) for device in GOOD}
