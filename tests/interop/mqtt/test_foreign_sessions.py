"""Persistent sessions, wills and takeover with every foreign client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.interop.driver import Wire
from tests.interop.mqtt.clients import (
    EVERY,
    HIVEMQ,
    MQTTJS,
    MQTTJS_311,
    PAHO,
    PAHO_311,
    VERSION_5,
    WEBSOCKET,
    Kind,
    each,
)
from tests.interop.mqtt.conftest import NewClient
from tests.interop.mqtt.drivers import WAIT_S, Client
from tests.support.gateway import GatewayProcess

KEPT = {"clean": False, "properties": {"session_expiry_interval": 300}}
# amqtt's client forgets unfinished exchanges when it loses its connection.
FINISHING = [PAHO, PAHO_311, MQTTJS, MQTTJS_311, HIVEMQ]


@pytest.mark.parametrize("kind", **each(EVERY + WEBSOCKET))
async def test_a_persistent_session_queues_messages(new_client: NewClient, branch: str, kind: Kind) -> None:
    publisher = await new_client(PAHO)
    client = await new_client(kind, connected=False)
    connack = await client.connect(**KEPT)
    assert (connack.reason, connack.session_present) == (0, False)
    assert await client.subscribe(f"{branch}/+", qos=2) == [2]
    assert await publisher.publish(f"{branch}/a", b"0", 2) == 0
    await client.received(1)
    await client.disconnect()

    answers = [publisher.send(f"{branch}/a", b"%d" % number, 1 + number % 2) for number in range(1, 31)]
    await asyncio.wait_for(asyncio.gather(*answers), WAIT_S)
    connack = await client.connect(**KEPT)
    assert (connack.reason, connack.session_present) == (0, True)
    await client.received(31)
    assert await publisher.publish(f"{branch}/a", b"31", 2) == 0
    seen = await client.received(32)
    # In order for each QoS [MQTT-4.6.0-5], each once.
    assert [int(one.payload) for one in seen if one.qos == 1] == list(range(2, 31, 2))
    assert [int(one.payload) for one in seen if one.qos == 2] == [0, *range(1, 32, 2)]

    await client.unsubscribe(f"{branch}/+")
    await client.disconnect()
    fresh = await new_client(kind, clean=True, client_id=client.name)
    assert await publisher.publish(f"{branch}/a", b"nobody wants it") == 0
    await fresh.subscribe(f"{branch}/end")
    assert await publisher.publish(f"{branch}/end") == 0
    assert [one.topic for one in await fresh.received(1)] == [f"{branch}/end"]


@pytest.mark.parametrize("kind", **each(FINISHING))
async def test_exactly_once_to_a_client_whose_network_breaks(
    new_client: NewClient, wire: Wire, branch: str, kind: Kind
) -> None:
    publisher = await new_client(PAHO)
    client = await new_client(kind, through=wire, **KEPT)
    assert await client.subscribe(f"{branch}/+", qos=2) == [2]
    for turn in range(3):
        answers = [publisher.send(f"{branch}/a", b"%d" % (turn * 50 + number), 2) for number in range(50)]
        await client.received(turn * 50 + 3)
        wire.cut()
        await asyncio.wait_for(asyncio.gather(*answers), WAIT_S)
        await client.ended(turn + 1)
        connack = await client.connect(**KEPT)
        assert (connack.reason, connack.session_present) == (0, True)
    await client.received(150)
    assert await publisher.publish(f"{branch}/end", b"150", 2) == 0
    seen = await client.received(151)
    assert [int(one.payload) for one in seen] == list(range(151))


@pytest.mark.parametrize("kind", **each(FINISHING))
async def test_exactly_once_from_a_client_whose_network_breaks(
    new_client: NewClient, wire: Wire, branch: str, kind: Kind
) -> None:
    watcher = await new_client(PAHO)
    await watcher.subscribe(f"{branch}/+", qos=2)
    client = await new_client(kind, through=wire, **KEPT)
    answers = []
    for turn in range(3):
        answers += [client.send(f"{branch}/a", b"%d" % (turn * 50 + number), 2) for number in range(50)]
        await client.flush()  # HiveMQ's client accepts no publish while it is not connected
        await watcher.received(turn * 50 + 3)
        wire.cut()
        await client.ended(turn + 1)
        connack = await client.connect(**KEPT)
        assert (connack.reason, connack.session_present) == (0, True)
    assert [answer["reason"] for answer in await asyncio.wait_for(asyncio.gather(*answers), WAIT_S)] == [0] * 150
    await watcher.received(150)
    assert await client.publish(f"{branch}/end", b"150", 2) == 0
    assert [int(one.payload) for one in await watcher.received(151)] == list(range(151))


async def test_all_libraries_resume_after_the_gateway_was_killed(
    new_client: NewClient,
    new_gateway: Callable[..., GatewayProcess],
    bootstrap: str,
    tmp_path: Path,
    branch: str,
) -> None:
    """SIGKILL amid QoS 2 in both directions; each client resumes its session at the restarted gateway."""
    gateway = await new_gateway(bootstrap, "--data-dir", str(tmp_path / "data")).start()
    async with Wire(gateway.address("mqtt")).listening() as wire:
        watcher = await new_client(PAHO)
        await watcher.subscribe(f"{branch}/up/#", qos=2)
        clients = {kind: await new_client(kind, through=wire, **KEPT) for kind in FINISHING}
        answers = []
        for kind, client in clients.items():
            assert await client.subscribe(f"{branch}/down", qos=2) == [2]
            answers += [client.send(f"{branch}/up/{kind}", b"%d" % number, 2) for number in range(100)]
        for client in clients.values():
            await client.flush()
        news = [watcher.send(f"{branch}/down", b"%d" % number, 2) for number in range(100)]
        await watcher.received(50)
        await gateway.kill()
        wire.cut()
        assert {answer["reason"] for answer in await asyncio.wait_for(asyncio.gather(*news), WAIT_S)} == {0}
        for client in clients.values():
            await client.ended()
        await gateway.start()
        wire.target = gateway.address("mqtt")
        for connack in await asyncio.gather(*(client.connect(**KEPT) for client in clients.values())):
            assert (connack.reason, connack.session_present) == (0, True)
        assert {answer["reason"] for answer in await asyncio.wait_for(asyncio.gather(*answers), WAIT_S)} == {0}
        assert await watcher.publish(f"{branch}/down", b"100", 2) == 0
        for client in clients.values():
            assert [int(one.payload) for one in await client.received(101)] == list(range(101)), client
        await watcher.received(100 * len(clients))
        for kind in clients:
            seen = [int(one.payload) for one in watcher.messages if one.topic == f"{branch}/up/{kind}"]
            assert seen == list(range(100)), kind
        assert await gateway.stop() == 0


@pytest.mark.parametrize("kind", **each(EVERY))
async def test_a_will_follows_a_broken_connection_and_no_disconnect(
    new_client: NewClient, wire: Wire, branch: str, kind: Kind
) -> None:
    watcher = await new_client(PAHO)
    await watcher.subscribe(f"{branch}/#", qos=2)
    polite = await new_client(kind, will={"topic": f"{branch}/polite", "payload": b"not to be seen"})
    await polite.disconnect()
    broken = await new_client(kind, through=wire, will={"topic": f"{branch}/broken", "payload": b"gone", "qos": 2})
    wire.cut()
    await broken.ended()
    [will] = await watcher.received(1)
    assert will[:4] == (f"{branch}/broken", b"gone", 2, False)


@pytest.mark.parametrize("kind", **each(VERSION_5))
async def test_a_requested_will_has_its_properties_and_is_retained(
    new_client: NewClient, branch: str, kind: Kind
) -> None:
    watcher = await new_client(kind)
    await watcher.subscribe(f"{branch}/#", qos=2, retain_as_published=True)
    properties = {"content_type": "text/plain", "user_properties": [["why", "asked"]], "message_expiry_interval": 300}
    will = {"topic": f"{branch}/w", "payload": b"as asked", "qos": 1, "retain": True, "properties": properties}
    client = await new_client(kind, will=will)
    await client.disconnect(reason=0x04)
    [seen] = await watcher.received(1)
    assert seen[:4] == (f"{branch}/w", b"as asked", 1, True)
    assert seen.properties["content_type"] == "text/plain"
    assert seen.properties["user_properties"] == [("why", "asked")]
    assert 200 <= seen.properties["message_expiry_interval"] <= 300
    assert await watcher.publish(f"{branch}/w", b"", retain=True) == 0


@pytest.mark.parametrize("kind", **each(EVERY))
async def test_a_second_connection_takes_over_the_client_id(new_client: NewClient, kind: Kind) -> None:
    first = await new_client(kind)
    await new_client(PAHO, client_id=first.name)
    said = await first.ended()
    if kind.version == 5:
        assert said["reason"] == 0x8E


async def test_wills_sessions_and_messages_expire_in_time(new_client: NewClient, wire: Wire, branch: str) -> None:
    """Will Delay, Session Expiry and Message Expiry with three libraries in parallel; the wills serve as a clock."""
    watcher = await new_client(PAHO)
    await watcher.subscribe(f"{branch}/wills/#", qos=1)
    loop = asyncio.get_running_loop()
    delayed, returned, ending, sleeping = {}, {}, {}, {}
    for kind in VERSION_5:

        def will(name: str, delay: int, kind: Kind = kind) -> dict[str, object]:
            topic = f"{branch}/wills/{kind.library}/{name}"
            return {"topic": topic, "payload": b"", "properties": {"will_delay_interval": delay}}

        delayed[kind] = await new_client(kind, through=wire, will=will("delayed", 6), **KEPT)
        returned[kind] = await new_client(kind, through=wire, will=will("returned", 5), **KEPT)
        short = {"clean": False, "properties": {"session_expiry_interval": 1}}
        ending[kind] = await new_client(kind, through=wire, will=will("ending", 300), **short)
        sleeping[kind] = await new_client(kind, **KEPT)
        await sleeping[kind].subscribe(f"{branch}/news", qos=1)
        await sleeping[kind].disconnect()
    assert await watcher.publish(f"{branch}/news", b"short-lived", message_expiry_interval=1) == 0
    assert await watcher.publish(f"{branch}/news", b"long-lived", message_expiry_interval=300) == 0
    assert await watcher.publish(f"{branch}/news", b"for ever") == 0

    wire.cut()
    cut_at = loop.time()

    async def back(client: Client) -> None:
        await client.ended()
        assert (await client.connect(**KEPT)).session_present

    await asyncio.gather(*map(back, returned.values()))

    seen = {one.topic.removeprefix(f"{branch}/wills/") for one in await watcher.received(2 * len(VERSION_5))}
    assert seen == {f"{kind.library}/{name}" for kind in VERSION_5 for name in ("delayed", "ending")}
    assert loop.time() - cut_at >= 6
    for kind in VERSION_5:
        await ending[kind].ended()
        assert not (await ending[kind].connect(clean=False)).session_present, kind
        assert (await sleeping[kind].connect(**KEPT)).session_present, kind
        news = await sleeping[kind].received(2)
        assert [one.payload for one in news] == [b"long-lived", b"for ever"], kind
        assert 200 < news[0].properties["message_expiry_interval"] < 300
        assert "message_expiry_interval" not in news[1].properties
