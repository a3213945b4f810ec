"""Sessions in unusual situations: deadlines, heartbeats, odd clients, failed CONNECTs."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from gateway.mqtt.registry.deadlines import Deadlines
from gateway.mqtt.registry.heartbeats import SILENT_S, Gateways
from gateway.mqtt.state.records import GatewayRecord
from gateway.runtime.identity import GatewayIdentity
from protocols.mqtt import packets
from protocols.mqtt.packets import Publish, Subscription, Version, Will
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.mqtt_packets import encode_packet
from tests.support.topics import until_gone

Connect = Callable[..., Awaitable[RawClient]]
KEPT: dict[str, Any] = {"clean_start": False, "session_expiry_interval": 60}


@pytest.fixture
async def connect(gateway: GatewayProcess) -> AsyncIterator[Connect]:
    """Connect clients, and drop them at the end."""
    clients: list[RawClient] = []

    async def one(client_id: str | None = None, **options: Any) -> RawClient:
        clients.append(await RawClient.connect(gateway.address("mqtt"), client_id, **options))
        return clients[-1]

    yield one
    for client in clients:
        client.drop()


@pytest.fixture
def name() -> str:
    return f"s-{uuid.uuid4().hex[:10]}"


@pytest.mark.clause("MQTT-3.1.2-25", "MQTT-3.3.4-9")
async def test_a_message_that_is_too_large_gives_its_room_back(connect: Connect, name: str) -> None:
    """Its capacity in the window was reserved while its packet identifier was stored."""
    client = await connect(name, receive_maximum=1, maximum_packet_size=200, **KEPT)
    await client.subscribe(f"{name}/#")
    sender = await connect()
    for payload in (b"x" * 500, b"y" * 500, b"end"):
        await sender.publish(f"{name}/a", payload, 2)
    assert (await client.message()).payload == b"end"


@pytest.mark.clause("MQTT-4.3.3-4")
async def test_pubrec_for_what_was_not_sent_yet(connect: Connect, name: str) -> None:
    """A client that guesses packet identifiers gets an error, and does not disturb others."""
    client = await connect(name, **KEPT)
    await client.subscribe(f"{name}/#")
    for packet_id in range(1, 20):
        client.send(packets.Pubrec(packet_id))
    sender = await connect()
    for number in range(5):
        client.send(packets.Pubrec(number + 1))
        await sender.publish(f"{name}/a", b"%d" % number, 2)
    got: list[bytes] = []
    while len(got) < 5:
        packet = await client.receive()
        if isinstance(packet, Publish):
            got.append(packet.payload)
            client.send(packets.Pubrec(packet.packet_id))
        elif isinstance(packet, packets.Pubrel) and not packet.reason_code:
            client.send(packets.Pubcomp(packet.packet_id))
    assert sorted(got) == [b"%d" % number for number in range(5)]


@pytest.mark.clause("MQTT-4.3.3-10")
@pytest.mark.parametrize("options", [{}, KEPT])
async def test_qos_2_twice_in_one_read(connect: Connect, name: str, options: dict[str, Any]) -> None:
    client = await connect(name, **options)
    watcher = await connect()
    await watcher.subscribe(f"{name}/#")
    for dup in (False, True):
        client.send(Publish(f"{name}/a", b"once", 2, dup=dup, packet_id=5))
    client.send(Publish(f"{name}/a", b"behind", 1, packet_id=6))
    for kind in (packets.Pubrec, packets.Pubrec, packets.Puback):
        await client.expect(kind)
    client.send(packets.Pubrel(5))
    await client.expect(packets.Pubcomp)
    got = sorted([m.payload for m in await watcher.messages(2)])
    assert got == [b"behind", b"once"]


@pytest.mark.clause("MQTT-3.8.4-1", "MQTT-3.10.4-4", "MQTT-3.14.4-3")
@pytest.mark.parametrize("options", [{}, KEPT], ids=["", "kept"])
@pytest.mark.parametrize("version", [4, 5])
async def test_everything_in_one_write(connect: Connect, name: str, version: int, options: dict[str, Any]) -> None:
    """Requests before DISCONNECT are answered, and the will is deleted."""
    if version == 4:
        options = {"clean_start": not options}
    watcher = await connect()
    await watcher.subscribe(f"{name}/#")
    will = Will(f"{name}/will", b"gone", 0)
    client = await connect(name, version=version, will=will, **options)
    asked = (
        packets.Subscribe(1, (packets.Subscription(f"{name}/a", 1),)),
        packets.Unsubscribe(2, (f"{name}/b",)),
        packets.Subscribe(3, (packets.Subscription(f"{name}/c", 1),)),
        packets.Disconnect(0),
    )
    client.send_bytes(b"".join(encode_packet(packet, Version(version)) for packet in asked))
    assert [type(packet) for packet in await client.expect_end()] == [packets.Suback, packets.Unsuback, packets.Suback]
    await watcher.publish(f"{name}/x", b"end")
    assert (await watcher.message()).payload == b"end"
    if options in (KEPT, {"clean_start": False}):
        await watcher.publish(f"{name}/a", b"kept")
        again = await connect(name, version=version, **options)
        assert (await again.message()).payload == b"kept"


@pytest.mark.parametrize("on_the_way", [False, True])
async def test_a_topic_was_deleted_meanwhile(
    connect: Connect, name: str, admin: AIOKafkaAdminClient, on_the_way: bool
) -> None:
    """The session returns soon without it, and gets its messages once it is created again."""
    client = await connect(name, **KEPT)
    await client.subscribe(Subscription(f"{name}/#", 1), Subscription(f"{name}-other/#", 1))
    sender = await connect()
    await sender.publish(f"{name}/a", b"before")
    if on_the_way:
        await client.receive()
    else:
        await client.message()
    client.drop()
    await admin.delete_topics([name])
    await until_gone(admin, name)  # what Kafka still takes for it until then is lost with it
    client = await connect(name, **KEPT)
    assert (client.connack.reason_code, client.connack.session_present) == (0, True)
    await sender.publish(f"{name}-other/a", b"other")
    await sender.publish(f"{name}/a", b"after")
    got = {(await client.message()).payload for _ in range(2)}
    assert got == {b"other", b"after"}


@pytest.mark.parametrize("prefix", ["", "$share/g/"], ids=["own", "shared"])
async def test_a_session_that_no_record_can_hold(connect: Connect, name: str, prefix: str) -> None:
    """What does not fit is refused, immediately and only once; earlier subscriptions stay."""
    client = await connect(name, **KEPT)
    filters = [
        packets.Subscription(f"{prefix if number >= 30 else ''}{name}/{number}/{'x' * 60_000}", 1)
        for number in range(60)
    ]
    assert (await client.subscribe(*filters[:30])).reason_codes == (1,) * 30
    client.send(packets.Subscribe(client.new_id(), tuple(filters[30:])))
    closing = (await client.expect_end())[-1]
    assert isinstance(closing, packets.Disconnect)
    assert closing.reason_code == 0x97
    client = await connect(name, **KEPT)
    assert client.connack.session_present
    codes = (await client.unsubscribe(*(one.topic_filter for one in filters[:30]))).reason_codes
    assert codes == (0,) * 30
    codes = (await client.unsubscribe(*(one.topic_filter for one in filters[30:]))).reason_codes
    assert codes == (0x11,) * 30


def test_deadlines_are_one_entry_for_each_client() -> None:
    deadlines = Deadlines()
    for at in (50, 70, 60, 50):
        deadlines.note("a", at)
    deadlines.note("b", 40)
    deadlines.note("b", 30)
    assert len(deadlines._heap) == 3  # with those replaced by earlier ones
    assert list(deadlines.due(29)) == []
    assert list(deadlines.due(60)) == ["b", "a"]
    assert not deadlines._heap
    deadlines.note("a", 70)
    assert list(deadlines.due(70)) == ["a"]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> int:
        return int(self.now * 1000)


def make_gateways(directory: Path, clock: Clock) -> Gateways:
    identity = GatewayIdentity(directory)
    identity.close()
    return Gateways(identity, clock.monotonic, clock.wall)


def test_a_gateway_that_falls_silent_is_dead_for_one_of_the_others(tmp_path: Path) -> None:
    clock = Clock()
    first, second, third = sorted((make_gateways(tmp_path / name, clock) for name in "abc"), key=lambda g: g.name)
    for one in (first, second, third):
        one.loaded()
    for _ in range(4):
        for one in (first, second, third):
            for other in (first, second, third):
                if other is not one:
                    other.apply(one.name, one.heartbeat())
        clock.now += 5
    assert all(one.is_alive(other.owner) for one in (first, second) for other in (first, second, third))
    for _ in range(4):
        first.apply(second.name, second.heartbeat())
        second.apply(first.name, first.heartbeat())
        clock.now += SILENT_S / 4 + 0.1
        first.mark_dead()
        second.mark_dead()
    assert not first.is_alive(third.owner)
    assert first.takes_over(third.owner)
    assert not second.takes_over(third.owner)
    assert not first.takes_over(second.owner)
    second.apply(first.name, None)
    assert second.takes_over(first.owner)


def test_a_gateway_knows_its_predecessor_and_leaves_others_theirs(tmp_path: Path) -> None:
    clock = Clock()
    before = make_gateways(tmp_path / "a", clock)
    after = make_gateways(tmp_path / "a", clock)
    other = make_gateways(tmp_path / "b", clock)
    assert (before.name, before.owner != after.owner) == (after.name, True)
    after.apply(before.name, before.heartbeat())
    assert after.is_alone
    assert after.is_predecessor(before.owner)
    assert not after.is_alive(before.owner)
    assert after.takes_over(before.owner)
    other.loaded()
    other.apply(after.name, after.heartbeat())
    assert not other.takes_over(before.owner), "its successor does"
    assert not other.is_alive(before.owner)


@pytest.mark.parametrize(("age_s", "alive"), [(1, True), (60, False)])
def test_signs_from_before_the_start_are_judged_by_their_time(tmp_path: Path, age_s: int, alive: bool) -> None:
    clock = Clock()
    one = make_gateways(tmp_path, clock)
    one.apply("zz", GatewayRecord("i", clock.wall() - 1000 * age_s))
    assert one.is_alive("zz/i") is alive
    assert not one.is_alive("zz/other")
