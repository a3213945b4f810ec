"""A short `python -m loadtest limits`: each part lets traffic pass, and not more than its limit allows."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from loadtest.clients.crowd.lanes import PARTS, Limit
from loadtest.scenarios.limits import check

ROOT = Path(__file__).parents[2]


async def test_every_part_passes_traffic_up_to_its_limit(bootstrap: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadtest", "limits", "--rate", "200000", "--size", "500", "--seconds", "0.5",
        "--bootstrap", bootstrap, "--directory", str(tmp_path), "--json", str(report),
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), 300)
    assert process.returncode in {0, 1}, out.decode()  # 1: a short run may deviate by a fifth
    assert report.exists(), out.decode()
    assert [row[""] for row in json.loads(report.read_text())["rows"]] == [*PARTS]


def test_a_deviation_above_a_twentieth_is_reported() -> None:
    limit = Limit(rate=1_000_000)
    assert check("good", 951_000.0, limit) == check("good", 1_049_000.0, limit) == []
    assert check("too little", 949_000.0, limit) == ["too little: 949.0 kB/s, the limit is 1000.0"]
    assert check("too much", 1_051_000.0, limit) == ["too much: 1051.0 kB/s, the limit is 1000.0"]
