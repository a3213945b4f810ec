"""Topic aliases towards the client: it sees the right topics, and the topics sent most have the aliases."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.errors import UsageError
from protocols.mqtt.aliases import TOPICS_PER_ALIAS, USES_PER_ALIAS, TopicAliases
from protocols.mqtt.connection import Connection, PacketLimits
from protocols.mqtt.decoding import decode_packet
from protocols.mqtt.encoding import prepare_publish
from protocols.mqtt.packets import Publish, Version
from protocols.mqtt.properties import Properties
from tests.protocols.mqtt.client import CONNECTS, opened, say, send_publish
from tests.protocols.mqtt.wire import wire


def taking(maximum: int, packet_size: int | None = None, limits: PacketLimits | None = None) -> Connection:
    size = "" if packet_size is None else f"27 {packet_size:08x}"
    return opened(connect=f"10 * s'MQTT' 05 02 000a v 22 {maximum:04x} {size} ; s'me'", limits=limits)


class Client:
    """Resolves aliases as a client does."""

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self.topics: dict[int, str] = {}
        self.bytes = 0

    def read(self, data: bytes) -> list[tuple[str, Publish]]:
        found = []
        self.bytes += len(data)
        while data:
            length = shift = 0
            at = 1
            while True:
                length |= (data[at] & 0x7F) << shift
                shift += 7
                at += 1
                if data[at - 1] < 0x80:
                    break
            packet = decode_packet(data[0], data[at : at + length], Version.V5)
            data = data[at + length :]
            assert type(packet) is Publish
            topic = packet.topic
            alias = packet.properties.topic_alias if packet.properties else None
            if alias is not None:
                assert 1 <= alias <= self.maximum
                if topic:
                    self.topics[alias] = topic
                topic = self.topics[alias]
            assert topic
            found.append((topic, packet))
        return found


def test_the_second_use_gives_an_alias_and_the_third_uses_it() -> None:
    connection = taking(5)
    for expected in ("30 * s'plant/1' 00 'x'", "30 * s'plant/1' v 23 0001 ; 'x'", "30 * s'' v 23 0001 ; 'x'"):
        assert send_publish(connection, "plant/1", b"x") == 0
        assert connection.data_to_send() == wire(expected)
    assert send_publish(connection, "plant/1", b"x", 1, retain=True) == 1
    assert connection.data_to_send() == wire("33 * s'' 0001 v 23 0001 ; 'x'")


@pytest.mark.clause("MQTT-3.1.2-26")
@pytest.mark.clause("MQTT-3.1.2-27")
@pytest.mark.parametrize("connect", [*CONNECTS.values(), "10 * s'MQTT' 05 02 000a v 22 0000 ; s'me'"])
def test_no_alias_for_a_client_that_takes_none(connect: str) -> None:
    connection = opened(connect=connect)
    none = "00" if "05" in connect else ""
    for _ in range(5):
        send_publish(connection, "plant/1", b"x")
        assert connection.data_to_send() == wire(f"30 * s'plant/1' {none} 'x'")


def test_we_give_as_many_as_our_limit_says() -> None:
    connection = taking(65_535, limits=PacketLimits(outgoing_aliases=2))
    client = Client(2)
    for _ in range(3):
        for number in range(9):
            send_publish(connection, f"plant/{number}", b"")
    assert len(client.read(connection.data_to_send())) == 27
    connection = taking(10, limits=PacketLimits(outgoing_aliases=0))
    for _ in range(3):
        send_publish(connection, "plant/1", b"")
    assert b"\x23" not in connection.data_to_send()


def test_a_topic_shorter_than_an_alias_keeps_its_name() -> None:
    connection = taking(5)
    for _ in range(9):
        send_publish(connection, "a/b", b"")
        assert connection.data_to_send() == wire("30 * s'a/b' 00")


@pytest.mark.parametrize("size", [100, 118, 119, 121, 122, 123, 124, 16_375, 16_378, 16_380])
def test_properties_of_every_length(size: int) -> None:
    connection = taking(5)
    client = Client(5)
    properties = Properties(content_type="c" * size)
    for _ in range(4):
        send_publish(connection, "plant/1", b"x" * 200, 1, properties=properties)
    for topic, packet in client.read(connection.data_to_send()):
        assert topic == "plant/1"
        assert packet.payload == b"x" * 200
        assert packet.properties is not None
        assert packet.properties.content_type == properties.content_type


@pytest.mark.clause("MQTT-3.1.2-24")
def test_the_packet_that_leaves_is_what_is_measured() -> None:
    connection = taking(5, packet_size=20)
    # 9 bytes of topic, 1 of properties, 2 of header: 8 for the payload.
    assert send_publish(connection, "plant/1", b"12345678") == 0
    assert send_publish(connection, "plant/1", b"123456789") is None
    assert connection.data_to_send() == wire("30 * s'plant/1' 00 '12345678'")
    assert send_publish(connection, "plant/1", b"12345678") == 0  # no room for the alias that is due
    assert connection.data_to_send() == wire("30 * s'plant/1' 00 '12345678'")
    assert send_publish(connection, "plant/1", b"12345") == 0
    assert connection.data_to_send() == wire("30 * s'plant/1' v 23 0001 ; '12345'")
    assert send_publish(connection, "plant/1", b"123456789012", 0) == 0  # fits with the alias only
    assert connection.data_to_send() == wire("30 * s'' v 23 0001 ; '123456789012'")
    assert send_publish(connection, "plant/1", b"1234567890123") is None
    assert connection.data_to_send() == b""


def test_an_alias_that_was_not_sent_is_not_given() -> None:
    connection = opened(connect="10 * s'MQTT' 05 02 000a v 22 0005 21 0001 ; s'me'")
    assert send_publish(connection, "plant/1", b"", 1) == 1
    connection.data_to_send()
    with pytest.raises(UsageError):
        send_publish(connection, "plant/1", b"", 1)
    assert connection.data_to_send() == b""
    say(connection, "40 02 0001")
    assert send_publish(connection, "plant/1", b"", 1) == 2
    assert connection.data_to_send() == wire("32 * s'plant/1' 0002 v 23 0001 ;")


def test_a_message_of_an_earlier_connection_may_have_an_alias() -> None:
    connection = taking(5)
    for packet_id in (7, 8, 9):
        assert send_publish(connection, "plant/1", b"", 2, dup=True, packet_id=packet_id) == packet_id
    client = Client(5)
    assert [(topic, one.packet_id, one.dup) for topic, one in client.read(connection.data_to_send())] == [
        ("plant/1", 7, True),
        ("plant/1", 8, True),
        ("plant/1", 9, True),
    ]


def test_nobody_else_gives_aliases() -> None:
    with pytest.raises(UsageError):
        prepare_publish("plant/1", b"", Properties(topic_alias=1), Version.V5)


def test_one_prepared_message_for_all() -> None:
    message = prepare_publish("plant/1", b"x", Properties(content_type="c"), Version.V5)
    few, many, none = taking(1), taking(9), opened()
    send_publish(many, "other", b"")
    send_publish(many, "other", b"")
    many.data_to_send()
    for _ in range(3):
        for connection in (few, many, none):
            connection.send_prepared(message)
    assert few.data_to_send().endswith(wire("30 * s'' v 23 0001 03 s'c' ; 'x'"))
    assert many.data_to_send().endswith(wire("30 * s'' v 23 0002 03 s'c' ; 'x'"))
    assert none.data_to_send().endswith(wire("30 * s'plant/1' v 03 s'c' ; 'x'"))


# by use


def owners(aliases: TopicAliases) -> set[bytes]:
    return {topic for topic in aliases._topics if aliases._topics[topic].alias}


def use(aliases: TopicAliases, topic: bytes) -> int:
    alias = aliases.choose(topic)
    if alias < 0:
        aliases.give(topic, -alias)
    return alias


def test_a_busy_topic_takes_over_what_an_idle_one_has() -> None:
    aliases = TopicAliases(2)
    for topic in (b"\0\5first", b"\0\5other", b"\0\5first", b"\0\5other", b"\0\5other"):
        use(aliases, topic)
    assert owners(aliases) == {b"\0\5first", b"\0\5other"}
    assert [use(aliases, b"\0\4busy") for _ in range(6)] == [0, 0, 0, 0, -1, 1]
    assert owners(aliases) == {b"\0\4busy", b"\0\5other"}
    assert use(aliases, b"\0\5first") == 0


def test_topics_that_are_used_alike_leave_each_other_alone() -> None:
    aliases = TopicAliases(4)
    given = [use(aliases, b"\0\7topic%02d" % (turn % 8)) for turn in range(4000)]
    assert sum(one < 0 for one in given) <= 12


def test_the_busiest_have_the_aliases_in_the_end() -> None:
    aliases = TopicAliases(4)
    saved = 0
    for turn in range(8000):
        use(aliases, b"\0\7rare%03d" % (turn % 900))
        saved += use(aliases, b"\0\7busy%03d" % (turn % 4)) > 0
    assert owners(aliases) == {b"\0\7busy%03d" % number for number in range(4)}
    assert saved > 7000


def test_what_was_busy_once_does_not_stay_so() -> None:
    aliases = TopicAliases(2)
    for topic in (b"\0\4old1", b"\0\4old2"):
        for _ in range(5000):
            use(aliases, topic)
    for turn in range(3 * USES_PER_ALIAS * 2):
        use(aliases, (b"\0\4new1", b"\0\4new2")[turn % 2])
    assert owners(aliases) == {b"\0\4new1", b"\0\4new2"}


@given(st.integers(1, 5), st.lists(st.integers(0, 2000), max_size=600))
@settings(max_examples=50, deadline=None)
def test_the_count_is_bounded(maximum: int, numbers: list[int]) -> None:
    aliases = TopicAliases(maximum)
    for number in numbers:
        use(aliases, b"\0\5%05d" % number)
        assert len(owners(aliases)) <= maximum
    assert len(aliases._topics) <= TOPICS_PER_ALIAS * maximum + 16


MESSAGES = st.tuples(
    st.sampled_from(["a", "a/b/c", "plant/1", "plant/2", "plant/3", "plant/north/line/7/pump", "\u00e9t\u00e9/ici"]),
    st.integers(0, 40),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from([None, Properties(content_type="c"), Properties(correlation_data=b"d" * 130)]),
)


@pytest.mark.clause("MQTT-3.1.2-26", "MQTT-3.3.2-11")
@given(st.integers(1, 4), st.sampled_from([None, 40, 60]), st.lists(MESSAGES, max_size=80))
@settings(max_examples=200, deadline=None)
def test_the_client_sees_the_right_topics(
    maximum: int, packet_size: int | None, messages: list[tuple[str, int, int, bool, Properties | None]]
) -> None:
    connection, plain = taking(maximum, packet_size), opened()
    client = Client(maximum)
    for topic, size, qos, retain, properties in messages:
        message = prepare_publish(topic, b"x" * size, properties, Version.V5)
        sent = connection.send_prepared(message, qos, retain=retain)
        data = connection.data_to_send()
        assert packet_size is None or len(data) <= packet_size
        plain.send_prepared(message, qos, retain=retain)
        unaliased = len(plain.data_to_send())
        if sent is None:
            assert packet_size is not None
            assert unaliased > packet_size
            assert data == b""
            continue
        ((seen, packet),) = client.read(data)
        assert len(data) <= unaliased + 4  # an alias is told with three bytes, and may lengthen a length
        assert seen == topic
        assert (packet.payload, packet.qos, packet.retain, packet.packet_id) == (b"x" * size, qos, retain, sent)
        if properties is not None:
            assert packet.properties is not None
            assert packet.properties.content_type == properties.content_type
            assert packet.properties.correlation_data == properties.correlation_data
