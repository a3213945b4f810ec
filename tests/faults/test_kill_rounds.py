"""A short `python -m loadtest kills`: the gateway is killed under load."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.gateway import GatewayProcess
from loadtest.scenarios.kills import Plan, Round


@pytest.mark.timeout(400)
async def test_nothing_acknowledged_is_lost_and_qos_2_is_exactly_once(bootstrap: str, tmp_path: Path) -> None:
    plan = Plan(kills=3, senders=1, subscribers=1, rate=100, window=20, between=0.5, early=0.3, seed=2)
    gateway = GatewayProcess(tmp_path, bootstrap)
    try:
        await gateway.start()
        outcome = await Round(gateway, plan, print).run()
    finally:
        await gateway.stop()
    assert outcome.problems == []
    assert outcome.acknowledged == outcome.sent > 100
    assert (outcome.lost_in_kafka, outcome.doubled_qos_2) == (0, 0)
    assert outcome.reconnects >= 3 * 4  # clients were connected at most of the kills
    assert gateway.starts == 4
