"""`python -m loadtest steady` on a running gateway, as a user calls it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.support.gateway import GatewayProcess

ROOT = Path(__file__).parents[2]


async def steady(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadtest", "steady", *arguments,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 100)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_every_protocol_sends_is_answered_and_verified(gateway: GatewayProcess, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    code, out, err = await steady(
        "--ready-file", str(gateway.ready_file), "--messages", "3000", "--connections", "3", "--json", str(report)
    )
    assert code == 0, out + err
    rows = json.loads(report.read_text())["rows"]
    assert [row["protocol"] for row in rows] == ["mqtt", "amqp", "http"]
    for row in rows:
        assert row["messages"] == row["acknowledged"] == row["stored"] == 3000
        bad = ("lost", "duplicated", "reordered", "unacknowledged_stored", "refused", "errors")
        assert {name: row[name] for name in bad} == dict.fromkeys(bad, 0)
        assert 0 < row["p50 ms"] <= row["p99 ms"] <= row["p100 ms"]
        assert row["per second"] > 0
        assert row["cpu us/msg"] >= 0
    assert "acknowledged" in out
    assert "3,000" in out


@pytest.mark.parametrize("protocol", ["mqtt", "amqp", "http"])
async def test_a_rate_is_kept_to(gateway: GatewayProcess, tmp_path: Path, protocol: str) -> None:
    report = tmp_path / "report.json"
    code, out, err = await steady(
        "--ready-file", str(gateway.ready_file), "--protocol", protocol, "--messages", "300", "--connections", "2",
        "--batch", "1", "--rate", "300", "--json", str(report),
    )  # fmt: skip
    assert code == 0, out + err
    (row,) = json.loads(report.read_text())["rows"]
    assert row["acknowledged"] == 300
    assert 0 < row["per second"] <= 320  # how far below depends on the machine


async def test_a_gateway_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    code, out, err = await steady("--ready-file", str(tmp_path / "ready.json"))
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert "ready.json" in err
