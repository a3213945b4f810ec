"""A gateway that is configured with QoS 1 as its maximum."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protocols.mqtt import packets
from protocols.mqtt.packets import Publish, Subscription, Will
from tests.conformance.conftest import Connect
from tests.support.gateway import GatewayProcess


@pytest.fixture(scope="module")
async def limited(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcess]:
    config = "[mqtt]\nmaximum_qos = 1\n"
    process = GatewayProcess(Path(tmp_path_factory.mktemp("limited")), bootstrap, config=config)
    await process.start()
    yield process
    assert await process.stop() == 0


@pytest.mark.clause("MQTT-3.2.2-9", "MQTT-3.2.2-10", "MQTT-3.2.2-11", "MQTT-3.2.2-12")
async def test_qos_1_at_most(limited: GatewayProcess, connect: Connect, place: str) -> None:
    client = await connect(to=limited)
    assert client.granted.maximum_qos == 1
    subscriptions = [Subscription(f"{place}/{qos}", qos) for qos in range(3)]
    assert (await client.subscribe(*subscriptions)).reason_codes == (0, 1, 1)
    assert await client.publish(f"{place}/2", b"x", 1) == 0
    assert (await client.message()).qos == 1
    client.send(Publish(f"{place}/2", b"y", 2, packet_id=7))
    assert (await client.expect(packets.Disconnect)).reason_code == 0x9B
    assert await client.expect_end() == []
    client = await connect(to=limited, will=Will(f"{place}/will", b"", 2))
    assert client.connack.reason_code == 0x9B
    assert await client.expect_end() == []
