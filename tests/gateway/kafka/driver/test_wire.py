"""Metadata in both versions: equal, except for the topic ids. Produce requests: the bytes of aiokafka's."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import IncompatibleBrokerVersion
from aiokafka.protocol.offset import OffsetResponse_v2
from aiokafka.protocol.produce import ProduceRequest_v7, ProduceResponse_v7
from hypothesis import given
from hypothesis import strategies as st

from gateway.kafka.driver import wire
from gateway.kafka.driver.brokers import Brokers
from tests.support.topics import until_led


class Older:
    """A metadata request as for a broker before Kafka 2.8."""

    def __init__(self, topics: list[str] | None) -> None:
        self._topics = topics

    def prepare(self, versions: Any) -> Any:
        return wire.metadata_request(self._topics).prepare({3: (0, 9)})


async def test_topics_have_ids_where_the_broker_tells_them(
    bootstrap: str, new_topic: Any, admin: AIOKafkaAdminClient
) -> None:
    few, long = await new_topic(3), await new_topic(1) + "-" + "x" * 200
    await admin.create_topics([NewTopic(long, 130, 1)])  # lengths of two bytes
    await until_led(admin, long)
    client = Brokers(lambda brokers: None, bootstrap_servers=bootstrap)
    await client.bootstrap()
    try:
        (node,) = [broker.nodeId for broker in client.cluster.brokers()]
        for asked in ([few, long, "there-is-none"], None):
            told = await client.send(node, wire.metadata_request(asked))
            older = await client.send(node, Older(asked))
            assert (told.brokers, told.controller) == (older.brokers, older.controller)
            for name in (few, long):
                assert told.topics[name][:4] == older.topics[name][:4]
                assert len(told.topics[name].id) == 16
                assert older.topics[name].id == b""
            assert [len(told.topics[name].leaders) for name in (few, long)] == [3, 130]
            assert told.topics[few].id != told.topics[long].id
            assert asked is None or told.topics["there-is-none"].error == older.topics["there-is-none"].error == 3
    finally:
        await client.close()
        await admin.delete_topics([long])


@pytest.mark.parametrize("request_", [wire.rights_request(["t"]), wire.controller_time_request()])
def test_a_broker_that_has_only_older_versions_of_a_request_is_too_old(request_: wire.EncodedRequest) -> None:
    with pytest.raises(IncompatibleBrokerVersion):
        request_.prepare({3: (0, 7), 55: (0, 0)})


NAMES = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=20)
NUMBERS = st.integers(0, 2**31 - 1)
LONGS = st.integers(-(2**63), 2**63 - 1)


@given(batches=st.dictionaries(st.builds(TopicPartition, NAMES, NUMBERS), st.binary(max_size=50)), timeout=NUMBERS)
def test_a_produce_request_is_aiokafkas_byte_for_byte(batches: dict[TopicPartition, bytes], timeout: int) -> None:
    topics: dict[str, list[tuple[int, bytes]]] = {}
    for (topic, number), batch in batches.items():
        topics.setdefault(topic, []).append((number, batch))
    theirs = ProduceRequest_v7(None, -1, timeout, list(topics.items()))
    assert b"".join(wire.produce_body(batches.items(), timeout)) == theirs.encode()
    assert (wire.PRODUCE.API_KEY, wire.PRODUCE.API_VERSION) == (theirs.API_KEY, theirs.API_VERSION)


@given(
    topics=st.lists(
        st.tuples(NAMES, st.lists(st.tuples(NUMBERS, st.integers(-(2**15), 2**15 - 1), LONGS, LONGS, LONGS)))
    )
)
def test_the_answer_to_a_produce_request_is_read_like_aiokafkas(topics: Any) -> None:
    data = ProduceResponse_v7(topics, 0).encode()
    ours = wire.PRODUCE.RESPONSE_TYPE.read(data)
    theirs = ProduceResponse_v7.decode(data)
    assert [(name, list(partitions)) for name, partitions in ours.topics] == theirs.topics
    assert ours.API_VERSION == theirs.API_VERSION


@pytest.mark.parametrize("end", range(4, 72))
def test_an_answer_that_was_cut_is_not_read(end: int) -> None:
    produced = ProduceResponse_v7([("t", [(0, 0, 1, 2, 3), (1, 0, 1, 2, 3)])], 0).encode()
    offsets = b"\0\0\0\0" + OffsetResponse_v2.SCHEMA.fields[1].encode([("t", [(0, 0, 1, 2), (1, 0, 1, 2)])])
    with pytest.raises((ValueError, struct.error)):
        wire.PRODUCE.RESPONSE_TYPE.read(produced[: min(end, len(produced) - 5)])
    with pytest.raises((ValueError, struct.error)):
        list(wire.read_offsets(offsets[: min(end + 4, len(offsets) - 1)]))
