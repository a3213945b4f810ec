"""A short `python -m loadtest faults --secured`: a leader is lost, and the gateway has to log in again."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from loadtest.faults.bench import Bench, Plan
from loadtest.faults.cluster import LOGINS, three_brokers
from loadtest.faults.proxy import Proxy
from loadtest.faults.run import FAULTS

pytestmark = pytest.mark.cluster
PLAN = Plan(connections=2, window=10, rate=50, before=4, after=0.1, short=0.5, patience=120)
"""Half of `before` measures the usual throughput; a quarter of a second measured up to 1.5 times the rate."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize("listener", LOGINS)
async def test_no_message_is_lost_with_a_leader_for_each_kind_of_login(tmp_path: Path, listener: str) -> None:
    (fault,) = (one for one in FAULTS if one.name == "leader killed")
    async with three_brokers(tmp_path / "cluster", listener) as cluster:
        unused = Proxy(("127.0.0.1", 0))
        bench = Bench(tmp_path, PLAN, cluster, unused, cluster=lambda: contextlib.nullcontext(cluster))
        outcome = await bench.run(fault)
    assert outcome.problems == []
    assert min(verdict.acknowledged for verdict in outcome.stored.verdicts.values()) > 20
