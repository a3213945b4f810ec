"""Scenario `windows`: fixed and adaptive windows of AMQP links, with a fast, a slow and a jittery Kafka.

Senders send as much as they may, in turn to gateways that differ only in their windows. Slow and jittery Kafka is the
same broker behind a proxy. Each run is verified.
"""

from __future__ import annotations

import contextlib
import secrets
import statistics
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from loadtest.clients.amqp_messages import minimal
from loadtest.clients.topics import create_topic
from loadtest.faults.kafka import kafka_behind_proxy
from loadtest.gateway import GatewayProcess
from loadtest.numbering import Numbering
from loadtest.scenarios.steady import Load, send, verify_load
from loadtest.verify import Ledger

Say = Callable[[str], None]

ADAPTIVE: Final = "adaptive"
FIXED: Final = (100, 1_000, 5_000)
WINDOWS: Final[Mapping[str, Mapping[str, str]]] = {
    **{
        f"fixed {size}": {
            "TRIVIUM_AMQP__LINK_CREDIT": str(size),
            "TRIVIUM_AMQP__LINK_CREDIT_LEAST": str(size),
            "TRIVIUM_AMQP__SESSION_WINDOW_BYTES": str(1 << 30),  # only the credit limits the senders
        }
        for size in FIXED
    },
    ADAPTIVE: {},
}
"""Settings of the gateways."""
DELAYS: Final[Mapping[str, tuple[float, float]]] = {"fast": (0.0, 0.0), "slow": (0.05, 0.0), "jittery": (0.0, 0.1)}
"""Delay of each piece to and from Kafka in seconds, and its largest additional random delay."""
WARM: Final = 10  # the warm-up sends this fraction of a run's messages
SLOWER: Final = 0.95
"""The least throughput, relative to the best fixed window."""
SHORTER: Final = 0.5
"""The highest latency, relative to the largest fixed window."""
_ALL: Final = 1_000_000  # no sender's own window is smaller than its credit
_BROKEN: Final = ("lost", "duplicated", "reordered", "errors")
_MEASURES: Final = ("per second", "p50 ms", "p99 ms", "cpu us/msg")


class Plan(NamedTuple):
    """Parameters; messages of a run with fast Kafka, and with the others."""

    connections: int = 12
    messages: int = 300_000
    delayed: int = 60_000
    size: int = 100
    partitions: int = 3
    rounds: int = 5


async def measure(directory: Path, plan: Plan, only: str, say: Say) -> list[dict[str, Any]]:
    """Return a row for each Kafka and window: medians of the rounds, and sums of lost, duplicated and reordered."""
    rows: list[dict[str, Any]] = []
    async with kafka_behind_proxy(directory / "kafka") as (kafka, proxy):
        for name, (delay_s, jitter_s) in DELAYS.items():
            if only not in name:
                continue
            delayed = delay_s > 0 or jitter_s > 0
            bootstrap = "{}:{}".format(*proxy.address) if delayed else kafka.bootstrap_servers
            each_run = plan._replace(messages=plan.delayed) if delayed else plan
            proxy.delay_s = proxy.jitter_s = 0.0
            async with _gateways(directory / name, bootstrap) as gateways:
                proxy.delay_s, proxy.jitter_s = delay_s, jitter_s
                say(f"{name} Kafka, {each_run.messages} messages a run")
                found = await _in_turn(gateways, kafka.bootstrap_servers, each_run, say)
            rows += [{"": f"{name}, {window}", **_median(each)} for window, each in found.items()]
    return rows


async def _in_turn(
    gateways: Mapping[str, GatewayProcess], kafka: str, plan: Plan, say: Say
) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of each window."""
    found: dict[str, list[dict[str, Any]]] = {window: [] for window in gateways}
    for turn in range(plan.rounds + 1):
        for window, gateway in gateways.items():
            row = await _run(gateway, kafka, plan, plan.messages if turn else plan.messages // WARM, say)
            if turn:
                found[window].append(row)
                rate, median, late = row["per second"], row["p50 ms"], row["p99 ms"]
                say(f"{window}: {rate:,} per second, p50 {median:.0f} ms, p99 {late:.0f} ms")
    return found


async def _run(gateway: GatewayProcess, kafka: str, plan: Plan, messages: int, say: Say) -> dict[str, Any]:
    numbering, ledger = Numbering(), Ledger()
    topic = f"windows-{secrets.token_hex(4)}"
    await create_topic(kafka, topic, plan.partitions)
    address = str(gateway.addresses["amqp"])
    load = Load("amqp", address, topic, plan.connections, _ALL, messages, plan.size, kind=minimal)
    measured = await send(load, numbering, ledger, gateway.pid)
    for text in measured.errors:
        say(f"a connection failed: {text}")
    return {**measured.row(), **(await verify_load(kafka, load, numbering, ledger)).row()}


def _median(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    broken = {name: sum(row[name] for row in rows) for name in _BROKEN}
    return {name: statistics.median(row[name] for row in rows) for name in _MEASURES} | broken


@contextlib.asynccontextmanager
async def _gateways(directory: Path, bootstrap: str) -> AsyncIterator[dict[str, GatewayProcess]]:
    async with contextlib.AsyncExitStack() as stack:
        gateways = {}
        for window, settings in WINDOWS.items():
            home = directory / window.replace(" ", "-")
            gateway = gateways[window] = GatewayProcess(home, bootstrap, environment=settings)
            stack.push_async_callback(gateway.stop)
            await gateway.start()
        yield gateways


def check_windows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return where the adaptive window is not as good as required."""
    found = {row[""]: row for row in rows}
    problems = [f"{name}: {what} {row[what]}" for name, row in found.items() for what in _BROKEN if row[what]]
    for kafka in DELAYS:
        if f"{kafka}, {ADAPTIVE}" not in found:
            continue
        ours = found[f"{kafka}, {ADAPTIVE}"]
        fixed = [found[f"{kafka}, fixed {size}"] for size in FIXED]
        best = max(row["per second"] for row in fixed)
        if ours["per second"] < SLOWER * best:
            problems.append(f"{kafka}: {ours['per second']:,.0f} per second; a fixed window reaches {best:,.0f}")
        problems += [
            f"{kafka}: {name} of {ours[name]:.0f} ms; that of a window of {FIXED[-1]} is {fixed[-1][name]:.0f} ms"
            for name in ("p50 ms", "p99 ms")
            if ours[name] > SHORTER * fixed[-1][name]
        ]
    return problems
