"""The pool of consumers for subscribers that are behind."""

from __future__ import annotations

from typing import Any

import pytest
from aiokafka import TopicPartition

from gateway.kafka.driver import lifecycle
from gateway.kafka.driver.kafka_consumer import close_consumer
from gateway.kafka.read.catch_up_reader import CatchUpReader, Reading

RECORDS = 10


async def test_a_subscriber_that_falls_behind_while_the_last_consumer_closes_is_served(
    readers: Any, producer: Any, new_topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await new_topic(partitions=1)
    for number in range(RECORDS):
        await producer.send_and_wait(topic, b"%d" % number)
    pool = CatchUpReader(readers.kafka, readers.spawn, readers.lookup, consumers=1, idle_s=0.01)
    first, late = readers.Sink(), readers.Sink()
    waiting = [first, late]

    def begin() -> None:
        if waiting:
            place = TopicPartition(topic, 0)
            pool.start(Reading(waiting.pop(0), place, 0, goal=lambda: RECORDS, finished=lambda _: None))

    async def closing(consumer: Any) -> None:
        begin()
        await close_consumer(consumer)

    monkeypatch.setattr(lifecycle, "close_consumer", closing)
    begin()
    await readers.wait_until(lambda: len(late.got) == RECORDS)
    assert len(first.got) == RECORDS
    await pool.stop()
