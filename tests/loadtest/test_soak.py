"""A short `python -m loadtest soak`, and its check, which distinguishes growth from fluctuation."""

from __future__ import annotations

import asyncio
import csv
import json
import math
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from loadtest.engine.stand import MIB
from loadtest.scenarios.soak import Sample, check

ROOT = Path(__file__).parents[2]
SETTLE_S = 300.0


def samples(rss: Callable[[float], float], descriptors: Callable[[float], float] = lambda _: 40.0) -> list[Sample]:
    """Make the samples of half an hour."""
    moments = [5.0 * number for number in range(361)]
    return [Sample(at, round(rss(at)), round(descriptors(at)), 30, 0, 0, 0.0) for at in moments]


@pytest.mark.parametrize(
    ("rss", "flat"),
    [
        (lambda at: 100 * MIB, True),
        (lambda at: 100 * MIB + 10 * MIB * math.sin(at), True),  # fluctuation
        (lambda at: 60 * MIB + 40 * MIB * min(1.0, at / SETTLE_S), True),  # warm-up
        (lambda at: (900 if at == 1500 else 100) * MIB, True),  # a short peak
        (lambda at: 100 * MIB + at / 1800 * 20 * MIB, False),  # slow growth
        (lambda at: 100 * MIB + at / 1800 * 20 * MIB + 10 * MIB * math.sin(at), False),
        (lambda at: (100 if at < 1000 else 200) * MIB, False),  # a permanent jump
    ],
)
def test_growth_is_distinguished_from_fluctuation(rss: Callable[[float], float], *, flat: bool) -> None:
    problems = check(samples(rss), SETTLE_S)
    assert (problems == []) is flat


def test_leaked_descriptors_are_reported() -> None:
    problems = check(samples(lambda _: 100 * MIB, lambda at: 40 + at // 200), SETTLE_S)
    assert [problem.split()[0] for problem in problems] == ["descriptors"]


async def test_messages_flow_in_and_out_by_every_protocol(bootstrap: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadtest", "soak", "--bootstrap", bootstrap, "--messages", "900", "--course", "300",
        "--rate", "0", "--interval", "0.5", "--directory", str(tmp_path), "--json", str(report),
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), 200)
    assert process.returncode == 0, out.decode()
    (row,) = json.loads(report.read_text())["rows"]
    assert row["sent"] == 3 * 900
    # Server-sent events and polls count twice; MQTT at QoS 0 may lose messages.
    assert 4 * 900 - 300 <= row["received"] <= 4 * 900
    rows = list(csv.DictReader((tmp_path / "soak.csv").read_text().splitlines()))
    assert all(int(one["rss"]) > MIB and int(one["descriptors"]) > 5 and int(one["tasks"]) > 0 for one in rows)
    assert ET.parse(tmp_path / "soak.svg").getroot().tag.endswith("svg")
