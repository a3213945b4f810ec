"""Mosquitto's wire cases: all pass except those that docs/conformance-mqtt.md lists.

The cases and the tool that replays them lie beside the repository; see the page.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from gateway.embedded.broker import EmbeddedBroker
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.outside import NOT_HERE, SHARED
from tests.support.topics import create_topic

TOOL = SHARED / "tools" / "wirecases.py"
PAGE = Path(__file__).parents[2] / "docs" / "conformance-mqtt.md"
CASES = 1826
RETAINED = ("subpub/nap", "subpub/rap", "topic")

CONFIG = """
[kafka]
create_topics = true
[mqtt]
topic_alias_maximum = 10  # Mosquitto's; a case wants 11 refused
report_no_subscribers = true
echo_wait_ms = 20000  # nine cases want a client's own message before its acknowledgement
[[mapping.rules]]
mqtt = "qos2/#"  # a case wants the messages of two topics in the order of their publishing: in one partition
topic = "{one}"
[[mapping.rules]]
mqtt = "test"  # in another run's topic a consumer group's place would be that run's
topic = "{fresh}"
[[security.access]]
action = "publish"  # a case publishes to it without subscribers, so the next case's group would start with it
kafka = "{fresh}"
allow = false
[[security.access]]
"""
Case = tuple[str, str]
"""The file, and the case's group and name with single blanks."""

pytestmark = pytest.mark.skipif(not TOOL.exists(), reason=f"Mosquitto's wire cases are {NOT_HERE}")


def named(heading: str) -> set[Case]:
    """Return the cases in a table of the page."""
    section = PAGE.read_text(encoding="utf-8").partition(f"### {heading}\n")[2].partition("\n##")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {(file, f"{group} {case}") for file, group, case, *_ in rows[2:]}


def normal(case: str) -> str:
    """Return group and name of a case as the page writes them."""
    return re.sub(r"[\s|]+", " ", case).strip()


async def replay(gateway: GatewayProcess, report: Path) -> list[dict[str, str | bool]]:
    """Run the tool, which waits 10 seconds for each answer; return its rows."""
    host, port = gateway.address("mqtt")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(TOOL), "--host", host, "--port", str(port), "--timeout", "10", "--json", str(report),
        stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert await asyncio.wait_for(process.wait(), 180) == 0
    return load(report)


def load(report: Path) -> list[dict[str, str | bool]]:
    """Read the tool's report."""
    rows: list[dict[str, str | bool]] = json.loads(report.read_text())
    return rows


async def forget_retained(gateway: GatewayProcess) -> None:
    """Delete the retained messages of previous runs."""
    client = await RawClient.connect(gateway.address("mqtt"))
    for topic in RETAINED:
        await client.publish(topic, qos=1, retain=True)
    await client.disconnect()


async def test_every_case(
    stoppable: EmbeddedBroker, new_gateway: Callable[..., GatewayProcess], tmp_path: Path
) -> None:
    """Runs on a separate broker, because some cases receive the messages of all topics."""
    bootstrap = stoppable.bootstrap_servers
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    config = CONFIG.format(one=await create_topic(admin, 1), fresh=await create_topic(admin, 1))
    await admin.close()
    gateway = await new_gateway(bootstrap, config=config).start()
    contradicting = named("Cases that contradict the standard")
    assert len(contradicting) == 12
    await forget_retained(gateway)
    rows = await replay(gateway, tmp_path / "all.json")
    assert len(rows) == CASES
    failed = {(str(row["file"]), normal(str(row["case"]))): str(row["why"]) for row in rows if not row["ok"]}
    assert {case: why for case, why in failed.items() if case not in contradicting} == {}
    assert contradicting - failed.keys() == set(), "the page names cases that pass"
