"""`python -m loadtest run`, `compare` and `size` as a user calls them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from loadtest.run.scenario import ScenarioError, read
from tests.support.gateway import GatewayProcess
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
ALL = """
duration = "500ms"
warm_up = "200ms"
rounds = 2
[target]
ready_file = "{ready}"
[[send]]
protocol = "mqtt"
connections = 3
messages = "typical"
in_flight = 2
[[send]]
protocol = "amqp"
connections = 2
messages = "jms"
in_flight = 2
[[send]]
protocol = "http"
connections = 2
batch = 3
messages = "random"
[[receive]]
protocol = "mqtt"
[[receive]]
protocol = "amqp"
[[receive]]
protocol = "http"
"""


async def loadtest(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadtest", *arguments,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 200)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_every_protocol_is_loaded_verified_and_reported(gateway: GatewayProcess, tmp_path: Path) -> None:
    scenario, result, page = (tmp_path / name for name in ("all.toml", "result.json", "page.html"))
    scenario.write_text(ALL.format(ready=gateway.ready_file))
    for _ in range(5):  # 3: other tests kept the machine too busy for the generators, so there is no result
        code, out, err = await loadtest("run", str(scenario), "--json", str(result), "--html", str(page))
        if code != 3:
            break
    assert code == 0, out + err
    found = json.loads(result.read_text())
    sent = sum(one["sent"] for one in found["rounds"])
    verdict = found["verdict"]
    assert verdict["acknowledged"] == verdict["stored"] >= sent > 0
    assert {name: verdict[name] for name in ("lost", "duplicated", "reordered", "unacknowledged_stored")} == {
        "lost": 0, "duplicated": 0, "reordered": 0, "unacknowledged_stored": 0,
    }  # fmt: skip
    assert found["deliveries"]["received"] == found["deliveries"]["expected"] == 3 * verdict["stored"]
    assert all(0 < one["p50 ms"] <= one["p99 ms"] and one["delivery"]["p50 ms"] > 0 for one in found["rounds"])
    assert {"machine", "commit", "load before", "versions"} <= found["environment"].keys()
    assert all(0 < one["cpu"] < 1 for one in found["generators"])
    assert "lost 0" in out
    html = page.read_text()
    assert html.count("<svg") == 1
    assert html.count("<polyline") == 5, "a rate, two latencies, memory and processor"
    assert not re.search(r"<script|<link|src=|href=|url\(", html)

    code, out, err = await loadtest("compare", str(result), str(result))
    assert (code, out.count("no difference seen")) == (0, 7), out + err
    code, out, err = await loadtest(
        "size", "--devices", "100000", "--rate", "1/10s", "--bytes", "200", "--result", str(result)
    )
    assert code == 0, out + err
    assert "10,000.00" in out
    assert "partitions" in out


async def test_the_knee_is_searched_at_unlimited_rates(gateway: GatewayProcess, tmp_path: Path) -> None:
    scenario, result = tmp_path / "knee.toml", tmp_path / "result.json"
    scenario.write_text(
        f"""
        warm_up = "200ms"
        verify = false
        topic = "knee"
        [target]
        ready_file = "{gateway.ready_file}"
        [ramp]
        start = 4
        p99_ms = 0.001
        step = "200ms"
        [[send]]
        protocol = "mqtt"
        connections = 2
        messages = "minimal"
        """
    )
    code, out, err = await loadtest("run", str(scenario), "--json", str(result))
    assert code in {1, 3}, out + err  # no rate passes, because no answer comes within a microsecond
    if code == 1:
        found = json.loads(result.read_text())
        assert found["knee"]["rate"] is None
        assert [one["rate"] for one in found["rounds"]] == [4, 2, 1]
        assert "no rate was served well" in err


async def test_a_gateway_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    scenario = tmp_path / "all.toml"
    scenario.write_text(ALL.format(ready=tmp_path / "ready.json"))
    code, out, err = await loadtest("run", str(scenario))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "ready.json" in err


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('[[send]]\nprotocol = "coap"', "send.0.protocol"),
        ('duration = "soon"\n[[send]]\nprotocol = "mqtt"', "duration"),
        ('rates = 3\n[[send]]\nprotocol = "mqtt"', "rates"),
        ('[target]\nmqtt = "127.0.0.1:1"\n[[send]]\nprotocol = "mqtt"', "kafka"),
        ('[target]\nmqtt = "127.0.0.1:1"\nkafka = "127.0.0.1:1"\n[[send]]\nprotocol = "amqp"', "no address for amqp"),
        ('rate = 5\n[ramp]\n[[send]]\nprotocol = "mqtt"', "remove `rate`"),
        ("send = 3", "send"),
        ("send = [", "bad.toml"),
    ],
)
def test_an_invalid_scenario_is_reported_with_its_place(tmp_path: Path, text: str, what: str) -> None:
    scenario = tmp_path / "bad.toml"
    scenario.write_text(text)
    with pytest.raises(ScenarioError, match=re.escape(what)):
        read(scenario, {})


def running() -> set[int]:
    """Return all process ids."""
    return {int(path.name) for path in Path("/proc").glob("[0-9]*")}


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize(("scenario", "how"), [("soak", signal.SIGTERM), ("run", signal.SIGINT)], ids=["soak", "run"])
async def test_its_child_processes_end_with_it(
    gateway: GatewayProcess, tmp_path: Path, scenario: str, how: signal.Signals
) -> None:
    endless = tmp_path / "endless.toml"
    endless.write_text(ALL.replace('duration = "500ms"', 'duration = "1h"').format(ready=gateway.ready_file))
    options = {
        "run": [str(endless)],
        "soak": ["--bootstrap", gateway.addresses["kafka"], "--directory", str(tmp_path)],
    }[scenario]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadtest", scenario, *options,
        cwd=ROOT, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    started: list[int] = []
    try:
        await wait_until(lambda: children(process.pid))
        started += children(process.pid)
        process.send_signal(how)
        assert await asyncio.wait_for(process.wait(), 60) == 128 + how
        assert not set(started) & running(), "it has waited for them"
    finally:
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
