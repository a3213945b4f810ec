"""A session resumed on a new connection: packet identifiers of both directions are kept, quotas are not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.errors import UsageError
from protocols.mqtt import packets
from protocols.mqtt.connection import Connection, PacketLimits
from protocols.mqtt.properties import NONE, Properties
from tests.protocols.mqtt.client import CONNECT_5, CONNECTS, failed, new, say, send_publish
from tests.protocols.mqtt.wire import wire

WINDOW_OF_2 = "10 * s'MQTT' 05 00 000a v 21 0002 ; s'me'"


def resumed(
    *,
    received: Iterable[int] = (),
    reserved: Iterable[int] = (),
    announced: Properties = NONE,
    connect: str = CONNECT_5,
    limits: PacketLimits | None = None,
) -> Connection:
    connection = new(limits)
    say(connection, connect)
    assert connection.accept(True, announced, received=received, reserved=reserved) == []
    connection.data_to_send()
    return connection


# the client's identifiers


@pytest.mark.clause("MQTT-4.3.3-11", "MQTT311-4.3.3-2")
@pytest.mark.parametrize("version", [5, 4, 3])
def test_a_release_of_an_earlier_connection_s_message(version: int) -> None:
    connection = resumed(received=[7], connect=CONNECTS[version])
    assert say(connection, "62 02 0007") == [packets.Pubrel(7)]
    connection.send_pubcomp(7)
    assert connection.data_to_send() == bytes.fromhex("70020007")
    assert connection.inbound.used == 0


def test_a_message_sent_again_takes_no_place() -> None:
    connection = resumed(received=[7], announced=Properties(receive_maximum=1))
    events = say(connection, "3c * s't' 0007 00 'x'", "34 * s't' 0008 00")
    assert events[0] == packets.Publish("t", b"x", 2, dup=True, packet_id=7)
    assert connection.inbound.used == 1
    connection.send_pubrec(7)
    connection.send_pubrec(8)
    say(connection, "62 02 0007", "62 02 0008")
    connection.send_pubcomp(7)
    connection.send_pubcomp(8)
    assert connection.inbound.used == 0
    connection.send_pubcomp(7, 0x92)
    assert connection.inbound.used == 0


def test_a_resumed_message_that_is_refused_is_over() -> None:
    connection = resumed(received=[7])
    say(connection, "3c * s't' 0007 00")
    connection.send_pubrec(7, 0x97)
    assert connection.inbound.used == 0
    say(connection, "34 * s't' 0007 00")  # a new one
    assert connection.inbound.used == 1


def test_the_client_gains_a_place_with_each_resumed_exchange() -> None:
    connection = resumed(received=[7, 8], announced=Properties(receive_maximum=1))
    # One on the way, then a PUBCOMP of an earlier one: by section 4.9 its quota is 1 again.
    assert len(say(connection, "34 * s't' 0001 00", "62 02 0007")) == 2
    connection.send_pubcomp(7)
    assert len(say(connection, "34 * s't' 0002 00", "62 02 0008")) == 2
    connection.send_pubcomp(8)
    assert len(say(connection, "34 * s't' 0003 00")) == 1
    assert failed(say(connection, "34 * s't' 0004 00")) == "0x93"


def test_what_was_sent_ahead_of_connack_meets_the_session() -> None:
    connection = new()
    say(connection, CONNECT_5, "3c * s't' 0007 00 'x'", "62 02 0007")
    events = connection.accept(True, received=[7], reserved=[1])
    assert events == [packets.Publish("t", b"x", 2, dup=True, packet_id=7), packets.Pubrel(7)]
    assert connection.inbound.used == 0


# ours


@pytest.mark.clause("MQTT-2.2.1-4")
def test_a_reserved_identifier_is_for_its_own_message() -> None:
    connection = resumed(reserved=[1, 3, 4])
    assert [send_publish(connection, "t", b"", 1) for _ in range(2)] == [2, 5]
    assert send_publish(connection, "t", b"x", 1, dup=True, packet_id=3) == 3
    assert connection.outbound.used == 3
    with pytest.raises(UsageError):
        send_publish(connection, "t", b"x", 1, dup=True, packet_id=3)
    assert say(connection, "40 02 0003") == [packets.Puback(3)]
    connection.release_reserved(1)
    connection.release_reserved(1)
    connection.release_reserved(2)  # on its way: not reserved
    assert say(connection, "40 02 0002") == [packets.Puback(2)]
    assert connection.outbound.used == 1


def test_a_reserved_identifier_is_free_when_its_message_is_too_large() -> None:
    connection = resumed(
        reserved=[1], connect="10 * s'MQTT' 05 02 000a v 27 00000014 ; s'me'", limits=PacketLimits(outgoing_inflight=1)
    )
    assert send_publish(connection, "t", b"x" * 13, 1, dup=True, packet_id=1) is None
    assert connection.outbound.used == 0
    assert send_publish(connection, "t", b"", 1, packet_id=1) == 1


@pytest.mark.clause("MQTT-4.4.0-1")
@pytest.mark.clause("MQTT-4.3.3-4")
def test_releases_are_sent_again_without_a_place_in_the_window() -> None:
    connection = resumed(reserved=[1, 2, 3], connect=WINDOW_OF_2)
    for packet_id in (1, 2, 3):
        connection.send_pubrel(packet_id)
    assert connection.data_to_send() == bytes.fromhex("62020001 62020002 62020003")
    assert connection.outbound.used == 0
    assert [send_publish(connection, "t", b"", 2) for _ in range(2)] == [4, 5]
    assert say(connection, "70 02 0002", "50 02 0001", "70 02 0001", "50 03 0003 91") == [
        packets.Pubcomp(2),
        packets.Pubrec(1),
        packets.Pubcomp(1),
        packets.Pubrec(3, 0x91),
    ]
    assert connection.outbound.used == 2


@pytest.mark.parametrize("answer", ["40 02 0001", "70 02 0001", "50 03 0001 80"])
def test_an_answer_to_what_was_not_sent_again_yet_says_nothing(answer: str) -> None:
    connection = resumed(reserved=[1])
    assert say(connection, answer) == []
    assert send_publish(connection, "t", b"", 2, dup=True, packet_id=1) == 1
    assert connection.outbound.used == 1


def test_a_late_pubrec_goes_on_with_the_exchange() -> None:
    connection = resumed(reserved=[1])
    assert say(connection, "50 02 0001") == [packets.Pubrec(1)]
    connection.send_pubrel(1)
    with pytest.raises(UsageError):
        send_publish(connection, "t", b"", 2, dup=True, packet_id=1)
    assert say(connection, "70 02 0001") == [packets.Pubcomp(1)]
    assert connection.outbound.used == 0


def test_the_wrong_answer_to_a_resumed_release() -> None:
    connection = resumed(reserved=[1])
    connection.send_pubrel(1)
    assert failed(say(connection, "40 02 0001")) == "0x82"


def test_a_pubrec_of_nothing_is_answered_and_forgotten() -> None:
    connection = resumed(connect=WINDOW_OF_2)
    for packet_id in range(1, 10):
        assert say(connection, f"50 02 {packet_id:04x}") == [packets.Pubrec(packet_id)]
        connection.send_pubrel(packet_id)
        assert connection.data_to_send() == b"\x62\x02" + packet_id.to_bytes(2)
    assert connection.outbound.used == 0
    assert say(connection, "70 02 0001") == []
    assert send_publish(connection, "t", b"", 1) == 1


def test_no_release_before_its_pubrec() -> None:
    connection = resumed()
    assert say(connection, "50 02 0002") == [packets.Pubrec(2)]  # of nothing, and answered too late
    send_publish(connection, "t", b"", 1)
    send_publish(connection, "t", b"", 2)
    connection.data_to_send()
    for packet_id in (1, 2):
        connection.send_pubrel(packet_id)
    assert connection.data_to_send() == b""
    assert say(connection, "50 02 0002") == [packets.Pubrec(2)]
    connection.send_pubrel(2)
    assert connection.data_to_send() == bytes.fromhex("62020002")


def test_every_identifier_can_be_reserved() -> None:
    connection = resumed(reserved=range(1, 65_536))
    with pytest.raises(UsageError):
        send_publish(connection, "t", b"", 1)
    connection.release_reserved(40_000)
    assert send_publish(connection, "t", b"", 1) == 40_000


@pytest.mark.parametrize("ids", [{"received": [0]}, {"reserved": [65_536]}])
def test_identifiers_that_cannot_be(ids: dict[str, Any]) -> None:
    connection = new()
    say(connection, CONNECT_5)
    with pytest.raises(UsageError):
        connection.accept(True, **ids)
    assert connection.data_to_send() == b""


# any order of things


class Model:
    """The invariants of the server's packet identifiers, for any order of events."""

    def __init__(self, reserved: set[int]) -> None:
        self.connection = resumed(reserved=reserved, connect=WINDOW_OF_2)
        self.reserved = set(reserved)
        self.phase: dict[int, str] = {}
        self.counted: set[int] = set()

    def send(self, packet_id: int, qos: int) -> None:
        again = packet_id if packet_id in self.reserved else None
        if len(self.counted) == 2:
            with pytest.raises(UsageError):
                send_publish(self.connection, "t", b"", qos, packet_id=again)
            return
        sent = send_publish(self.connection, "t", b"", qos, packet_id=again)
        assert sent not in self.phase
        assert sent is not None
        assert (sent in self.reserved) is (again is not None)
        self.reserved.discard(sent)
        self.counted.add(sent)
        self.phase[sent] = "PUBACK" if qos == 1 else "PUBREC"

    def release(self, packet_id: int) -> None:
        if packet_id in self.reserved:
            self.reserved.remove(packet_id)
            self.phase[packet_id] = "PUBCOMP"
            self.connection.send_pubrel(packet_id)
        elif self.phase.get(packet_id) in ("PUBREL", "PUBCOMP"):
            self.phase[packet_id] = "PUBCOMP"
            self.connection.send_pubrel(packet_id)

    def answer(self, packet_id: int) -> None:
        phase = self.phase.get(packet_id)
        if phase in ("PUBACK", "PUBCOMP"):
            (event,) = say(self.connection, f"{'40' if phase == 'PUBACK' else '70'} 02 {packet_id:04x}")
            assert event.packet_id == packet_id
            del self.phase[packet_id]
            self.counted.discard(packet_id)
        elif phase == "PUBREC":
            assert say(self.connection, f"50 02 {packet_id:04x}") == [packets.Pubrec(packet_id)]
            self.phase[packet_id] = "PUBREL"


STEPS = st.tuples(st.sampled_from(["send 1", "send 2", "release", "answer"]), st.integers(1, 6))


@given(st.sets(st.integers(1, 6)), st.lists(STEPS, max_size=60))
@settings(max_examples=200, deadline=None)
def test_the_window_is_never_miscounted(reserved: set[int], steps: list[tuple[str, int]]) -> None:
    model = Model(reserved)
    for step, packet_id in steps:
        if step.startswith("send"):
            model.send(packet_id, int(step[-1]))
        elif step == "release":
            model.release(packet_id)
        else:
            model.answer(packet_id)
        assert model.connection.outbound.used == len(model.counted)
        assert not model.connection.closing


INBOUND = st.tuples(st.sampled_from(["publish", "again", "pubrec", "refuse", "release"]), st.integers(1, 6))


@given(st.sets(st.integers(1, 6)), st.lists(INBOUND, max_size=60))
@settings(max_examples=200, deadline=None)
def test_the_client_s_window_is_never_miscounted(received: set[int], steps: list[tuple[str, int]]) -> None:
    connection = resumed(received=received)
    held: dict[int, bool] = dict.fromkeys(received, False)  # identifier -> whether it took a place here
    for step, packet_id in steps:
        if step in ("publish", "again"):
            first = "34" if step == "publish" else "3c"
            assert len(say(connection, f"{first} * s't' {packet_id:04x} 00")) == 1
            held.setdefault(packet_id, True)
        elif step == "pubrec":
            connection.send_pubrec(packet_id)
        elif step == "refuse":
            connection.send_pubrec(packet_id, 0x80)
            held.pop(packet_id, None)
        else:
            assert say(connection, f"62 02 {packet_id:04x}") == [packets.Pubrel(packet_id)]
            connection.send_pubcomp(packet_id)
            held.pop(packet_id, None)
        assert connection.inbound.used == sum(held.values())


def test_resuming_in_bytes() -> None:
    stream = b"".join(wire(text) for text in (CONNECT_5, "3c * s't' 0007 00", "62 02 0007", "50 02 0001", "70 02 0001"))
    whole: list[Any] | None = None
    for size in (len(stream), 1, 2, 3, 7):
        connection = new()
        events: list[Any] = []
        for at in range(0, len(stream), size):
            waiting = connection.receive_data(stream[at : at + size])
            if any(type(one) is packets.Connect for one in waiting):
                waiting += connection.accept(True, received=[7], reserved=[1])
            events += waiting
        assert [type(one) for one in events[1:]] == [packets.Publish, packets.Pubrel, packets.Pubrec]
        whole = whole or events
        assert events == whole
