"""Runs `python -m loadtest faults`: starts Kafka, its proxy and a gateway for each fault, and writes the report."""

from __future__ import annotations

import os
from pathlib import Path

from loadtest.engine.command import Scenario
from loadtest.engine.stand import Stand
from loadtest.faults import of_clients, of_cluster, of_gateway, of_kafka, pages  # noqa: F401 - they declare faults
from loadtest.faults.bench import FAULTS, Bench, Outcome, Plan
from loadtest.faults.cluster import three_brokers
from loadtest.faults.disk import tiny_kafka
from loadtest.faults.kafka import kafka_behind_proxy


async def run(stand: Stand, plan: Plan) -> None:
    """Run all faults, or those whose name starts with one of `only`; writes `faults.html`."""
    outcomes: list[Outcome] = []
    directory = stand.directory
    async with kafka_behind_proxy(directory / "kafka") as (kafka, proxy):
        bench = Bench(
            directory, plan, kafka, proxy, say=stand.say, tiny=lambda: tiny_kafka(directory / "tiny", stand.say),
            cluster=lambda: three_brokers(directory / "cluster", plan.secured),
        )  # fmt: skip
        for fault in FAULTS:
            if plan.secured is not None and not fault.in_sync:
                continue
            if plan.only and not any(fault.name.startswith(name) for name in plan.only):
                continue
            if not kafka.is_running:
                await kafka.start()
            outcome = await bench.run(fault)
            outcomes.append(outcome)
            stand.row(**outcome.row())
            stand.problems += [f"{fault.name}: {text}" for text in outcome.problems]
            write(directory, plan, outcomes)
    stand.say(f"report: {directory / 'faults.html'}")


def write(directory: Path, plan: Plan, outcomes: list[Outcome]) -> None:
    """Write the report so far."""
    rate = f"{plan.rate:g} messages per second of each protocol" if plan.rate else "as fast as acknowledged"
    note = (
        f"{plan.connections} connections of each protocol, windows of {plan.window}, {plan.size} bytes, {rate}"
        f"{'' if plan.secured is None else f'; listener {plan.secured}, with ACLs'};"
        f" budget {plan.budget} MiB, delivery timeout {plan.delivery_timeout:g} s; load average"
        f" {os.getloadavg()[0]:.1f} at the end, {os.cpu_count()} processors."
    )
    (directory / "faults.html").write_text(pages.page(outcomes, plan, note))


SCENARIOS = (
    Scenario(
        "faults", "inject one fault after the other under load, and write a report", Plan(), run, own_kafka=True,
        lines=False,
    ),
)  # fmt: skip
