"""A short `python -m loadtest kills --protocol amqp`: the gateway is killed under AMQP consumers in groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.gateway import GatewayProcess
from loadtest.scenarios.amqp_kills import COMMIT_INTERVAL_S, AmqpRound, Plan


@pytest.mark.timeout(400)
async def test_no_accepted_message_is_lost_and_no_committed_one_is_redelivered(bootstrap: str, tmp_path: Path) -> None:
    # A long grace period: only the script, which runs alone on a machine, measures how soon a commit follows.
    plan = Plan(kills=3, senders=1, rate=100, window=20, between=0.3, early=0.3, patient=0.34, grace=15, seed=7)
    gateway = GatewayProcess(tmp_path, bootstrap)
    try:
        await gateway.start()
        outcome = await AmqpRound(gateway, plan, print).run()
    finally:
        await gateway.stop()
    assert outcome.problems == []
    assert outcome.accepted == outcome.sent > 100
    assert (outcome.lost_in_kafka, outcome.missing, outcome.again_below_the_commit) == (0, 0, 0)
    assert outcome.oldest_again_s <= COMMIT_INTERVAL_S + plan.grace
    assert outcome.reconnects >= 2 * 5  # two senders, four groups: clients were connected at most of the kills
    assert gateway.starts == 4
