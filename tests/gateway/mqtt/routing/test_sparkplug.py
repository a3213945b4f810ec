"""A Sparkplug node's births, data and deaths with the preset: a host gets them in the order of the node."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

from protocols.mqtt.packets import Publish
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient

CONFIG = """
[kafka]
create_topics = true
[mapping]
presets = ["sparkplug"]
"""
KINDS = ["NBIRTH", "DBIRTH", "NDATA", "DDATA", "DDEATH", "NDEATH"]
ROUNDS = 40  # fewer messages than the gateway accepts unacknowledged


@pytest.mark.parametrize("qos", [0, 1])
async def test_a_host_gets_a_nodes_messages_in_their_order(
    bootstrap: str, new_gateway: Callable[..., GatewayProcess], qos: int
) -> None:
    gateway = await new_gateway(bootstrap, config=CONFIG).start()
    group = uuid.uuid4().hex[:8]
    host = await RawClient.connect(gateway.address("mqtt"))
    await host.subscribe(f"spBv1.0/{group}/#")
    edge = await RawClient.connect(gateway.address("mqtt"))
    sent: dict[str, list[str]] = {}
    for turn in range(ROUNDS):
        for kind in KINDS:
            node = f"e{turn % 5}"
            name = f"spBv1.0/{group}/{kind}/{node}" + ("/device" if kind[0] == "D" else "")
            edge.send(Publish(name, str(turn).encode(), qos, packet_id=edge.new_id() if qos else 0))
            sent.setdefault(node, []).append(f"{kind} {turn}")
    seen: dict[str, list[str]] = {}
    for message in await host.messages(ROUNDS * len(KINDS)):
        _, _, kind, node, *_ = message.topic.split("/")
        seen.setdefault(node, []).append(f"{kind} {message.payload.decode()}")
    assert seen == sent
    edge.drop()
    host.drop()


async def test_the_last_birth_is_retained_for_each_topic_name(
    bootstrap: str, new_gateway: Callable[..., GatewayProcess]
) -> None:
    """A key of many topic names: retained messages still belong to their topic name."""
    gateway = await new_gateway(bootstrap, config=CONFIG).start()
    group = uuid.uuid4().hex[:8]
    edge = await RawClient.connect(gateway.address("mqtt"))
    for kind in ("NBIRTH", "DBIRTH"):
        name = f"spBv1.0/{group}/{kind}/e"
        assert await edge.publish(name, kind.encode(), retain=True, user_properties=(("k", "v"),)) == 0
    host = await RawClient.connect(gateway.address("mqtt"))
    await host.subscribe(f"spBv1.0/{group}/#")
    assert sorted(message.payload for message in await host.messages(2)) == [b"DBIRTH", b"NBIRTH"]
    edge.drop()
    host.drop()
