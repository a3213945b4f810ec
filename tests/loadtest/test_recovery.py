"""A short `python -m loadtest recovery`: after a kill, the embedded Kafka still has records that it had not flushed."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


async def test_unflushed_records_survive_a_kill(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadtest", "recovery", "--gigabytes", "0.02", "--kills", "0",
        "--directory", str(tmp_path), "--json", str(report),
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), 200)
    assert process.returncode == 0, out.decode()
    (row,) = json.loads(report.read_text())["rows"]
    assert row["records"] == 80
    assert row["recovered"] == row["partitions"] == 1
