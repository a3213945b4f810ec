"""How the fault bench evaluates its samples: when throughput has recovered, and the report."""

from __future__ import annotations

import collections
import re
from pathlib import Path

import pytest

from loadtest.engine.load import Load, Sample, Stored
from loadtest.engine.steady import PROTOCOLS
from loadtest.faults import pages
from loadtest.faults.bench import Course, Fault, Outcome, Plan, Stage
from loadtest.faults.run import FAULTS
from loadtest.gateway import GatewayProcess
from loadtest.verify import Verdict


def load_with(rates: list[float], tmp_path: Path) -> Load:
    """Make a load with one sample per half second."""
    load = Load(GatewayProcess(tmp_path, None), "", Plan().terms)
    load.samples = [
        Sample((number + 1) / 2, dict.fromkeys(PROTOCOLS, rate / 3), {}, 0) for number, rate in enumerate(rates)
    ]
    return load


@pytest.mark.parametrize(
    ("rates", "since", "found"),
    [
        ([100] * 10, 2.0, 0.0),
        ([100, 100, 0, 0, 0, 0, 95, 95, 100, 100], 1.0, 2.0),
        ([100, 100, 0, 0, 300, 0, 0, 90, 90, 90], 1.0, 0.5),  # a burst counts: the average over a second is enough
        ([100, 100, 0, 0, 150, 0, 0, 90, 90, 90], 1.0, 2.5),  # this burst is not enough
        ([100, 100, 0, 0, 89, 89, 89, 89, 89, 89], 1.0, None),
        ([100, 100, 0, 0, 0, 0, 0, 0, 0, 100], 1.0, None),  # half a second is too short
    ],
)
def test_throughput_has_recovered_when_a_second_has_nine_tenths(
    rates: list[float], since: float, found: float | None, tmp_path: Path
) -> None:
    assert load_with(rates, tmp_path).recovered(100, since) == found


async def nothing(stage: Stage) -> None:
    """What | is done for {stall:g} s."""


def outcome(recovered: float | None = 0.5, **changes: object) -> Outcome:
    samples = [Sample(at / 4, dict.fromkeys(PROTOCOLS, 10.0), dict.fromkeys(PROTOCOLS, 1.0), 1 << 27)
               for at in range(40)]  # fmt: skip
    told = {one: collections.Counter[str]() for one in PROTOCOLS} | {"mqtt": collections.Counter({"PUBACK 0x83": 3})}
    made = Outcome(
        Fault("a <b> fault", nothing), Course(3.0, 6.0, 30.0, recovered, 0, None),
        Stored({one: Verdict(100, 100, 0, 1, 0, 0) for one in PROTOCOLS}), told, collections.Counter({"cuts": 20}),
        90 << 20, 128 << 20, 186 << 20, samples, [],
    )  # fmt: skip
    return made._replace(**changes)  # type: ignore[arg-type]


def test_the_report_has_a_row_and_a_plot_for_each_fault_and_needs_nothing_else() -> None:
    outcomes = [outcome(), outcome(recovered=None, problems=["a & b are lost"])]
    page = pages.page(outcomes, Plan(), "a note")
    assert page.count("<svg") == 2
    assert page.count("<polyline") == 2 * 7, "three protocols twice, and memory"
    assert "a &lt;b&gt; fault" in page
    assert "a &amp; b are lost" in page
    assert not re.search(r"<script|<link|src=|href=|url\(", page)
    assert page.count("<p>What | is done for 30 s.</p>") == 2
    names, *rows = (re.findall(r"<t[hd]>(.*?)</t[hd]>", line) for line in re.findall(r"<tr>(.*?)</tr>", page))
    first, second = (dict(zip(names, row, strict=True)) for row in rows)
    assert first["acknowledged"] == "300"
    assert first["refusals"] == "mqtt: PUBACK 0x83 x 3"
    assert (first["back to 90 % after s"], second["back to 90 % after s"]) == ("0.50", "never")
    assert (first["problems"], second["problems"]) == ("0", "1")


def test_no_fault_name_is_a_prefix_of_another() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names)) > 20
    assert all(fault.what(Plan()) for fault in FAULTS)
