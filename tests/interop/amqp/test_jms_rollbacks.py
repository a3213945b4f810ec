"""A transacted mover of Qpid JMS that rolls back, with the client's usual prefetch.

At each rollback Qpid JMS releases all messages that it has prefetched. The application has not asked for that.
"""

from __future__ import annotations

import time

import pytest

from tests.interop.amqp.conftest import NewJms
from tests.interop.amqp.jms import bodies

MESSAGES = 200
LIMIT_S = 60  # alone it takes 3 s; with a back-off for each release it takes minutes


@pytest.mark.parametrize("groups", [0, 5], ids=["no group", "5 groups"])
async def test_a_mover_with_rollbacks_loses_no_time_and_no_place(new_jms: NewJms, own: str, groups: int) -> None:
    def grouped(number: int) -> dict[str, str]:
        return {"JMSXGroupID": f"g{number % groups}"} if groups else {}

    client = await new_jms()
    plain, transacted = await client.session(), await client.session("transacted")
    producer = await plain.producer(f"queue:{own}")
    for number in range(MESSAGES):
        await producer.texts(str(number), properties=grouped(number))
    taking = await transacted.consumer(f"queue:{own}")
    giving = await transacted.producer(f"queue:{own}-out")
    began = time.monotonic()
    moved: list[int] = []
    refused = 0
    last = ""
    while len(moved) < MESSAGES:
        [message] = await taking.receive(1)
        if last:
            assert (message["body"], message["redelivered"]) == (last, True), "it has lost its place"
        await giving.texts(message["body"], properties=grouped(int(message["body"])))
        if int(message["body"]) % 4 == 3 and not last:
            refused, last = refused + 1, message["body"]
            await transacted.do("rollback")
        else:
            moved, last = [*moved, int(message["body"])], ""
            await transacted.do("commit")
    took = time.monotonic() - began
    assert refused == MESSAGES // 4
    for group in range(groups or 1):
        wanted = list(range(group, MESSAGES, groups or 1))
        assert [number for number in moved if number % (groups or 1) == group] == wanted
    assert took < LIMIT_S
    watching = await plain.consumer(f"queue:{own}-out")
    assert sorted(map(int, bodies(await watching.receive(MESSAGES)))) == list(range(MESSAGES))
    assert await watching.some(1, 500) == []
