"""A shared subscription whose members are clients of different libraries."""

from __future__ import annotations

import asyncio
import uuid

from tests.interop.mqtt.clients import HIVEMQ, MQTTJS, PAHO, PAHO_311
from tests.interop.mqtt.conftest import NewClient
from tests.interop.mqtt.drivers import WAIT_S
from tests.support.waiting import wait_until


async def test_four_libraries_share_a_group_and_take_over_from_one_that_leaves(
    new_client: NewClient, branch: str
) -> None:
    publisher = await new_client(PAHO)
    members = [await new_client(kind) for kind in (PAHO, PAHO_311, MQTTJS, HIVEMQ)]
    group = f"$share/g-{uuid.uuid4().hex[:8]}/{branch}/#"
    for member in members:
        assert await member.subscribe(group, qos=1) == [1]

    async def publish(numbers: range) -> None:
        answers = [publisher.send(f"{branch}/{number % 20}", b"%d" % number) for number in numbers]
        await asyncio.wait_for(asyncio.gather(*answers), WAIT_S)

    def seen() -> list[int]:
        return sorted(int(one.payload) for member in members for one in member.messages)

    await publish(range(200))
    await wait_until(lambda: len(seen()) >= 200, WAIT_S)
    assert seen() == list(range(200))
    assert all(member.messages for member in members), "everybody has a part"

    await members[3].disconnect()
    await members[2].unsubscribe(group)
    counts = [len(member.messages) for member in members]
    await publish(range(200, 400))
    # At least once: a message that a member received but did not acknowledge before it left goes to another one.
    await wait_until(lambda: set(seen()) == set(range(400)), WAIT_S)
    assert [len(member.messages) for member in members[2:]] == counts[2:]
    assert all(len(member.messages) > before for member, before in zip(members[:2], counts[:2], strict=True))
