"""A short `python -m loadtest many`: no number of objects that a client can create blocks the event loop for long."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LESS = {
    "links": 5000, "receivers": 50, "filters": 1000, "retained": 200, "connections": 100, "sessions": 50,
    "held": 1000, "groups": 3, "transactions": 100, "flight": 1000, "streams": 200, "consumers": 10,
}  # fmt: skip


async def test_no_number_of_objects_blocks_the_loop_for_a_quarter_second(bootstrap: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadtest", "many", "--bootstrap", bootstrap, "--quiet", "0.2",
        *(word for name, number in LESS.items() for word in (f"--{name}", str(number))),
        "--directory", str(tmp_path), "--json", str(report),
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), 200)
    assert process.returncode == 0, out.decode()  # measured in CPU time, independent of the machine's load
    rows = json.loads(report.read_text())["rows"]
    assert len(rows) == 23
    assert all(row["most ms"] > 0 for row in rows), "the modest client was served beside all of them"
