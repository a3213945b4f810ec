"""Where shared subscriptions begin: what was stored before is not for them, what comes while they are away is."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from protocols.mqtt.packets import Subscription
from tests.conformance.conftest import kept
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.topics import until_gone

CONFIG = "[kafka]\ncreate_topics = true\n"


@pytest.fixture(scope="module")
async def creating(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcess]:
    """A gateway that creates topics."""
    process = await GatewayProcess(tmp_path_factory.mktemp("creating"), bootstrap, config=CONFIG).start()
    yield process
    assert await process.stop() == 0


@pytest.fixture
def name() -> str:
    return f"st-{uuid.uuid4().hex[:10]}"


async def member(gateway: GatewayProcess, *arguments: Any, **options: Any) -> RawClient:
    return await RawClient.connect(gateway.address("mqtt"), *arguments, **options)


async def publish(gateway: GatewayProcess, topic: str, *payloads: bytes) -> None:
    client = await member(gateway)
    for payload in payloads:
        while await client.publish(topic, payload) == 0x90:
            pass  # it was deleted a moment ago
    await client.disconnect()


async def subscribed(client: RawClient, *filters: str) -> RawClient:
    codes = (await client.subscribe(*(Subscription(each, 1) for each in filters))).reason_codes
    assert codes == (1,) * len(filters)
    return client


AWAY = [b"%d" % number for number in range(5)]


@pytest.mark.parametrize("version", [5, 4], ids=["5.0", "3.1.1"])
@pytest.mark.parametrize("pattern", ["{0}/#", "{0}/x"])
async def test_a_topic_that_is_new_while_the_member_is_away(
    creating: GatewayProcess, name: str, version: int, pattern: str
) -> None:
    options = kept(version)
    client = await member(creating, f"{name}-c", **options)
    await subscribed(client, f"$share/{name}/{pattern.format(name)}")
    await client.disconnect()
    await publish(creating, f"{name}/x", *AWAY)
    client = await member(creating, f"{name}-c", **options)
    assert client.connack.session_present
    assert [message.payload for message in await client.messages(len(AWAY))] == AWAY
    client.drop()


async def test_a_new_topic_over_a_restart(bootstrap: str, tmp_path: Path, name: str) -> None:
    first = await GatewayProcess(tmp_path, bootstrap, config=CONFIG).start()
    client = await member(first, f"{name}-c", **kept(5))
    await subscribed(client, f"$share/{name}/{name}/#")
    await client.disconnect()
    await publish(first, f"{name}/x", *AWAY)
    assert await first.stop() == 0
    second = await GatewayProcess(tmp_path, bootstrap, config=CONFIG).start()
    client = await member(second, f"{name}-c", **kept(5))
    assert [message.payload for message in await client.messages(5)] == AWAY
    client.drop()
    assert await second.stop() == 0


async def test_another_filter_of_a_share_name_gets_nothing_older(creating: GatewayProcess, name: str) -> None:
    """Though its group has a position in the topic that is as old."""
    await publish(creating, f"{name}/x", b"make the topic")
    one = await subscribed(await member(creating), f"$share/{name}/{name}/a")
    await publish(creating, f"{name}/a", b"seen")
    assert (await one.message()).payload == b"seen"
    await one.disconnect()
    await publish(creating, f"{name}/b", *AWAY)
    other = await subscribed(await member(creating), f"$share/{name}/{name}/b")
    await publish(creating, f"{name}/b", b"new")
    assert (await other.message()).payload == b"new"
    other.drop()


async def test_the_same_filter_goes_on_where_its_group_was(creating: GatewayProcess, name: str) -> None:
    """Also for clients without sessions, as long as Kafka knows the group."""
    await publish(creating, f"{name}/x", b"make the topic")
    for round_ in range(2):
        one = await subscribed(await member(creating), f"$share/{name}/{name}/a")
        await publish(creating, f"{name}/a", b"last")
        assert [message.payload for message in await one.messages(1 + 5 * round_)] == [*AWAY * round_, b"last"]
        await one.disconnect()
        await publish(creating, f"{name}/a", *AWAY)


async def test_a_start_does_not_count_in_a_recreated_topic(
    creating: GatewayProcess, admin: AIOKafkaAdminClient, name: str
) -> None:
    """All its records are newer, whatever their offsets."""
    await publish(creating, f"{name}/b", *AWAY)
    one = await subscribed(await member(creating), f"$share/{name}/{name}/a")
    two = await subscribed(await member(creating, f"{name}-c", **kept(5)), f"$share/{name}/{name}/b")
    await two.disconnect()
    await admin.delete_topics([name])
    await until_gone(admin, name)
    await publish(creating, f"{name}/x", b"make the topic")
    await publish(creating, f"{name}/b", b"new")
    two = await member(creating, f"{name}-c", **kept(5))
    assert (await two.message()).payload == b"new"
    one.drop()
    two.drop()
