"""A second broker of a cluster; when it is down, its partitions have no leader."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from aiokafka.admin import AIOKafkaAdminClient

from gateway.embedded import storage
from gateway.embedded.broker import EmbeddedBroker
from tests.support.waiting import wait_until


async def second_broker(new_broker: Callable[..., EmbeddedBroker], first: EmbeddedBroker) -> EmbeddedBroker:
    """A broker of the first one's cluster."""
    marker = storage.read_marker(first.directory, first._kafka)
    assert marker is not None
    port = storage.choose_port(0, 0, "embedded.port", 0)
    second = new_broker(
        "second",
        port=port,
        settings={
            "node.id": "2",
            "process.roles": "broker",
            "controller.quorum.voters": f"1@127.0.0.1:{marker.controller_port}",
            "listeners": f"PLAINTEXT://127.0.0.1:{port}",
        },
    )
    second.directory.mkdir()
    storage.write_marker(second.directory, msgspec.structs.replace(marker, port=port, controller_port=0))
    await second.start()
    return second


async def until_leaderless(admin: AIOKafkaAdminClient, topic: str) -> None:
    """Wait until a partition has no leader: the controller fences a broker some seconds after its last heartbeat."""
    leaders: list[int] = []

    async def look() -> None:
        (found,) = await admin.describe_topics([topic])
        leaders[:] = [partition["leader"] for partition in found["partitions"]]

    await look()
    while -1 not in leaders:
        await wait_until(lambda: True)
        await look()
