"""Mosquitto as a bridge: another broker that connects to the gateway, in its default setting and in each version."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from loadtest.ports import free_port
from protocols.mqtt.packets import Publish, Subscription
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.waiting import wait_until

MOSQUITTO = shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/sbin")

pytestmark = pytest.mark.skipif(MOSQUITTO is None, reason="the broker mosquitto is not installed")

SETTINGS = {
    "the default": "",
    "3.1": "bridge_protocol_version mqttv31",
    "5.0": "bridge_protocol_version mqttv50",
}
NewBridge = Callable[..., Awaitable[tuple[str, int]]]


@pytest.fixture
async def new_bridge(gateway: GatewayProcess, tmp_path: Path) -> AsyncIterator[NewBridge]:
    """Start a broker, return its address: its topics below `loc` are those of the gateway below `remote`."""
    assert MOSQUITTO is not None
    processes = []
    host, port = gateway.address("mqtt")

    async def make(remote: str, client_id: str, setting: str) -> tuple[str, int]:
        address = ("127.0.0.1", free_port())
        lines = [
            f"listener {address[1]} {address[0]}", "allow_anonymous true", "connection gateway",
            f"address {host}:{port}", f"topic # both 1 loc/ {remote}/", f"remote_clientid {client_id}",
            "restart_timeout 1", setting,
        ]  # fmt: skip
        configuration = tmp_path / f"{client_id}.conf"
        configuration.write_text("\n".join(lines))
        with (tmp_path / f"{client_id}.log").open("w") as log:
            processes.append(await asyncio.create_subprocess_exec(MOSQUITTO, "-c", configuration, stderr=log))
        return address

    yield make
    for process in processes:
        process.kill()
        await process.wait()


async def connected(address: tuple[str, int], version: int = 4) -> RawClient:
    """Connect a client as soon as the broker listens."""

    async def listens() -> bool:
        try:
            _, writer = await asyncio.open_connection(*address)
        except OSError:
            return False
        writer.close()
        return True

    await wait_until(listens)
    return await RawClient.connect(address, version=version)


async def after(client: RawClient, name: str) -> Publish:
    """Return the first message of another topic: one may come again as retained if the bridge subscribes just then."""
    while (message := await client.message()).topic == name:
        pass
    return message


@pytest.mark.parametrize("setting", SETTINGS)
async def test_messages_pass_both_ways_and_none_comes_back(
    gateway: GatewayProcess, new_bridge: NewBridge, branch: str, setting: str
) -> None:
    address = await new_bridge(branch, f"bridge-{uuid.uuid4().hex[:8]}", SETTINGS[setting])
    far, near = await RawClient.connect(gateway.address("mqtt")), await connected(address)
    await far.publish(f"{branch}/state", b"on", retain=True)
    await near.subscribe("loc/#")
    assert (await near.message()).payload == b"on", "the bridge has subscribed"
    await far.subscribe(Subscription(f"{branch}/up", 1))
    await near.publish("loc/up", b"up")
    assert [(message.topic, message.payload) for message in await far.messages(1)] == [(f"{branch}/up", b"up")]
    await far.publish(f"{branch}/down", b"down")
    seen = [await after(near, "loc/state"), await near.message()]
    assert [(message.topic, message.payload) for message in seen] == [("loc/up", b"up"), ("loc/down", b"down")]
    near.drop()
    far.drop()


@pytest.mark.parametrize("setting", SETTINGS)
async def test_a_bridges_broker_keeps_retained_messages(
    gateway: GatewayProcess, new_bridge: NewBridge, branch: str, setting: str
) -> None:
    """A broker of 3.1.1 or 3.1 gets them with RETAIN set, also while its bridge is connected."""
    address = await new_bridge(branch, f"bridge-{uuid.uuid4().hex[:8]}", SETTINGS[setting])
    far, near = await RawClient.connect(gateway.address("mqtt")), await connected(address)
    await near.subscribe("loc/#")
    await far.publish(f"{branch}/first", b"1", retain=True)
    assert (await near.message()).topic == "loc/first", "the bridge has subscribed"
    await far.publish(f"{branch}/second", b"2", retain=True)
    assert (await after(near, "loc/first")).topic == "loc/second"
    later = await connected(address)
    await later.subscribe("loc/second")
    message = await later.message()
    assert (message.payload, message.retain) == (b"2", True)
    for client in (near, later, far):
        client.drop()


async def test_the_bridges_state_is_told_and_ends_with_it(
    gateway: GatewayProcess, new_bridge: NewBridge, branch: str
) -> None:
    """By default a bridge keeps its state at the other broker, and leaves a will that ends it."""
    name = f"bridge-{uuid.uuid4().hex[:8]}"
    watcher = await RawClient.connect(gateway.address("mqtt"))
    await watcher.subscribe(f"$SYS/broker/connection/{name}/state")
    await new_bridge(branch, name, "")
    assert (await watcher.message()).payload in (b"0", b"1")
    watcher.drop()
