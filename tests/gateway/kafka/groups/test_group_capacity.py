"""Capacity that a subscriber gains in the moment in which its group's reader stops waiting for it."""

from __future__ import annotations

import time
import uuid

from gateway.kafka.groups import reader as group_reader


async def test_capacity_that_comes_with_the_time_out_is_seen(readers, producer, new_topic) -> None:
    topic = await new_topic(partitions=1)
    for number in range(4):
        await producer.send_and_wait(topic, b"%d" % number)
    holder = readers.Holder(1)
    holder.membership = await readers.groups.join(f"g-{uuid.uuid4().hex[:12]}", [topic], holder)
    for count in range(1, 4):
        await readers.wait_until(lambda count=count: len(holder.got) == count)
        # The loop is blocked until the time is up, so it sees the capacity and the time-out together.
        time.sleep(group_reader.STALL_S + 0.1)  # noqa: ASYNC251
        holder.settle()
    await readers.wait_until(lambda: len(holder.got) == 4)
    holder.settle()
    await holder.membership.leave()
