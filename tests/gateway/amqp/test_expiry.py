"""A terminus is answered with the expiry policy and the timeout that it really has (parts 3.5.3, 3.5.6)."""

from __future__ import annotations

from typing import Any

import pytest
from proton import Terminus
from proton.reactor import ReceiverOption, SenderOption
from proton.utils import BlockingConnection

from gateway.amqp.server import AmqpServer
from tests.support.amqp import as_client

KEPT = (Terminus.EXPIRE_NEVER, 0)
ENDS = (Terminus.EXPIRE_WITH_LINK, 0)


class Expiring(ReceiverOption, SenderOption):
    """Asks both termini to be kept for a while."""

    def __init__(self, durability: int, policy: int, timeout: int) -> None:
        self.asked = durability, policy, timeout

    def apply(self, link: Any) -> None:
        for terminus in (link.source, link.target):
            terminus.durability, terminus.expiry_policy, terminus.timeout = self.asked


@pytest.mark.parametrize(
    ("durability", "policy", "answer"),
    [
        (Terminus.NONDURABLE, Terminus.EXPIRE_WITH_SESSION, ENDS),
        (Terminus.NONDURABLE, Terminus.EXPIRE_WITH_CONNECTION, ENDS),
        (Terminus.NONDURABLE, Terminus.EXPIRE_NEVER, KEPT),
        (Terminus.CONFIGURATION, Terminus.EXPIRE_WITH_LINK, KEPT),
        (Terminus.DELIVERIES, Terminus.EXPIRE_WITH_SESSION, KEPT),
    ],
)
async def test_a_source_ends_with_its_link_or_stays(
    listener: AmqpServer, new_topic: Any, durability: int, policy: int, answer: tuple[int, int]
) -> None:
    topic = await new_topic(partitions=1)

    def work(connection: BlockingConnection) -> Any:
        receiver = connection.create_receiver(topic, name="s", options=Expiring(durability, policy, 60))
        source = receiver.link.remote_source
        found = (source.expiry_policy, source.timeout), source.durability
        receiver.close()
        return found

    expiry, durable = await as_client(listener, work, container_id=f"c-{topic}")
    assert expiry == answer
    assert durable == (max(durability, Terminus.CONFIGURATION) if answer == KEPT else Terminus.NONDURABLE)


async def test_a_target_ends_with_its_link(listener: AmqpServer, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)

    def work(connection: BlockingConnection) -> Any:
        options = Expiring(Terminus.DELIVERIES, Terminus.EXPIRE_NEVER, 60)
        target = connection.create_sender(topic, options=options).link.remote_target
        return (target.expiry_policy, target.timeout), target.durability

    assert await as_client(listener, work) == (ENDS, Terminus.NONDURABLE)
