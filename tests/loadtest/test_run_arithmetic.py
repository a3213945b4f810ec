"""The arithmetic of load tests, without a broker: due times, the knee, noise, sizes, messages and verdicts."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proton import Message

from loadtest.clients import mqtt
from loadtest.clients.amqp_wire import Splitter, read_value
from loadtest.clients.mqtt_wire import Splitter as Packeter
from loadtest.clients.mqtt_wire import read_varint
from loadtest.clients.pace import Pace
from loadtest.numbering import Numbering
from loadtest.run.compare import ratio
from loadtest.run.generator import Runs
from loadtest.run.knee import MOST_STEPS, Search, Step
from loadtest.run.saturation import Share
from loadtest.run.scenario import rate, read, seconds
from loadtest.run.shapes import DUE, LEAST_BYTES, MESSAGES, PROTOCOLS, Packets, Requests, Shape
from loadtest.run.sizing import BUSY, Cost, Fleet, size
from loadtest.run.tally import Tally

RATES = st.floats(0.1, 1e6)


class Wire(asyncio.Transport):
    """A transport that only keeps the written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return False


@given(
    rate=RATES, begin=st.floats(0, 1e6), phase=st.floats(0, 1), sent=st.integers(0, 1000), index=st.integers(0, 5000)
)
def test_a_message_is_sent_when_it_is_due(rate: float, begin: float, phase: float, sent: int, index: int) -> None:
    now = begin
    pace = Pace(1 << 60, rate, clock=lambda: now, phase=phase)
    pace.start(sent, begin)
    due = pace.due(sent + index)
    assert due >= begin
    now = due + 1e-3 / rate + 1e-6
    assert pace.capacity(sent, sent) > index
    now = due - 1e-3 / rate - 1e-6
    assert pace.capacity(sent, sent) <= index


@settings(max_examples=20)
@given(stall=st.floats(0.1, 10), rate=st.floats(10, 100))
async def test_a_stall_counts_in_the_latency_of_all_messages_due_meanwhile(stall: float, rate: float) -> None:
    """Coordinated omission: with one message in flight, a slow answer delays all messages behind it too."""
    now = 0.0
    count = math.ceil(stall * rate)
    pace = Pace(1, rate, clock=lambda: now)
    sender = mqtt.Publisher("c", mqtt.publishes("t", [b"x"] * count), pace, lambda *_: None)
    sender.connection_made(Wire())
    pace.start()
    sender.push()
    assert sender.sent == 1, "the window is full"
    waited = []
    now = stall
    for index in range(count):
        sender._timed_run(index, index + 1, now)
        waited.append(now - sender.due_at[index])
        sender._answer_run(index, index + 1)
        sender.push()
    # measured from when each was due: the waiting times are spread evenly over the stall, and none is 0
    assert max(waited) == pytest.approx(stall)
    assert statistics.fmean(waited) == pytest.approx(stall / 2, abs=1 / rate)
    assert sender.latencies.count == count


@settings(max_examples=20)
@given(stall=st.floats(0.2, 2), window=st.integers(1, 1000))
async def test_a_stalled_generator_reports_each_late_message(stall: float, window: int) -> None:
    """A stopped process makes one late write with hundreds of late messages."""
    now = 0.0
    pace = Pace(window, 100.0, clock=lambda: now)
    sender = mqtt.Publisher("c", mqtt.publishes("t", [b"x"] * 1000), pace, lambda *_: None)
    sender.connection_made(Wire())
    pace.start()
    for millisecond in range(1000):
        now = millisecond / 1000
        sender.push()
        sender._answer_run(sender.answered, sender.sent)
    assert sender.late.milliseconds(100) < 2
    assert sender.late.count == sender.sent == 100
    now += stall
    sender.push()
    assert sender.late.milliseconds(100) == pytest.approx(stall * 1000, abs=12)
    assert sender.late.count - 100 == min(window, math.floor(now * 100 + 1) - 100)


@given(st.floats(1, 1e6), st.floats(1, 1e6), st.floats(0.02, 0.5))
def test_the_knee_is_found_with_the_requested_precision(knee: float, start: float, close: float) -> None:
    search, tried = Search(start, close), []
    while (rate := search.next) is not None:
        tried.append(rate)
        search.report(good=rate <= knee)
    assert len(tried) <= MOST_STEPS
    if len(tried) < MOST_STEPS:
        assert search.good is None or search.good <= knee
        assert search.bad is not None
        assert search.bad > knee
        assert search.good is None or search.bad - search.good <= close * search.bad
    assert all(later < bad for bad, later in itertools.pairwise(tried) if bad > knee)


def test_a_step_is_good_while_latency_backlog_and_answers_are_good() -> None:
    good = Step(1000, 99.0, 8000, 100)
    assert good.is_good(100)
    assert not good._replace(p99_ms=101).is_good(100)
    assert not good._replace(backlog=101).is_good(100), "more than 100 ms of messages wait"
    assert not Step(0.1, 0.0, 0, 0).is_good(100), "nothing was sent"
    assert not Step(1000, 400.0, 8000, 401).is_good(1000), "a twentieth of the step"
    assert not good._replace(failures=1).is_good(100)


@pytest.mark.parametrize(
    ("share", "saturated"),
    [
        (Share(0.5, 0.1, 1, 20), False),
        (Share(0.95, 0.0, 1, 20), True),
        (Share(0.4, 0.5, 1, 20), True),
        (Share(0.5, 0.0, 12, 20), True),
        (Share(0.5, 0.0, 9, 10), False),
        (Share(0.5, 0.0, 50, 1000), False),
    ],
)
def test_a_saturated_generator_is_reported(share: Share, *, saturated: bool) -> None:
    assert (share.reason is not None) is saturated


ROUNDS = st.lists(st.floats(1, 1000), min_size=1, max_size=6)


@given(ROUNDS, ROUNDS)
def test_swapping_the_sides_inverts_the_ratio(before: list[float], after: list[float]) -> None:
    there, back = ratio(before, after), ratio(after, before)
    assert there is not None
    assert back is not None
    assert there.low <= there.middle * (1 + 1e-9)
    assert there.middle <= there.high * (1 + 1e-9)
    assert there.low == pytest.approx(1 / back.high)
    assert there.high == pytest.approx(1 / back.low)
    assert there.confidence == back.confidence
    assert min(after) / max(before) <= there.low
    assert there.high <= max(after) / min(before)


@given(ROUNDS)
def test_equal_rounds_show_no_difference(rounds: list[float]) -> None:
    found = ratio(rounds, rounds)
    assert found is not None
    assert found.is_noise


def test_the_interval_is_that_of_the_rank_test() -> None:
    one = ratio([10, 11, 12, 13], [20, 22, 24, 26])
    assert one is not None
    assert one.confidence == pytest.approx(1 - 2 / 70)  # four against four: one of 70 orders is the most extreme
    assert (one.low, one.high) == (20 / 13, 26 / 10)
    assert not one.is_noise
    few = ratio([10], [20])
    assert few is not None
    assert few.confidence == 0
    five = ratio([10, 11, 12, 13, 14], [10.5, 11.5, 12.5, 13.5, 14.5])
    assert five is not None
    # the rank test's tables: for five against five, U = 2 is the largest within 5 % on two sides (8 of 252 orders)
    assert five.confidence == pytest.approx(1 - 8 / 252)
    assert ratio([], [1.0]) is None
    assert ratio([0.0], [1.0]) is None


@given(st.integers(1, 10**6), st.floats(1e-4, 100), st.integers(1, 10_000), st.integers(0, 100))
def test_twice_the_fleet_needs_at_most_twice_the_size(devices: int, rate: float, bytes_: int, subs: int) -> None:
    cost = Cost(10.0, 3.0, 6000.0, 80.0, 100, "a test")
    one, two = (size(Fleet(count, rate, bytes_, subs), cost) for count in (devices, 2 * devices))
    assert two.messages == pytest.approx(2 * one.messages)
    assert one.gateways <= two.gateways <= 2 * one.gateways
    assert one.processors <= one.gateways * BUSY * (1 + 1e-9)
    assert one.gateways == 1 or one.processors > (one.gateways - 1) * BUSY
    assert one.partitions <= two.partitions
    assert one.kafka_disk_mb == pytest.approx(3 * one.kafka_in_mb)


def test_a_fleet_by_hand() -> None:
    need = size(Fleet(100_000, 0.1, 200), Cost(50.0, 0.0, 5120.0, 80.0, 200, "a test"))
    assert (need.messages, need.processors, need.gateways) == (10_000, 0.5, 1)
    assert need.kafka_in_mb == pytest.approx(10_000 * 290 * 1.1 / 1e6)
    assert need.memory_mib == pytest.approx(80 + 100_000 * 5120 / 2**20)


@pytest.mark.parametrize(
    ("text", "found"), [("90", 90), ("500ms", 0.5), ("1.5m", 90), ("4h", 14_400), (" 3 s", 3), (7, 7)]
)
def test_durations(text: str | float, found: float) -> None:
    assert seconds(text) == found


@pytest.mark.parametrize(
    ("text", "found"), [("200", 200), ("200/s", 200), ("1/10s", 0.1), ("6/1m", 0.1), ("1/h", 1 / 3600)]
)
def test_rates(text: str, found: float) -> None:
    assert rate(text) == pytest.approx(found)


@pytest.mark.parametrize("text", ["", "soon", "1/0s", "1/", "x/s", "-3"])
def test_an_invalid_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a rate"):
        rate(text)
    with pytest.raises(ValueError, match="is not a duration"):
        seconds(text)


def shape(protocol: str, messages: str, size: int, *, batch: int = 1) -> tuple[Shape, Pace]:
    numbering = Numbering("0a1b2c3d")
    pace = Pace(1, None, clock=lambda: 12.345678)
    return Shape(protocol, messages, "topic", size, 100, numbering, 7, batch=batch), pace


def payload(data: bytes, number: int) -> int:
    """Check that a payload contains its number, and return its length."""
    found = DUE.match(data)
    assert found is not None
    assert found.groups() == (b"0a1b2c3d", b"00007", b"%010d" % number, b"%016d" % 12_345_678)
    return len(data)


@pytest.mark.parametrize("messages", MESSAGES)
@settings(max_examples=10)
@given(size=st.integers(LEAST_BYTES, 1000), first=st.integers(0, 2**31))
def test_mqtt_packets_are_complete_and_numbered(messages: str, size: int, first: int) -> None:
    of, pace = shape("mqtt", messages, size)
    packets = Packets(of, pace)[first : first + 70]
    found = Packeter().feed(b"".join(packets))
    assert len(found) == 70
    topics = set()
    for number, (_, body) in enumerate(found, first):
        at = 2 + struct.unpack_from(">H", body)[0]
        topics.add(body[2:at])
        assert struct.unpack_from(">H", body, at)[0] == mqtt.packet_id(number)
        length, at = read_varint(body, at + 2)
        assert messages != "minimal" or not length
        long = payload(body[at + length :], number)
        assert LEAST_BYTES <= long <= 4 * size if messages == "random" else long == size
    assert len(topics) == 1 if messages == "minimal" else len(topics) > 40


@pytest.mark.parametrize("messages", MESSAGES)
@settings(max_examples=10)
@given(size=st.integers(LEAST_BYTES, 1000), first=st.integers(0, 2**31 - 100))
def test_amqp_transfers_are_complete_numbered_and_read_by_proton(messages: str, size: int, first: int) -> None:
    of, pace = shape("amqp", messages, size)
    for number, body in enumerate(Splitter().feed(b"".join(Packets(of, pace)[first : first + 20])), first):
        (_, fields), at = read_value(body, 0)
        assert fields[1] == number
        message = Message()
        message.decode(body[at:])
        value = message.body
        assert isinstance(value, str | bytes | memoryview)
        data = value.encode() if isinstance(value, str) else bytes(value)
        long = payload(data, number)
        assert LEAST_BYTES <= long <= 4 * size if messages == "random" else long == size
        if messages == "jms":
            assert message.annotations is not None
        if messages == "typical":
            assert message.properties is not None
            assert message.properties["seq"] == number


@pytest.mark.parametrize("messages", MESSAGES)
@settings(max_examples=10)
@given(size=st.integers(LEAST_BYTES, 1000), batch=st.integers(1, 5))
def test_http_requests_have_their_length_and_are_json(messages: str, size: int, batch: int) -> None:
    of, pace = shape("http", messages, size, batch=batch)
    for number in range(5):
        head, _, body = Requests(of, pace)[number].partition(b"\r\n\r\n")
        assert b"Content-Length: %d" % len(body) in head
        records = json.loads(body)["records"]
        assert len(records) == batch
    text = Requests(of._replace(messages="minimal"), pace)[3].partition(b"\r\n\r\n")[2]
    assert payload(json.loads(text)["records"][0]["value"].encode(), 3 * batch) == size


@given(
    st.lists(st.integers(0, 30), max_size=60), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=10)
)
def test_stored_messages_are_compared_with_acknowledged_ones(stored: list[int], spans: list[tuple[int, int]]) -> None:
    tally, runs, told = Tally({3: 40}), Runs(), set[int]()
    for first, length in spans:
        if told.isdisjoint(range(first, first + length)):
            runs.add(first, first + length)
            told.update(range(first, first + length))
    for sequence in stored:
        tally.found(3, sequence, 0)
    verdict = tally.verdict({3: runs.runs})
    assert verdict.acknowledged == len(told)
    assert verdict.stored == len(set(stored))
    assert verdict.lost == len(told - set(stored))
    assert verdict.duplicated == len(stored) - len(set(stored))
    assert verdict.unacknowledged_stored == len(set(stored) - told)
    assert (verdict.reordered == 0) == (list(dict.fromkeys(stored)) == sorted(set(stored)))


def test_the_examples_are_scenarios(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    ready.write_text(json.dumps(dict.fromkeys((*PROTOCOLS, "kafka"), "127.0.0.1:1") | {"pid": 1}))
    found = [
        read(path, {"target": {"ready_file": ready}})
        for path in sorted((Path(__file__).parents[2] / "examples" / "loadtest").glob("*.toml"))
    ]
    assert [one.name for one in found] == ["first", "knee", "soak"]
    assert found[2].duration == 4 * 3600
    assert found[0].rate_of(0, 2500.0) == pytest.approx(20.0), "50 connections, two fifths of the rate"


@pytest.mark.parametrize("plain", [True, False])
async def test_acknowledgements_out_of_order_are_an_error(plain: bool) -> None:
    sender = mqtt.Publisher("c", mqtt.publishes("t", [b"x"] * 3), Pace(3, None))
    sender.connection_made(Wire())
    sender.data_received(b"\x20\x03\x00\x00\x00")
    sender.start()
    pubacks = [b"\x40\x02\x00" + bytes((number,)) for number in (1, 3, 2)]
    sender.data_received(b"".join(pubacks) if plain else pubacks[0] + b"\x40\x03\x00\x03\x00" + pubacks[2])
    with pytest.raises(ConnectionAbortedError, match="out of order"):
        await sender.finished
