"""A short `python -m loadtest kills` of each protocol: the gateway is killed under load."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.engine.rounds import COMMIT_INTERVAL_S, Plan
from loadtest.engine.stand import Stand
from loadtest.scenarios.kills import run


@pytest.mark.timeout(400)
async def test_nothing_acknowledged_is_lost_and_qos_2_is_exactly_once(bootstrap: str, tmp_path: Path) -> None:
    plan = Plan(kills=3, senders=1, subscribers=1, rate=100, window=20, between=0.5, early=0.3, patient=0, seed=2)
    async with Stand(tmp_path, bootstrap) as stand:
        await run(stand, plan)
    assert stand.problems == []
    (row,) = stand.rows
    assert row["acknowledged"] == row["sent"] > 100
    assert (row["lost"], row["stored twice at QoS 2"], row["missing"]) == (0, 0, 0)
    assert row["reconnects"] >= 3 * 4  # clients were connected at most of the kills
    assert row["starts"] == 4


@pytest.mark.timeout(400)
async def test_no_accepted_message_is_lost_and_no_committed_one_is_redelivered(bootstrap: str, tmp_path: Path) -> None:
    # A long grace period: only the script, which runs alone on a machine, measures how soon a commit follows.
    plan = Plan("amqp", kills=3, senders=1, rate=100, between=0.3, early=0.3, patient=0.34, grace=15, seed=7)
    async with Stand(tmp_path, bootstrap) as stand:
        await run(stand, plan)
    assert stand.problems == []
    (row,) = stand.rows
    assert row["acknowledged"] == row["sent"] > 100
    assert (row["lost"], row["missing"], row["again below the commit"]) == (0, 0, 0)
    assert row["oldest again s"] <= COMMIT_INTERVAL_S + plan.grace
    assert row["reconnects"] >= 2 * 5  # two senders, four groups: clients were connected at most of the kills
    assert row["starts"] == 4
