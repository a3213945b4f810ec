"""Runs `python -m loadtest faults`: starts Kafka, its proxy and a gateway for each fault, and writes the report."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from loadtest.faults import of_clients, of_cluster, of_gateway, of_kafka, pages
from loadtest.faults.bench import Bench, Fault, Outcome, Plan
from loadtest.faults.cluster import three_brokers
from loadtest.faults.disk import tiny_kafka
from loadtest.faults.kafka import kafka_behind_proxy


def table(plan: Plan) -> list[Fault]:
    """Return all faults."""
    return [*of_kafka.faults(plan), *of_cluster.faults(plan), *of_gateway.faults(plan), *of_clients.faults(plan)]


async def run(
    directory: Path, plan: Plan, only: list[str], say: Callable[[str], None], *, secured: str | None = None
) -> list[Outcome]:
    """Run all faults, or those whose name starts with one of `only`; writes `faults.md` and `faults.html`.

    `secured` selects only the faults of three brokers, with this listener (`loadtest.faults.cluster.LOGINS`).
    """
    outcomes: list[Outcome] = []
    async with kafka_behind_proxy(directory / "kafka") as (kafka, proxy):
        bench = Bench(
            directory, plan, kafka, proxy, say=say, tiny=lambda: tiny_kafka(directory / "tiny", say),
            cluster=lambda: three_brokers(directory / "cluster", secured),
        )  # fmt: skip
        for fault in table(plan):
            if secured is not None and not fault.in_sync:
                continue
            if only and not any(fault.name.startswith(name) for name in only):
                continue
            if not kafka.is_running:
                await kafka.start()
            outcomes.append(await bench.run(fault))
            write(directory, plan, outcomes, secured)
    return outcomes


def write(directory: Path, plan: Plan, outcomes: list[Outcome], secured: str | None) -> None:
    """Write the report so far."""
    rate = f"{plan.rate:g} messages per second of each protocol" if plan.rate else "as fast as acknowledged"
    note = (
        f"{plan.connections} connections of each protocol, windows of {plan.window}, {plan.size} bytes, {rate}"
        f"{'' if secured is None else f'; listener {secured}, with ACLs'};"
        f" budget {plan.budget} MiB, delivery timeout {plan.delivery_timeout:g} s; load average"
        f" {os.getloadavg()[0]:.1f} at the end, {os.cpu_count()} processors."
    )
    (directory / "faults.md").write_text(pages.markdown(outcomes, note))
    (directory / "faults.html").write_text(pages.page(outcomes, note))
