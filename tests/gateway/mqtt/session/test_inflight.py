"""Deliveries of a kept session: despite any crash QoS 2 comes once, QoS 1 at least once, each partition in order.

The log, the reader and the sessions topic are lists here; the tests check the logic of in-flight records and offsets.
"""

from __future__ import annotations

import collections
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.mqtt.session.inflight import InflightMessages
from gateway.mqtt.state.records import PUBACK, PUBCOMP, PUBREC, InflightMessage, InflightRecord, Offsets, decode, encode
from mapping.record import Received

PARTITIONS = 3
WINDOW = 3


def record(partition: int, offset: int) -> Received:
    return Received("t", b"k", b"v", (), 1000, partition, offset)


class Client:
    """A client's state as in section 4.4."""

    def __init__(self) -> None:
        self.got: list[tuple[int, int, int]] = []  # partition, offset, QoS
        self.unreleased: dict[int, tuple[int, int]] = {}  # identifiers between PUBLISH and PUBREL
        self.answers: collections.deque[tuple[str, int]] = collections.deque()

    def publish(self, packet_id: int, place: tuple[int, int], qos: int, *, dup: bool) -> None:
        if qos == 2 and packet_id in self.unreleased:
            assert dup
            assert self.unreleased[packet_id] == place, "an identifier that the client knows is another message's"
        else:
            self.got.append((*place, qos))
        if qos == 2:
            self.unreleased[packet_id] = place
        self.answers.append(("PUBACK" if qos == 1 else "PUBREC", packet_id))

    def pubrel(self, packet_id: int) -> None:
        self.unreleased.pop(packet_id, None)
        self.answers.append(("PUBCOMP", packet_id))


class Gateway:
    """One gateway process: a reader per partition, a window, and writes that are stored in order."""

    def __init__(self, rng: random.Random, log: list[list[int]], stored: bytes, client: Client) -> None:
        self.rng, self.log, self.stored, self.client = rng, log, stored, client
        found = decode(InflightRecord, stored)
        assert found is not None
        self.inflight = InflightMessages(found.messages, found.reached)
        self.writes: collections.deque[tuple[bytes, list[tuple[str, int, tuple[int, int]]]]] = collections.deque()
        self.waiting: list[tuple[str, int, tuple[int, int]]] = []
        self.positions = [0] * PARTITIONS
        self.window = 0
        self.begin()

    def begin(self) -> None:
        """Connect, and read again from the client's position."""
        self.client.answers.clear()
        self.waiting.clear()
        self.writes.clear()
        self.window = WINDOW
        wanted = {"t": dict.fromkeys(range(PARTITIONS), 0)}
        starts, at_once, lost = self.inflight.rewind(0, wanted, {})
        assert lost == []
        for (_, partition), offset in starts.items():
            self.positions[partition] = offset
        for entry in at_once:
            assert entry.stage == PUBCOMP
            self.client.pubrel(entry.packet_id)

    def reached(self) -> Offsets:
        return self.inflight.offered({"t": dict(enumerate(self.positions))})

    def drop(self) -> None:
        """Lose the connection; the next CONNACK means that everything is stored."""
        self.inflight.reached = self.reached()
        self.save()
        self.stored, _ = self.writes.pop()
        self.begin()

    def save(self) -> None:
        value = encode(InflightRecord("n", 1, self.reached(), self.inflight.entries()))
        self.writes.append((value, list(self.waiting)))
        self.waiting.clear()

    def store(self) -> None:
        if self.waiting or not self.writes:
            self.save()
        self.stored, then = self.writes.popleft()
        for action, packet_id, place in then:
            if action == "PUBLISH":
                self.client.publish(packet_id, place, 2, dup=False)
            else:
                self.client.pubrel(packet_id)

    def read(self) -> None:
        """Offer the next record of some partition, if there is capacity."""
        behind = [number for number in range(PARTITIONS) if self.positions[number] < len(self.log[number])]
        if not behind or not self.window:
            return
        partition = self.rng.choice(behind)
        offset = self.positions[partition]
        self.positions[partition] += 1
        verdict = self.inflight.classify(record(partition, offset))
        assert verdict.lost == ()
        if verdict.finished:
            return
        self.window -= 1
        if verdict.entry is not None:
            entry = verdict.entry
            self.client.publish(entry.packet_id, (partition, offset), entry.stage, dup=True)
            return
        qos = self.log[partition][offset]
        used = {entry.packet_id for entry in self.inflight.entries()}
        packet_id = self.inflight.begin(record(partition, offset), PUBACK if qos == 1 else PUBREC)
        assert packet_id not in used
        if qos == 1:
            self.client.publish(packet_id, (partition, offset), 1, dup=False)
        else:
            self.waiting.append(("PUBLISH", packet_id, (partition, offset)))

    def hear(self) -> None:
        """Process one answer of the client."""
        if not self.client.answers:
            return
        kind, packet_id = self.client.answers.popleft()
        entry = self.inflight.find(packet_id)
        if kind == "PUBREC" and entry is not None:
            entry.stage = PUBCOMP
            self.waiting.append(("PUBREL", packet_id, (0, 0)))
        elif kind != "PUBREC" and entry is not None:
            resumed = entry.stage == PUBCOMP and self.window == WINDOW
            self.inflight.end(packet_id)
            self.window += not resumed


@pytest.mark.clause("MQTT-4.3.2-1", "MQTT-4.3.3-1", "MQTT-4.4.0-1", "MQTT-4.6.0-5", "MQTT-2.2.1-4")
@given(st.randoms(use_true_random=False), st.integers(1, 150))
@settings(max_examples=100, deadline=None)
def test_what_comes_whatever_breaks(rng: random.Random, steps: int) -> None:
    log: list[list[int]] = [[] for _ in range(PARTITIONS)]
    client = Client()
    stored = encode(InflightRecord("n", 1, {"t": dict.fromkeys(range(PARTITIONS), 0)}))
    gateway = Gateway(rng, log, stored, client)
    for _ in range(steps):
        step = rng.random()
        if step < 0.25:
            rng.choice(log).append(rng.choice((1, 2)))
        elif step < 0.5:
            gateway.read()
        elif step < 0.7:
            gateway.hear()
        elif step < 0.9:
            gateway.store()
        elif step < 0.96:
            gateway.drop()
        else:
            gateway = Gateway(rng, log, gateway.stored, client)  # killed
    for _ in range(2000):
        gateway.read()
        gateway.hear()
        if gateway.waiting or gateway.writes:
            gateway.store()
    assert len(gateway.inflight) == 0
    assert client.unreleased == {}
    for partition in range(PARTITIONS):
        expected = list(enumerate(log[partition]))
        first: dict[int, int] = {}
        for number, offset, qos in client.got:
            if number == partition:
                assert qos == 1 or offset not in first, "QoS 2 comes once"
                first.setdefault(offset, qos)
        assert sorted(first.items()) == expected
        once = [offset for number, offset, qos in client.got if number == partition and qos == 2]
        assert once == sorted(once)


def entry(packet_id: int, offset: int, stage: int = PUBREC) -> InflightMessage:
    return InflightMessage(packet_id, "t", 0, offset, stage)


@pytest.mark.clause("MQTT-2.2.1-4")
def test_identifiers_wrap_around_those_in_use() -> None:
    inflight = InflightMessages([entry(1, 0), entry(65_535, 1)])
    inflight._last = 65_534
    assert [inflight.begin(record(0, offset), PUBACK) for offset in (2, 3)] == [2, 3]


def test_what_left_the_log_is_told_once() -> None:
    inflight = InflightMessages([entry(1, 3), entry(2, 4), entry(3, 9, PUBACK)], {"t": {0: 10}})
    inflight.rewind(0, {"t": {0: 20}}, {})
    verdict = inflight.classify(record(0, 9))
    assert [one.packet_id for one in verdict.lost] == [1, 2]
    assert verdict.entry is not None
    assert verdict.entry.packet_id == 3
    assert inflight.classify(record(0, 10)).lost == ()


def test_what_is_answered_before_it_is_sent_again_is_not_sent() -> None:
    inflight = InflightMessages([entry(1, 3), entry(2, 4)], {"t": {0: 10}})
    inflight.rewind(0, {"t": {0: 20}}, {})
    found = inflight.find(1)
    assert found is not None
    found.stage = PUBCOMP
    inflight.end(2)
    inflight.begin(record(0, 11), PUBREC)
    assert inflight.classify(record(0, 3)).finished
    assert inflight.classify(record(0, 4)).finished


def test_only_what_is_on_the_way_is_wanted_of_a_topic_without_subscription() -> None:
    """The client may subscribe again while the log is still read for the deliveries."""
    inflight = InflightMessages([entry(1, 3)], {})
    starts, _, lost = inflight.rewind(0, {}, {"t": {0: 7}})
    assert (starts, lost) == ({("t", 0): 3}, [])
    assert inflight.classify(record(0, 3)).entry is not None
    assert all(inflight.classify(record(0, offset)).finished for offset in (4, 5, 6))
    assert not inflight.classify(record(0, 7)).finished


def test_a_partition_that_is_gone_gives_up_its_deliveries() -> None:
    _, _, lost = InflightMessages([entry(1, 3)], {}).rewind(0, {}, {})
    assert [one.packet_id for one in lost] == [1]


def test_a_topic_that_was_made_anew_is_read_from_its_beginning() -> None:
    inflight = InflightMessages([], {"t": {0: 10, 1: 4}})
    inflight.reset_truncated({"t": {0: 2, 1: 4}})
    starts, _, _ = inflight.rewind(0, {"t": {0: 2, 1: 4}}, {})
    assert starts == {("t", 0): 0, ("t", 1): 4}
    assert not inflight.classify(record(0, 0)).finished


def test_what_a_dead_gateway_may_have_sent_is_marked() -> None:
    inflight = InflightMessages([], {"t": {0: 2}})
    inflight.rewind(1000, {"t": {0: 5}}, {})
    assert inflight.classify(record(0, 1)).finished
    assert inflight.classify(record(0, 2)).unclear
    later = Received("t", b"k", b"v", (), 1001, 0, 3)
    assert not inflight.classify(later).unclear
    assert not inflight.is_rereading


def test_a_topic_that_was_deleted_while_the_client_was_away_is_new_when_it_is_there_again() -> None:
    inflight = InflightMessages((), {"t": {0: 5}, "stays": {0: 5}})
    inflight.rewind(0, {"stays": {0: 5}}, {})  # as the session comes back there is no such topic
    for offset in range(3):
        verdict = inflight.classify(record(0, offset))
        assert not verdict.finished
    assert inflight.offered({"stays": {0: 3}}) == {"stays": {0: 5}}


def test_what_was_offered_of_a_topic_with_another_id_does_not_count() -> None:
    sent = InflightMessage(1, "t", 0, 2, PUBREC)
    stored = encode(
        InflightRecord("n", 1, {"t": {0: 5}, "same": {0: 5}}, (sent,), topic_ids={"t": "former", "same": "a"})
    )
    found = decode(InflightRecord, stored)
    assert found is not None
    inflight = InflightMessages(found.messages, found.reached, found.topic_ids)
    inflight.forget_recreated({"t": "new", "same": "a"})
    starts, at_once, lost = inflight.rewind(0, {"t": {0: 5}, "same": {0: 5}}, {})
    assert starts == {("t", 0): 0, ("same", 0): 5}  # though the new one has just as many records
    assert (at_once, [message.packet_id for message in lost]) == ([], [1])  # its identifier is another message's by now
    assert not inflight.classify(record(0, 2)).finished


def test_an_inflight_record_of_an_earlier_version_tells_no_ids() -> None:
    found = decode(InflightRecord, b'{"nonce":"n","epoch":1,"reached":{"t":{"0":5}},"flights":[[1,"t",0,2,2]]}')
    assert found is not None
    inflight = InflightMessages(found.messages, found.reached, found.topic_ids)
    inflight.forget_recreated({"t": "any"})
    starts, _, lost = inflight.rewind(0, {"t": {0: 5}}, {})
    assert (starts, lost) == ({("t", 0): 2}, [])
