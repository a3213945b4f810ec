"""Eclipse Tahu's Sparkplug client as an edge node with devices: a host gets each birth before its data, in order."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from protocols.mqtt.packets import Publish
from tests.interop.toolchains import ToolchainError, node_packages
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient

HERE = Path(__file__).parent / "node"
CONFIG = '[kafka]\ncreate_topics = true\n[mapping]\npresets = ["sparkplug"]\n'
DEVICES, ROUNDS = 6, 20


async def test_births_come_before_data(bootstrap: str, new_gateway: Callable[..., GatewayProcess]) -> None:
    try:
        node = node_packages(HERE)
    except ToolchainError as missing:
        pytest.skip(f"the Sparkplug client: {missing}")
    gateway = await new_gateway(bootstrap, config=CONFIG).start()
    group = f"sp-{uuid.uuid4().hex[:8]}"
    host = await RawClient.connect(gateway.address("mqtt"))
    await host.subscribe(f"spBv1.0/{group}/#")
    url = "mqtt://{}:{}".format(*gateway.address("mqtt"))
    edge = await asyncio.create_subprocess_exec(
        node, HERE / "sparkplug.mjs", url, group, "edge", str(DEVICES), str(ROUNDS)
    )
    assert await asyncio.wait_for(edge.wait(), 60) == 0
    messages = await host.messages(1 + DEVICES + ROUNDS * (1 + DEVICES) + 1)
    assert order(messages) == {
        "edge": ["NBIRTH", *["NDATA"] * ROUNDS, "NDEATH"],
        **{f"d{number}": ["DBIRTH", *["DDATA"] * ROUNDS] for number in range(DEVICES)},
    }
    kinds = [message.topic.split("/")[2] for message in messages]
    assert kinds[: 1 + DEVICES] == ["NBIRTH", *["DBIRTH"] * DEVICES]
    assert kinds[-1] == "NDEATH"
    host.drop()


def order(messages: list[Publish]) -> dict[str, list[str]]:
    """Return the kinds of messages of the node and of each device, in order."""
    found: dict[str, list[str]] = {}
    for message in messages:
        _, _, kind, *names = message.topic.split("/")
        found.setdefault(names[-1], []).append(kind)
    return found
