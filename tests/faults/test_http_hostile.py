"""A short `python -m loadtest.scenarios.http_hostile`: hostile HTTP requests to a running gateway."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from loadtest.clients.http_damage import attack
from loadtest.gateway import GatewayProcess
from loadtest.scenarios.http_hostile import SETTINGS, Hostile


@pytest.mark.timeout(400)
async def test_hostile_requests_are_answered_or_closed_without_loss_or_leaks(bootstrap: str, tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path, bootstrap, environment=SETTINGS)
    try:
        await gateway.start()
        outcome = await Hostile(gateway, requests=300, at_once=30, seed=3).run()
    finally:
        await gateway.stop()
    assert outcome.problems == []
    assert sum(outcome.statuses.values()) == 300
    assert outcome.honest > 10


def test_an_attack_is_reproducible() -> None:
    found = [attack(random.Random(number), "t") for number in range(300)]
    assert found == [attack(random.Random(number), "t") for number in range(300)]
    assert {one.ending for one in found} == {"wait", "leave", "reset"}
