"""A short `python -m loadtest hostile`: hostile HTTP requests to a running gateway."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from loadtest.clients.hostile.http_damage import attack
from loadtest.engine.stand import Stand
from loadtest.scenarios.hostile import Requests, hostile


@pytest.mark.timeout(400)
async def test_hostile_requests_are_answered_or_closed_without_loss_or_leaks(bootstrap: str, tmp_path: Path) -> None:
    async with Stand(tmp_path, bootstrap) as stand:
        await hostile(stand, Requests(requests=300, at_once=30, seed=3))
    assert stand.problems == []
    (row,) = stand.rows
    assert row["200"] > 10
    assert row["left in mid-poll"] > 0
    assert row["honest"] > 30


def test_an_attack_is_reproducible() -> None:
    found = [attack(random.Random(number), "t", "silent") for number in range(300)]
    assert found == [attack(random.Random(number), "t", "silent") for number in range(300)]
    assert {one.ending for one in found} == {"wait", "leave", "reset"}
