"""A short `python -m loadtest presence`: clients connect and leave, a gateway is killed, and the topic is right."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


async def test_the_topic_ends_with_the_true_state_of_every_client(bootstrap: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadtest", "presence", "--gateways", "2", "--devices", "100", "--connects", "250",
        "--rate", "100", "--kills", "1", "--dead", "0", "--freezes", "0", "--bootstrap", bootstrap,
        "--directory", str(tmp_path), "--json", str(report),
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), 240)
    assert process.returncode == 0, out.decode()
    (row,) = json.loads(report.read_text())["rows"]
    assert row["kills"] == 1
    assert row["connects"] >= 250
    assert row["taken over elsewhere"] > 0
    assert 0 < row["online at the end"] < 100
