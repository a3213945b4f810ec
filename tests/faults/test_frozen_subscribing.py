"""Kafka is frozen while clients connect and subscribe: each gets an answer from memory, or an error with the reason."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Callable
from typing import Any

from gateway.embedded.broker import EmbeddedBroker
from protocols.mqtt import packets
from protocols.mqtt.properties import Properties
from tests.support.frozen import freeze
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient

CONFIG = "drain_timeout_s = 2\n[kafka]\ncreate_topics = true\n"

BOUND_S = 24.0  # 8 plus a slow machine; a request to Kafka waits 30 or more


async def test_each_is_answered_in_time(stoppable: EmbeddedBroker, new_gateway: Callable[..., GatewayProcess]) -> None:
    gateway = await new_gateway(stoppable.bootstrap_servers, config=CONFIG).start()
    address, name = gateway.address("mqtt"), f"frozen-{uuid.uuid4().hex[:6]}"
    clients: list[RawClient] = []

    async def connect(**options: Any) -> RawClient:
        clients.append(await RawClient.connect(address, **options))
        return clients[-1]

    try:
        first = await connect()
        await first.subscribe(f"{name}/#")
        await first.publish(f"{name}/a", b"before")
        assert (await first.message()).payload == b"before"
        freeze(stoppable.pid)
        try:
            known, unknown, kept = await connect(), await connect(), await RawClient.open(address)
            clients.append(kept)
            async with asyncio.timeout(BOUND_S):
                kept.send(packets.Connect(kept.version, f"{name}-kept", clean_start=False, properties=expiry()))
                for client, topic_filter in ((known, f"{name}/+"), (unknown, "#")):
                    client.send(packets.Subscribe(1, (packets.Subscription(topic_filter, 1),)))
                    client.send(packets.Pingreq())
                # The first client's topics may be known without asking Kafka; then SUBACK comes before PINGRESP.
                answers = [await known.receive(), await known.receive()]
                assert {type(answer) for answer in answers} == {packets.Suback, packets.Pingresp}
                assert [answer.reason_codes for answer in answers if isinstance(answer, packets.Suback)] == [(1,)]
                await unknown.expect(packets.Pingresp)  # before SUBACK, which needs Kafka
                refused = await unknown.expect(packets.Suback)
                assert refused.reason_codes == (0x80,)
                assert refused.properties is not None
                assert "Kafka does not answer" in str(refused.properties.reason_string)
                assert (await kept.expect(packets.Connack)).reason_code == 0x88
        finally:
            os.kill(stoppable.pid, signal.SIGCONT)
        await first.publish(f"{name}/a", b"after")
        assert (await known.message()).payload == b"after"
    finally:
        for client in clients:
            client.drop()
    assert await gateway.stop() == 0


def expiry() -> Any:
    return Properties(session_expiry_interval=600)
