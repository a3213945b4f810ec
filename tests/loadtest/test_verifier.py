"""The verifier finds exactly the messages that are lost, duplicated, reordered, or stored without an answer."""

from __future__ import annotations

import io
import json

import pytest
from aiokafka import AIOKafkaProducer
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from loadtest.clients.pace import Pace
from loadtest.numbering import HEADER_BYTES, Number, Numbering
from loadtest.report import Latencies, Report
from loadtest.verify import Arrivals, Ledger, read_topic


@given(sender=st.integers(0, 99_999), sequence=st.integers(0, 10**10 - 1), size=st.integers(0, 300))
def test_a_payload_contains_its_number(sender: int, sequence: int, size: int) -> None:
    numbering = Numbering()
    payload = numbering.payload(sender, sequence, size)
    assert len(payload) == max(size, HEADER_BYTES)
    assert numbering.read(payload) == Number(sender, sequence)


def test_foreign_payloads_have_no_number() -> None:
    numbering = Numbering("aaaaaaaa")
    other = Numbering("bbbbbbbb").payload(1, 2, 100)
    assert [numbering.read(payload) for payload in (None, b"", b"aaaaaaaa", b"21.5", other)] == [None] * 5


def judged(acknowledged: list[tuple[int, int]], arrived: list[tuple[int, int]]) -> dict[str, int]:
    ledger, arrivals = Ledger(), Arrivals(Numbering())
    for sender, sequence in acknowledged:
        ledger.acknowledge(sender, sequence)
    for sender, sequence in arrived:
        arrivals.add(Number(sender, sequence))
    verdict = arrivals.verdict(ledger)
    return {name: value for name, value in verdict.row().items() if value and name not in {"acknowledged", "stored"}}


def test_a_complete_run_has_no_findings() -> None:
    both = [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert judged(both, both) == {}
    assert judged([], []) == {}


def test_lost() -> None:
    assert judged([(0, 0), (0, 1), (1, 0)], [(0, 0)]) == {"lost": 2}


def test_a_message_of_another_sender_does_not_replace_a_lost_one() -> None:
    assert judged([(0, 7)], [(1, 7)]) == {"lost": 1, "unacknowledged_stored": 1}


def test_duplicated() -> None:
    assert judged([(0, 0), (0, 1)], [(0, 0), (0, 1), (0, 0), (0, 0)]) == {"duplicated": 2}


def test_a_duplicate_is_not_a_reordering_and_a_gap_is_neither() -> None:
    assert judged([], [(0, 0), (0, 5), (0, 0), (0, 6)]) == {"duplicated": 1, "unacknowledged_stored": 3}


def test_reordered_within_a_sender_only() -> None:
    assert judged([], [(0, 5), (1, 0), (0, 3), (0, 4), (0, 6)]) == {"reordered": 2, "unacknowledged_stored": 5}


def test_stored_without_an_acknowledgement() -> None:
    assert judged([(0, 0)], [(0, 0), (0, 1)]) == {"unacknowledged_stored": 1}


@given(st.permutations(range(12)))
def test_only_the_sorted_order_counts_as_order(order: list[int]) -> None:
    arrivals = Arrivals(Numbering())
    for sequence in order:
        arrivals.add(Number(0, sequence))
    below_an_earlier_one = sum(any(earlier > one for earlier in order[:at]) for at, one in enumerate(order))
    assert (arrivals.total, arrivals.duplicated, arrivals.reordered) == (12, 0, below_an_earlier_one)


async def test_a_topic_is_read_to_its_end(bootstrap: str, new_topic) -> None:
    topic = await new_topic(partitions=2)
    numbering = Numbering()
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap)
    await producer.start()
    for sequence in (0, 1, 3, 2, 2):
        await producer.send(topic, numbering.payload(4, sequence, 60), partition=1)
        await producer.send(topic, numbering.payload(5, sequence, 60), partition=0)
    await producer.send_and_wait(topic, b"somebody else's", partition=0)
    await producer.stop()
    arrivals = await read_topic(bootstrap, topic, numbering)
    assert (arrivals.total, arrivals.duplicated, arrivals.reordered, arrivals.foreign) == (8, 2, 2, 1)


def test_a_window_limits_the_unanswered_messages() -> None:
    pace = Pace(10, None)
    assert pace.capacity(0, 0) == 0  # not started yet
    pace.start()
    assert pace.capacity(0, 0) == 10
    assert pace.capacity(10, 3) == 3
    assert pace.capacity(10, 0) == 0
    assert pace.capacity(12, 0) == 0


def test_a_sender_keeps_its_rate_and_catches_up() -> None:
    now = 100.0
    pace = Pace(1000, 50.0, clock=lambda: now)
    now = 200.0
    pace.start()
    assert pace.capacity(0, 0) == 1
    assert pace.capacity(1, 1) == 0
    now = 200.11
    assert pace.capacity(1, 1) == 5
    now = 300.0
    assert pace.capacity(6, 6) == 1000  # never above the window


def test_senders_with_different_phases_do_not_send_simultaneously() -> None:
    now = 0.0
    paces = [Pace(10, 1.0, clock=lambda: now, phase=phase) for phase in (1.0, 0.5)]
    for pace in paces:
        pace.start()
    assert [pace.capacity(0, 0) for pace in paces] == [1, 0]
    now = 0.5
    assert [pace.capacity(1, 1) for pace in paces] == [0, 0]
    assert paces[1].capacity(0, 0) == 1


def test_percentiles_have_three_digits_and_merge() -> None:
    latencies, other = Latencies(), Latencies()
    assert latencies.summary() == {"p50": 0, "p90": 0, "p99": 0, "p99.9": 0, "p100": 0}
    for millisecond in range(1, 501):
        latencies.record(millisecond / 1000)
        other.record((millisecond + 500) / 1000)
    latencies.merge(other)
    assert latencies.count == 1000
    for percentile in (50, 90, 99, 100):
        assert latencies.milliseconds(percentile) == pytest.approx(percentile * 10, rel=0.002)


def test_latencies_out_of_range_are_kept_at_the_ends() -> None:
    latencies = Latencies()
    for seconds in (0.0, -1.0, 10_000.0):
        latencies.record(seconds)
    assert latencies.count == 3
    assert latencies.milliseconds(1) == pytest.approx(0.001)
    assert latencies.milliseconds(100) == pytest.approx(600_000, rel=0.01)


def test_a_report_is_one_json_object_and_a_table_with_a_column_per_row() -> None:
    report = Report("steady")
    report.add(protocol="mqtt", messages=1_234_567, **{"p50 ms": 1.23456})
    report.add(protocol="http", messages=2, lost=0)
    assert json.loads(report.to_json()) == {
        "title": "steady",
        "rows": [
            {"protocol": "mqtt", "messages": 1_234_567, "p50 ms": 1.23456},
            {"protocol": "http", "messages": 2, "lost": 0},
        ],
    }
    out = io.StringIO()
    report.print(Console(file=out, width=100))
    lines = [line.split("│")[1:-1] for line in out.getvalue().splitlines() if line.startswith("│")]
    cells = {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}
    assert cells == {
        "protocol": ["mqtt", "http"], "messages": ["1,234,567", "2"], "p50 ms": ["1.23", ""], "lost": ["", "0"],
    }  # fmt: skip
