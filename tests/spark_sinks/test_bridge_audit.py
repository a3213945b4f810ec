"""The audit of acknowledged records: no false alarms, and a single missing record is found."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from pathlib import Path
from typing import Any

import aiohttp
from aiokafka.admin import NewTopic
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_sinks.audit import run as audit
from spark_sinks.audit.balance import Acknowledged, AuditCheckpoint, Counted, balance, uncounted
from spark_sinks.audit.figures import fetch
from spark_sinks.replay.items import Place
from spark_sinks.run.job_file import read
from tests.support.topics import read_committed, until_led

PLACE = Place("t", 0)


@settings(max_examples=40)
@given(st.data())
def test_one_gateway_is_balanced_with_any_log_and_at_any_audit_times(data: st.DataObject) -> None:
    """With batches, foreign records and offset gaps in any order, the audit reports exactly the one lost record."""
    log: list[bool | None] = []  # written by the gateway, by others, or an offset gap
    told: Acknowledged | None = None
    before: AuditCheckpoint | None = None
    lost = 0
    for _ in range(data.draw(st.integers(1, 5))):
        for _ in range(data.draw(st.integers(0, 4))):
            log += data.draw(st.lists(st.sampled_from([False, None]), max_size=3))
            size = data.draw(st.integers(1, 4))
            base = len(log)
            log += [True] * size
            count, first = (told.count, told.first) if told else (0, base)
            told = Acknowledged(1.0, count + size, first, len(log))
        log += data.draw(st.lists(st.sampled_from([True, False, None]), max_size=2))  # stored but not acknowledged yet
        on_the_way = [index for index in range(told.behind if told else 0, len(log)) if log[index]]
        for index in on_the_way:
            log[index] = False  # never acknowledged, as if another program had written them
        what = None if told is None else uncounted(PLACE, before, {"a": told})
        if told is None or what is None:
            continue
        within = log[what.begin : what.end]
        stored = within.count(True)
        if data.draw(st.booleans()):
            stored, lost = stored - 1, lost + 1
            expected = "missing"
        else:
            expected = "whole"
        counted = Counted(stored, within.count(False), {})
        found = balance(what, counted, before, gateways=1, since=None, until="")
        assert (found.verdict, found.missing) == (expected, int(expected == "missing"))
        before = AuditCheckpoint(found.end, {"a": told}, found.surplus)


def test_a_restarted_gateway_makes_one_range_uncertain_and_reports_no_loss() -> None:
    before = AuditCheckpoint(100, {"a": Acknowledged(1.0, 100, 0, 100)})
    what = uncounted(PLACE, before, {"a": Acknowledged(2.0, 10, 105, 115)})  # five were stored since the last audit
    assert what is not None
    assert (what.begin, what.end, what.acknowledged) == (100, 115, 10)
    assert balance(what, Counted(15, 0, {}), before, gateways=1, since="", until="").verdict == "uncertain"
    assert balance(what, Counted(9, 0, {}), before, gateways=1, since="", until="").missing == 1


def test_records_stored_between_polls_of_two_gateways_are_no_loss() -> None:
    told = {"a": Acknowledged(1.0, 50, 0, 90), "b": Acknowledged(1.0, 40, 1, 100)}
    what = uncounted(PLACE, None, told)
    assert what is not None
    found = balance(what, Counted(100, 0, {}), None, gateways=2, since=None, until="")
    assert (found.verdict, found.surplus) == ("whole", 10)
    before = AuditCheckpoint(found.end, told, found.surplus)
    what = uncounted(PLACE, before, {**told, "a": Acknowledged(1.0, 62, 0, 102)})
    assert what is not None
    assert (what.begin, what.end, what.acknowledged) == (100, 102, 12)
    assert balance(what, Counted(2, 0, {}), before, gateways=2, since="", until="").verdict == "whole"
    assert balance(what, Counted(1, 0, {}), before, gateways=2, since="", until="").missing == 1


def test_records_deleted_before_the_audit_are_no_loss() -> None:
    what = uncounted(PLACE, None, {"a": Acknowledged(1.0, 50, 0, 50)})
    assert what is not None
    found = balance(what, Counted(20, 0, {}, deleted=True), None, gateways=1, since=None, until="")
    assert (found.verdict, found.missing) == ("deleted", 0)


def test_a_recreated_topic_is_uncertain() -> None:
    before = AuditCheckpoint(100, {"a": Acknowledged(1.0, 100, 0, 100)})
    what = uncounted(PLACE, before, {"a": Acknowledged(1.0, 5, 0, 5)})
    assert what is not None
    assert (what.begin, what.end, what.acknowledged, what.certain) == (0, 5, 5, False)


def test_truncated_and_overwritten_records_are_missing() -> None:
    before = AuditCheckpoint(100, {"a": Acknowledged(1.0, 100, 0, 100)})
    what = uncounted(
        PLACE, before, {"a": Acknowledged(1.0, 105, 0, 95)}
    )  # the log was truncated to 90, and five more records were stored
    assert what is not None
    assert (what.begin, what.end, what.acknowledged, what.certain) == (0, 95, 105, True)
    assert balance(what, Counted(95, 0, {}), before, gateways=1, since="", until="").missing == 10


AUDIT = """
job = "bridge-audit"
name = "AUDIT"
source = { topics = ["TOPIC"], gateways = ["GATEWAY"] }
sink = { kafka = "AUDIT" }
run = { bootstrap_servers = "BOOTSTRAP" }
"""


async def test_acknowledged_records_are_found_and_a_missing_one_is_reported(
    *, gateway: Any, admin: Any, new_topic: Any, bootstrap: str, tmp_path: Path
) -> None:
    topic, target = f"-audit-{uuid.uuid4().hex}", await new_topic(partitions=1)
    await admin.create_topics([NewTopic(topic, 2, 1)])  # sorts first among the topics with metrics
    await until_led(admin, topic)
    management = f"http://{gateway.addresses['management']}"
    text = AUDIT.replace("TOPIC", topic).replace("AUDIT", target)
    (tmp_path / "audit.toml").write_text(text.replace("GATEWAY", management).replace("BOOTSTRAP", bootstrap))
    job: Any = read(tmp_path / "audit.toml").spec
    one_more = False

    async def fetched(address: str) -> str:
        figures = await fetch(address)
        if not one_more:
            return figures
        name = rf'(trivium_publisher_stored_total{{partition="1",topic="{topic}"}}) ([0-9.]+)'
        lied, count = re.subn(name, lambda found: f"{found[1]} {float(found[2]) + 1}", figures)
        assert count == 1
        return lied

    said: list[str] = []

    async def look(findings: int) -> tuple[int, list[dict[str, Any]]]:
        missing = await audit.run(
            job, report=lambda _: None, say=said.append, stopped=asyncio.Event(), once=True, fetched=fetched
        )
        records = await read_committed(bootstrap, target, findings)
        return missing, [json.loads(record.value) for record in records]

    async def publish(count: int) -> None:
        body = {"records": [{"value": {"n": n}, "partition": n % 2} for n in range(count)]}
        headers = {"Content-Type": "application/vnd.kafka.json.v2+json"}
        url = f"http://{gateway.addresses['http']}/topics/{topic}"
        async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()

    await publish(60)
    missing, found = await look(2)
    assert missing == 0
    assert [(one["partition"], one["acknowledged"], one["stored"], one["verdict"]) for one in found] == [
        (0, 30, 30, "whole"), (1, 30, 30, "whole"),
    ]  # fmt: skip
    assert await look(2) == (0, found)  # nothing new
    await publish(10)
    one_more = True
    missing, found = await look(4)
    assert missing == 1
    [bad] = [one for one in found if one["verdict"] == "missing"]
    assert (bad["topic"], bad["partition"], bad["acknowledged"], bad["stored"]) == (topic, 1, 6, 5)
    assert sum(bad["minutes"].values()) == 5
    assert [line for line in said if line.startswith(f"{topic}-1, offsets 30 to 35")]
