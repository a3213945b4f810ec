"""Kafka is frozen while persistent sessions connect, subscribe and disconnect: no false answers, and a timely stop."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.embedded.broker import EmbeddedBroker
from protocols.mqtt import packets
from protocols.mqtt.packets import Publish, Subscription, Version
from protocols.mqtt.properties import Properties
from tests.support.frozen import until_frozen
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient

CONFIG = "drain_timeout_s = 2\n[kafka]\ncreate_topics = true\n"
KEPT: dict[str, Any] = {"clean_start": False, "session_expiry_interval": 600}
PATIENT_S = 60


@contextmanager
def frozen(broker: EmbeddedBroker) -> Iterator[None]:
    """Freeze Kafka's process inside the block."""
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(broker.pid, signal.SIGCONT)


@pytest.fixture
async def clients() -> AsyncIterator[list[RawClient]]:
    made: list[RawClient] = []
    yield made
    for client in made:
        client.drop()


async def test_persistent_sessions_get_no_false_answers_while_kafka_is_frozen(
    stoppable: EmbeddedBroker,
    new_gateway: Callable[..., GatewayProcess],
    tmp_path: Path,
    clients: list[RawClient],
) -> None:
    gateway = new_gateway(stoppable.bootstrap_servers, "--data-dir", str(tmp_path / "data"), config=CONFIG)
    await gateway.start()
    name = f"frozen-{uuid.uuid4().hex[:6]}"

    async def connect(who: str) -> RawClient:
        client = await RawClient.connect(gateway.address("mqtt"), f"{name}-{who}", **KEPT)
        clients.append(client)
        return client

    async def begin(who: str) -> RawClient:
        """Send CONNECT without waiting for CONNACK."""
        client = await RawClient.open(gateway.address("mqtt"))
        clients.append(client)
        expiry = Properties(session_expiry_interval=600)
        client.send(packets.Connect(Version.V5, f"{name}-{who}", clean_start=False, properties=expiry))
        return client

    stays, goes = await connect("stays"), await connect("goes")
    for client in (stays, goes):
        await client.subscribe(Subscription(f"{name}/before", 1))
    with frozen(stoppable):
        await until_frozen(stoppable.pid)
        stays.send(packets.Subscribe(50, (Subscription(f"{name}/frozen", 1),)))
        stays.send(packets.Unsubscribe(51, (f"{name}/other",)))
        goes.send(packets.Disconnect())
        assert await goes.expect_end() == []  # a close waits for nothing
        comes = await begin("comes")
        for silent in (stays, comes):
            with pytest.raises(TimeoutError):
                await silent.receive(0.5)
    assert (await stays.expect(packets.Suback, PATIENT_S)).reason_codes == (1,)
    await stays.expect(packets.Unsuback, PATIENT_S)
    assert (await comes.expect(packets.Connack, PATIENT_S)).reason_code == 0
    again = await connect("goes")
    assert again.connack.session_present
    again.send(packets.Disconnect())
    await again.expect_end()

    with frozen(stoppable):
        await until_frozen(stoppable.pid)
        stays.send(packets.Subscribe(52, (Subscription(f"{name}/never", 1),)))
        await begin("late")
        closing = asyncio.create_task(stays.expect_end())
        begun = time.monotonic()
        assert await gateway.stop(60) == 0
        assert time.monotonic() - begun < 40
        assert not any(isinstance(packet, packets.Suback) for packet in await closing)
    assert "Traceback" not in gateway.log.read_text()
    await gateway.start()
    stays, goes = await connect("stays"), await connect("goes")
    assert stays.connack.session_present
    assert goes.connack.session_present
    sender = await connect("sender")
    for place in ("before", "frozen"):
        await sender.publish(f"{name}/{place}", place.encode())
    assert {(await stays.message(PATIENT_S)).payload for _ in range(2)} == {b"before", b"frozen"}
    message = await goes.expect(Publish, PATIENT_S)
    assert message.payload == b"before"
    assert await gateway.stop(30) == 0
