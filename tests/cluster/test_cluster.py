"""`make cluster` starts three brokers, restarts a killed one on request, and leaves no process behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from tests.support.waiting import wait_until

pytestmark = pytest.mark.cluster


async def test_a_killed_broker_restarts_on_sighup(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    argv = ["-m", "tools.cluster", "--directory", str(tmp_path / "data"), "--ready-file", str(ready)]
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=asyncio.subprocess.PIPE)

    def facts() -> dict[str, Any]:
        return dict(json.loads(ready.read_text())) if ready.exists() else {"nodes": {}}

    try:
        await wait_until(lambda: len(facts()["nodes"]) == 3, 200)
        assert process.stdout is not None
        assert (await process.stdout.readline()).decode() == f"bootstrap servers: {facts()['bootstrap_servers']}\n"
        first = facts()["nodes"]
        os.kill(first["2"], signal.SIGKILL)
        await wait_until(lambda: "2" not in facts()["nodes"])
        assert set(facts()["nodes"]) == {"1", "3"}, "it stays away"
        process.send_signal(signal.SIGHUP)
        await wait_until(lambda: "2" in facts()["nodes"], 200)
        again = facts()["nodes"]
        assert again["2"] != first["2"]
        assert {**again, "2": first["2"]} == first, "the others went on"
        admin = AIOKafkaAdminClient(bootstrap_servers=facts()["bootstrap_servers"])
        await admin.start()
        cluster = await admin.describe_cluster()
        await admin.close()
        assert {broker["node_id"] for broker in cluster["brokers"]} == {1, 2, 3}
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert not ready.exists()
    for pid in again.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
