"""Paho's C client over WebSocket: it handles the packets behind the first of a frame only when more data comes."""

from __future__ import annotations

import asyncio
import shutil
import uuid

import pytest

from protocols.mqtt.packets import Publish, Pubrec, Pubrel
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient

pytestmark = pytest.mark.skipif(shutil.which("paho_cs_sub") is None, reason="paho.mqtt.c-examples is not installed")

COUNT = 100
WAIT_S = 60


@pytest.mark.parametrize("version", ["5", "311"])
@pytest.mark.parametrize("command", ["paho_cs_sub", "paho_c_sub"])
async def test_a_burst_at_qos_2_arrives(gateway: GatewayProcess, branch: str, command: str, version: str) -> None:
    host, port = gateway.address("http")
    publisher = await RawClient.connect(gateway.address("mqtt"))
    await publisher.publish(f"{branch}/first", b"first", retain=True)
    subscriber = await asyncio.create_subprocess_exec(
        "stdbuf", "-oL", command, "-t", f"{branch}/#", "-c", f"ws://{host}:{port}/mqtt", "-q", "2", "-V", version,
        "-i", f"c-{uuid.uuid4().hex[:10]}", "-k", "600", stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert subscriber.stdout is not None
        while not (await asyncio.wait_for(subscriber.stdout.readline(), WAIT_S)).endswith(b"\tfirst\n"):
            assert not subscriber.stdout.at_eof(), "not before it has subscribed"
        sent = [b"%d" % number for number in range(COUNT)]
        ids = [publisher.new_id() for _ in sent]
        for packet_id, payload in zip(ids, sent, strict=True):
            publisher.send(Publish(f"{branch}/burst", payload, 2, packet_id=packet_id))
        for packet_id in ids:
            await publisher.answer(Pubrec, packet_id)
            publisher.send(Pubrel(packet_id))
        seen = [await asyncio.wait_for(subscriber.stdout.readline(), WAIT_S) for _ in sent]
        assert [line.split(b"\t")[1].strip() for line in seen] == sent
    finally:
        subscriber.kill()
        await subscriber.wait()
        publisher.drop()
