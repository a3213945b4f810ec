"""A replay, a replay of dead letters and an audit go on beside a broken record, name its offsets, and end with 1."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mapping.dead_letters import Cause, dead_letter
from mapping.record import Received
from tests.support.altering_proxy import AlteringProxy
from tests.support.job_processes import start_job
from tests.support.raw_batches import BREAKS, batch, produce_raw
from tests.support.topics import read_committed

NAMED = "a name that is not UTF-8"
KINDS = [NAMED, "wrong checksum", "unknown codec"]
REPLAY = """
job = "replay"
name = "TARGET"
source = { topics = ["TOPIC"], since = 2020-01-01T00:00:00Z }
sink = { kafka = "TARGET" }
run = { bootstrap_servers = "BOOTSTRAP" }
"""
LETTERS = """
job = "dlq-replay"
name = "TARGET"
source = { topics = ["TOPIC"] }
sink = { kafka = "TARGET" }
run = { bootstrap_servers = "BOOTSTRAP" }
"""
AUDIT = """
job = "bridge-audit"
name = "TARGET"
source = { topics = ["TOPIC"], gateways = ["GATEWAY"] }
sink = { kafka = "TARGET" }
run = { bootstrap_servers = "BOOTSTRAP" }
"""


async def run(path: Path, *options: str) -> tuple[int | None, str]:
    """Run a job file as a process; return its exit code and what it said."""
    process = await start_job(path, *options)
    async with asyncio.timeout(120):
        _, said = await process.communicate()
    return process.returncode, said.decode()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("job", [REPLAY, LETTERS], ids=["replay", "dlq-replay"])
async def test_a_replay_goes_on(bootstrap: str, new_topic: Any, tmp_path: Path, job: str, kind: str) -> None:
    job_file = tmp_path / "job.toml"
    topic, target = await new_topic(partitions=1), await new_topic(partitions=1)
    host, _, port = bootstrap.rpartition(":")
    for_letters = Received(topic, b"k", b"v", (), 0, 0, 0)

    def made(number: int, *more: tuple[bytes, bytes]) -> bytes:
        """Make a batch of one record, which is a dead letter too."""
        letter = dead_letter(
            Received(topic, b"k", b"%d" % number, (), 0, 0, number), for_letters.topic, Cause("g", 3, "rejected")
        )
        headers = [(name.encode(), value) for name, value in letter.headers]
        return batch([b"%d" % number], [*headers, *more])

    broken = made(1, (b"caf\xe9", b"1"))
    for raw in (made(0), broken, made(2)):
        await produce_raw(bootstrap, topic, raw)
    async with AlteringProxy((host, int(port))).running() as proxy:
        if kind != NAMED:
            proxy.alter(broken, BREAKS[kind])
        text = job.replace("TOPIC", topic).replace("TARGET", target).replace("BOOTSTRAP", proxy.bootstrap)
        job_file.write_text(text)
        code, said = await run(job_file)
        replayed = [0, 1, 2] if kind == NAMED else [0, 2]
        found = await read_committed(bootstrap, target, len(replayed))
        assert [int(record.value) for record in found] == replayed
        if kind == NAMED:
            assert code == 0, said
            assert ("caf\ufffd", b"1") in found[1].headers
        else:
            assert code == 1
            assert f"not replayed: {topic}-0, offset 1: " in said
        assert await run(job_file) == (0, "")  # nothing is left


@pytest.mark.parametrize("kind", KINDS)
async def test_an_audit_goes_on(bootstrap: str, gateway: Any, new_topic: Any, tmp_path: Path, kind: str) -> None:
    job_file = tmp_path / "job.toml"
    topic, target = await new_topic(partitions=1), await new_topic(partitions=1)
    host, _, port = bootstrap.rpartition(":")
    broken = batch([b"1"], [(b"caf\xe9", b"1")])
    headers = {"Content-Type": "application/vnd.kafka.json.v2+json"}
    async with aiohttp.ClientSession(f"http://{gateway.addresses['http']}", headers=headers) as http:

        async def publish() -> None:
            async with http.post(f"/topics/{topic}", json={"records": [{"value": 1}]}) as answer:
                assert answer.status == 200

        await publish()
        await produce_raw(bootstrap, topic, broken)
        await publish()
    async with AlteringProxy((host, int(port))).running() as proxy:
        if kind != NAMED:
            proxy.alter(broken, BREAKS[kind])
        text = AUDIT.replace("TOPIC", topic).replace("TARGET", target).replace("BOOTSTRAP", proxy.bootstrap)
        text = text.replace("GATEWAY", f"http://{gateway.addresses['management']}")
        job_file.write_text(text)
        code, said = await run(job_file, "--once")
    (found,) = [json.loads(record.value) for record in await read_committed(bootstrap, target, 1)]
    assert (found["acknowledged"], found["stored"], found["verdict"]) == (2, 2, "whole")
    assert found["others"] == (1 if kind == NAMED else 0)
    assert code == (0 if kind == NAMED else 1), said
    assert (f"not counted: {topic}-0, offset 1: " in said) == (kind != NAMED)
