"""Fetch sessions: after any errors the broker's session has exactly the partitions and offsets that are to be read."""

from __future__ import annotations

import io
import uuid
from typing import Any

from aiokafka import TopicPartition
from aiokafka.admin import NewTopic
from aiokafka.protocol.fetch import FetchRequest_v11
from hypothesis import given
from hypothesis import strategies as st

from gateway.kafka.driver import wire
from gateway.kafka.driver.fetch.fetch_sessions import LAST_EPOCH, FetchSession
from tests.support.topics import until_led

PLACES = [TopicPartition(topic, number) for topic in ("a", "b.c") for number in range(3)]
UNKNOWN_SESSION = 70


class Broker:
    """A broker's side of a fetch session (KIP-227), which refuses a fetch with a wrong epoch."""

    def __init__(self) -> None:
        self.ids = 0
        self.id = 0
        self.epoch = 0
        self.reads: dict[TopicPartition, int] = {}

    def fetch(self, body: bytes, *, room: bool) -> tuple[int, int]:
        """Error code and session."""
        _, _, _, _, _, session, epoch, topics, forgotten, rack = (
            getattr(FetchRequest_v11.decode(io.BytesIO(body)), name) for name in FetchRequest_v11.SCHEMA.names
        )
        assert rack == "here"
        if epoch == 0:
            self.reads.clear()
            self.ids += 1
            self.id, self.epoch = (self.ids if room else 0), 0
        elif (session, epoch) != (self.id, self.epoch % LAST_EPOCH + 1):
            return UNKNOWN_SESSION, 0
        else:
            self.epoch = epoch
        for topic, partitions in topics:
            self.reads |= {TopicPartition(topic, number): offset for number, _, offset, *_ in partitions}
        for topic, numbers in forgotten:
            for number in numbers:
                del self.reads[TopicPartition(topic, number)]
        return 0, self.id


STEP = st.tuples(
    st.dictionaries(st.sampled_from(PLACES), st.integers(0, 9), min_size=1),
    st.sampled_from(("answered", "no room", "evicted", "lost")),
)


@given(steps=st.lists(STEP, max_size=12), first_epoch=st.sampled_from((0, LAST_EPOCH - 2)))
def test_the_broker_reads_what_is_wanted_after_each_answered_fetch(steps: Any, first_epoch: int) -> None:
    broker, session = Broker(), FetchSession()
    seen: dict[TopicPartition, int] = {}
    for wanted, what in steps:
        changes, forgotten = session.changes(wanted), session.forgotten(seen.keys() - wanted.keys())
        if session.is_new:
            assert changes == wanted
            assert forgotten == []
        body = wire.fetch_body(
            changes, forgotten, session=(session.id, session.epoch), wait_ms=1, least=1, most=9, most_each=5,
            committed=True, rack="here",
        )  # fmt: skip
        session.sent(changes, forgotten)
        seen = dict(wanted)
        if what == "evicted":
            broker.id = -1
        if what == "lost":
            session.reset()
            continue
        error, number = broker.fetch(body, room=what != "no room")
        session.answered(error, number)
        if not error:
            assert broker.reads == wanted
            assert all(session.position(place) == wanted.get(place) for place in PLACES) or number == 0
        if not error and broker.epoch == 0 and number and first_epoch:
            broker.epoch, session.epoch = first_epoch - 1, first_epoch  # long after


async def test_an_idle_fetch_names_nothing_and_a_record_comes_all_the_same(readers, producer, admin) -> None:
    names = [f"t-{uuid.uuid4().hex[:12]}" for _ in range(60)]
    await admin.create_topics([NewTopic(name, 1, 1) for name in names])
    for name in names:
        await until_led(admin, name)
    sink = readers.Sink()
    await readers.live_reader.watch_all(names, readers.Fan(sink))
    await producer.send_and_wait(names[0], b"first")
    await readers.wait_until(lambda: sink.values == [b"first"])
    before = readers.live_reader.statistics()
    for number in range(20):
        await producer.send_and_wait(names[number], b"%d" % number)
        await readers.wait_until(lambda number=number: sink.values[-1] == b"%d" % number)
    done = readers.live_reader.statistics()
    assert done.fetches > before.fetches
    assert done.named - before.named <= 3 * 20 + len(names)  # not 60 in each; one full fetch is allowed for
    await admin.delete_topics(names)
