"""Runs a load test: warm-up, rounds or a ramp, the remaining deliveries, verification."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from hdrh.histogram import HdrHistogram

from loadtest.clients.topics import create_topic
from loadtest.gateway import process_cpu, process_resident
from loadtest.numbering import Numbering
from loadtest.report import histogram, percentiles
from loadtest.run.environment import environment
from loadtest.run.knee import Search, Step
from loadtest.run.pool import Answer, Pool, generators
from loadtest.run.saturation import Share, check
from loadtest.run.scenario import Scenario
from loadtest.run.tally import Tally, read

FORMAT: Final = 1
"""The version of the result's format; other versions cannot be compared."""
AHEAD_S: Final = 0.2
"""How long before its start a step is announced, so that all processes start together."""
MIB: Final = 1024 * 1024

Say = Callable[[str], None]
Row = dict[str, Any]


class Run:
    """One load test."""

    def __init__(self, scenario: Scenario, say: Say) -> None:
        self._scenario = scenario
        self._say = say
        self._numbering = Numbering()
        self._topic = scenario.topic or f"load-{self._numbering.run}"
        self._series: list[Row] = []
        self._began = time.perf_counter()
        self._reported_at = 0.0
        self._connection_bytes: float | None = None
        self._shares: list[Share] = []

    async def run(self) -> Row:
        """Run the test and return its result, ready to be written.

        Raises:
            GeneratorError: a connection failed, or a generator did.
            SaturatedError: the generators were the bottleneck.
        """
        scenario = self._scenario
        found = environment()
        target = scenario.target
        if scenario.topic is None:
            assert target.kafka is not None
            await create_topic(target.kafka, self._topic, scenario.partitions)
        before = self._resident()
        async with generators(scenario, self._numbering.run, self._topic) as pool:
            connections = sum(one.connections for one in scenario.parts)
            if before is not None:
                self._connection_bytes = ((self._resident() or 0) - before) / connections
            self._say(f"{connections} connections by {len(pool)} processes; topic {self._topic}")
            self._began = time.perf_counter()
            await self._step(
                pool, scenario.warm_up, scenario.ramp.start if scenario.ramp is not None else scenario.rate
            )
            self._shares.clear()
            knee = None
            if scenario.ramp is not None:
                knee, rounds = await self._ramp(pool)
            else:
                rounds = [await self._step(pool, scenario.duration, scenario.rate) for _ in range(scenario.rounds)]
            check(self._shares)
            received = await self._received(pool)
            counts = await pool.ask({"counts": True})
        verdict = await self._verdict(counts) if scenario.verify else None
        sent = sum(sum(one["sent"].values()) for one in counts)
        receivers = sum(one.connections for one in scenario.receive)
        result: Row = {
            "format": FORMAT,
            "name": scenario.name,
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "scenario": scenario.model_dump(mode="json"),
            "environment": found,
            "rounds": rounds,
            "summary": summary(rounds),
            "knee": knee,
            "series": self._series,
            "generators": [
                {
                    "cpu": max(one["generator cpu"][place] for one in rounds),
                    "waited": max(one["generator waited"][place] for one in rounds),
                }
                for place in range(len(pool))
            ],
            "connections": connections,
            "connection bytes": self._connection_bytes,
            "deliveries": {"expected": sent * receivers, "received": received} if receivers else None,
            "verdict": verdict,
        }
        result["problems"] = problems(result)
        return result

    def _resident(self) -> int | None:
        """Return the target's resident memory; None if it is not on this machine."""
        pid = self._scenario.target.pid
        if pid is None:
            return None
        try:
            return process_resident(pid)
        except OSError:
            return None

    def _cpu(self) -> float | None:
        pid = self._scenario.target.pid
        if pid is None:
            return None
        with contextlib.suppress(OSError):
            return process_cpu(pid)
        return None

    async def _step(self, pool: Pool, duration: float, rate: float | None) -> Row:
        """Run one step on all generators and return its row."""
        begin = time.perf_counter() + AHEAD_S
        seconds: dict[int, list[Answer]] = {}
        cpu = self._cpu()

        def on_tick(_generator: int, tick: Answer) -> None:
            some = seconds.setdefault(round(tick["at"]), [])
            some.append(tick)
            if len(some) == len(pool):
                self._second(begin, some)

        answers = await pool.ask({"step": [begin, duration, rate]}, on_tick)
        used = self._cpu()
        latencies = _merged(one["latencies"] for one in answers)
        through = _merged(one["through"] for one in answers)
        took = max(one["seconds"] for one in answers)
        answered = sum(one["answered"] for one in answers)
        p99 = latencies.get_value_at_percentile(99) / 1000
        for one in answers:
            late = _merged([one["late"]]).get_value_at_percentile(99) / 1000 if rate is not None else 0.0
            self._shares.append(Share(one["cpu"] / one["seconds"], one["waited"] / one["seconds"], late, p99))
        row: Row = {
            "rate": rate,
            "per second": sum(one["in_time"] for one in answers) / took,
            **percentiles(latencies),
            "cpu us": (used - cpu) / answered * 1e6 if used is not None and cpu is not None and answered else None,
            "memory MiB": None if (resident := self._resident()) is None else resident / MIB,
            "generator cpu": [round(one["cpu"] / one["seconds"], 3) for one in answers],
            "generator waited": [round(one["waited"] / one["seconds"], 3) for one in answers],
            "generator late p99 ms": max(_merged([one["late"]]).get_value_at_percentile(99) / 1000 for one in answers),
            "sent": sum(one["sent"] for one in answers),
            "answered": answered,
            "planned": None if rate is None else sum(one["planned"] for one in answers),
            "unsent": sum(one["unsent"] for one in answers),
            "unanswered": sum(one["unanswered"] for one in answers),
            "backlog": 0 if rate is None else sum(one["planned"] - one["in_time"] for one in answers),
            "refused": _summed(one["refused"] for one in answers),
            "errors": sorted({error for one in answers for error in one["errors"]}),
        }
        if self._scenario.receive:
            row["delivery"] = percentiles(through)
        return row

    def _second(self, begin: float, ticks: Sequence[Answer]) -> None:
        """Record the ticks of one second from all generators, and print a line now and then."""
        at = begin - self._began + max(tick["at"] for tick in ticks)
        latencies = _merged(tick["latencies"] for tick in ticks)
        answered = sum(tick["answered"] for tick in ticks)
        begun = not self._series or answered < self._series[-1]["answered"]
        before = {"at": begin - self._began, "answered": 0} if begun else self._series[-1]
        resident, cpu = self._resident(), self._cpu()
        row: Row = {
            "at": round(at, 2),
            "answered": answered,
            "per second": (answered - before["answered"]) / max(1e-9, at - before["at"]),
            "p50 ms": latencies.get_value_at_percentile(50) / 1000,
            "p99 ms": latencies.get_value_at_percentile(99) / 1000,
            "received": sum(tick["received"] for tick in ticks),
            "memory MiB": None if resident is None else resident / MIB,
            "cpu s": cpu,
        }
        self._series.append(row)
        if at - self._reported_at >= self._scenario.every:
            self._reported_at = at
            memory = "" if resident is None else f", gateway {resident / MIB:.0f} MiB"
            self._say(
                f"{at:.0f} s: {row['per second']:,.0f}/s, p50 {row['p50 ms']:.1f} ms, p99 {row['p99 ms']:.1f} ms"
                + memory
            )

    async def _ramp(self, pool: Pool) -> tuple[Row, list[Row]]:
        """Search the knee; return it, and the rows of all steps."""
        ramp = self._scenario.ramp
        assert ramp is not None
        search = Search(ramp.start, ramp.close)
        rows: list[Row] = []
        while (rate := search.next) is not None:
            row = await self._step(pool, ramp.step, rate)
            check(self._shares)
            failures = sum(row["refused"].values()) + row["unanswered"] + len(row["errors"])
            good = Step(rate, row["p99 ms"], row["planned"], row["backlog"], failures).is_good(ramp.p99_ms)
            rows.append(row | {"good": good})
            self._say(
                f"{rate:,.0f}/s is {'good' if good else 'too much'}: {row['per second']:,.0f}/s,"
                f" p99 {row['p99 ms']:.1f} ms, backlog {row['backlog']:,}, {failures:,} failures"
            )
            search.report(good=good)
        return {"rate": search.good, "too much": search.bad, "p99_ms": ramp.p99_ms}, rows

    async def _received(self, pool: Pool) -> int:
        """Wait until the readers have received everything, or nothing for `patience`."""
        count, since = -1, time.perf_counter()
        expected = sum(one["expected"] for one in await pool.ask({"received": True}))
        while time.perf_counter() - since < self._scenario.patience:
            now = sum(one["received"] for one in await pool.ask({"received": True}))
            if now != count:
                count, since = now, time.perf_counter()
            if count >= expected * sum(one.connections for one in self._scenario.receive):
                break
            await asyncio.sleep(0.1)
        return max(0, count)

    async def _verdict(self, answers: Sequence[Answer]) -> Row:
        """Compare the acknowledged messages with Kafka."""
        sent = {int(sender): count for one in answers for sender, count in one["sent"].items()}
        acknowledged = {int(sender): runs for one in answers for sender, runs in one["acknowledged"].items()}
        self._say(f"reading {sum(sent.values()):,} messages back from Kafka")
        tally = Tally(sent)
        assert self._scenario.target.kafka is not None
        await read(self._scenario.target.kafka, self._topic, self._numbering.run, tally)
        return tally.verdict(acknowledged).row()


def _merged(encoded: Any) -> HdrHistogram:
    whole = histogram()
    for one in encoded:
        whole.decode_and_add(one)
    return whole


def _summed(counts: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            found[name] = found.get(name, 0) + count
    return found


MEASURES: Final = ("per second", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "p100 ms", "cpu us", "memory MiB")
"""The measures of a round whose medians are the summary."""


def summary(rounds: Sequence[Row]) -> dict[str, float]:
    """Return the medians of the rounds."""
    flat = [one | {f"delivery {name}": value for name, value in one.get("delivery", {}).items()} for one in rounds]
    names = (*MEASURES, *(f"delivery {name}" for name in MEASURES))
    return {
        name: statistics.median(one[name] for one in flat)
        for name in names
        if all(one.get(name) is not None for one in flat)
    }


def problems(result: Row) -> list[str]:
    """Return what went wrong, as sentences."""
    found = [error for one in result["rounds"] for error in one["errors"]]
    unanswered = sum(one["unanswered"] for one in result["rounds"])
    if unanswered:
        found.append(f"{unanswered:,} messages were not acknowledged")
    if result["knee"] is None:
        refused = _summed(one["refused"] for one in result["rounds"])
        found += [f"{count:,} messages were refused: {code}" for code, count in refused.items()]
    elif result["knee"]["rate"] is None:
        found.append("no rate was served well")
    verdict = result["verdict"]
    if verdict is not None:
        if verdict["lost"]:
            found.append(f"{verdict['lost']:,} of {verdict['acknowledged']:,} acknowledged messages are not in Kafka")
        found += [f"{verdict[name]:,} messages are {name}" for name in ("duplicated", "reordered") if verdict[name]]
    deliveries = result["deliveries"]
    if deliveries is not None and deliveries["received"] < deliveries["expected"]:
        found.append(f"{deliveries['expected'] - deliveries['received']:,} deliveries are missing")
    return found
