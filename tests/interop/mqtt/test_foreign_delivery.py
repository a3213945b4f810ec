"""Every foreign client publishes and subscribes at every QoS, payloads and order intact."""

from __future__ import annotations

import asyncio
import hashlib
import itertools

import pytest

from tests.interop.mqtt.clients import EVERY, WEBSOCKET, Kind, each
from tests.interop.mqtt.conftest import NewClient
from tests.interop.mqtt.drivers import WAIT_S

PAYLOADS = [b"", b"\x00\xff\r\n", "grüße, 日本".encode(), bytes(range(256)) * 40]


@pytest.mark.clause("MQTT311-7.0.0-2")
@pytest.mark.parametrize("kind", **each(EVERY + WEBSOCKET))
async def test_every_qos_there_and_back(new_client: NewClient, branch: str, kind: Kind) -> None:
    client = await new_client(kind)
    assert await client.subscribe(f"{branch}/#", qos=2) == [2]
    sent = []
    for number, (qos, payload) in enumerate(itertools.product((0, 1, 2), PAYLOADS)):
        name = f"{branch}/{'abc'[qos]}/{number}"
        assert await client.publish(name, payload, qos) == 0
        sent.append((name, payload, qos))
    seen = await client.received(len(sent))
    assert sorted((one.topic, one.payload, one.qos) for one in seen) == sorted(sent)
    assert not any(one.retain or one.dup for one in seen)
    assert await client.unsubscribe(f"{branch}/#") in ([0], [], None)


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("kind", **each(EVERY))
async def test_a_burst_keeps_its_order_from_one_library_to_all(
    new_client: NewClient, branch: str, kind: Kind, qos: int
) -> None:
    publisher = await new_client(kind)
    subscribers = [await new_client(one) for one in EVERY]
    for subscriber in subscribers:
        assert await subscriber.subscribe(f"{branch}/+", qos=2) == [2]
    answers = [publisher.send(f"{branch}/a", b"%d" % number, qos) for number in range(100)]
    assert all(answer["reason"] == 0 for answer in await asyncio.wait_for(asyncio.gather(*answers), WAIT_S))
    for subscriber in subscribers:
        seen = await subscriber.received(100)
        assert [int(one.payload) for one in seen] == list(range(100)), subscriber


@pytest.mark.parametrize("kind", **each(EVERY + WEBSOCKET))
async def test_a_megabyte(new_client: NewClient, branch: str, kind: Kind) -> None:
    # The topic's limit, max.message.bytes, is a little more than a megabyte and applies to the whole batch.
    payload = hashlib.shake_256(branch.encode()).digest(1_000_000)
    client = await new_client(kind)
    await client.subscribe(f"{branch}/large", qos=1)
    assert await client.publish(f"{branch}/large", payload) == 0
    [message] = await client.received(1)
    assert message.payload == payload
