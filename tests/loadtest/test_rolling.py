"""A short `python -m loadtest rolling`: three gateways restart in turn, and no acknowledged message is lost."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


async def test_each_gateway_is_restarted_under_load(bootstrap: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadtest", "rolling", "--connections", "3", "--exactly", "1", "--rate", "50",
        "--window", "10", "--leaving", "20", "--lead", "0.3", "--between", "0.2", "--pause", "60", "--connack", "60",
        "--enough", "0", "--bootstrap", bootstrap, "--directory", str(tmp_path), "--json", str(report),
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), 300)
    assert process.returncode == 0, out.decode()
    (row,) = json.loads(report.read_text())["rows"]
    assert (row["lost"], row["doubled at QoS 2"]) == (0, 0)
    assert row["acknowledged"] > 0
    assert row["moves"] >= 9, "everybody was on one of the gateways at least"
