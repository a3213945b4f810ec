"""The access list for MQTT topics that have other names in Kafka, by mapping rules or the catch-all topic."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
from aiokafka import AIOKafkaProducer

from gateway.mqtt.server import MqttServer
from gateway.process.listeners import make_servers
from gateway.security.identity import Identity
from gateway.security.rights.access_rules import ListedRules
from gateway.settings.config import AccessRule
from protocols.mqtt.packets import Puback, Publish, Pubrel, Suback, Subscribe, Subscription, Will
from protocols.mqtt.properties import Properties
from protocols.mqtt.reasons import ReasonCode
from tests.conftest import NewTopicFactory
from tests.support.assembled import Assembled, assembled
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.waiting import wait_until

RUN = uuid.uuid4().hex[:8]
SITE = f"site {RUN}"  # no Kafka name: the catch-all's
CONFIG = f"""
[kafka]
create_topics = true
[mqtt]
partial_subscriptions = {{partial}}
[[mapping.rules]]
mqtt = "plant-{RUN}/{{{{machine}}}}/#"
topic = "machines-{RUN}"
[[security.access]]
topic = "plant-{RUN}/safe/#"
allow = false
[[security.access]]
topic = "plant-{RUN}/#"
[[security.access]]
topic = "{SITE}/#"
[[security.access]]
kafka = "raw-{RUN}/open/#"
"""


@pytest.fixture(scope="module", params=["true", "false"])
async def gateway(
    bootstrap: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[GatewayProcess, bool]]:
    """A gateway, and whether it grants filters that are partly denied."""
    directory = tmp_path_factory.mktemp("rights")
    process = await GatewayProcess(directory, bootstrap, config=CONFIG.format(partial=request.param)).start()
    yield process, request.param == "true"
    assert await process.stop() == 0


@pytest.fixture
async def client(gateway: tuple[GatewayProcess, bool]) -> AsyncIterator[RawClient]:
    made = await RawClient.connect(gateway[0].address("mqtt"))
    yield made
    made.drop()


async def subscribe(client: RawClient, *filters: str) -> list[int]:
    client.send(Subscribe(client.new_id(), tuple(Subscription(one, 1) for one in filters)))
    return list((await client.expect(Suback)).reason_codes)


async def publish(client: RawClient, topic: str, payload: bytes = b"x", *, retain: bool = False) -> int:
    packet_id = client.new_id()
    client.send(Publish(topic, payload, qos=1, packet_id=packet_id, retain=retain))
    return int((await client.answer(Puback, packet_id)).reason_code)  # its own copy may come before


async def test_what_is_granted_is_delivered(gateway: tuple[GatewayProcess, bool], client: RawClient) -> None:
    denied = f"plant-{RUN}/safe/key"
    topics = [f"plant-{RUN}/m1/temp", f"{SITE}/temp", f"raw-{RUN}/open/x"]
    assert await subscribe(client, *topics) == [1, 1, 1]
    assert (
        await subscribe(client, denied, f"raw-{RUN}/shut", f"machines-{RUN}/#", "elsewhere/#")
        == [ReasonCode.NOT_AUTHORIZED] * 4
    )
    for topic in topics:
        assert await publish(client, topic) == 0
        assert (await client.expect(Publish)).topic == topic
    assert await publish(client, denied) == ReasonCode.NOT_AUTHORIZED
    assert await publish(client, f"raw-{RUN}/shut") == ReasonCode.NOT_AUTHORIZED


async def test_a_denied_leaf_is_taken_out_or_refuses_the_filter(
    gateway: tuple[GatewayProcess, bool], client: RawClient, bootstrap: str
) -> None:
    """A native Kafka client, which may, writes to the denied topic, with the MQTT topic in a header."""
    process, partial = gateway
    filters = [f"plant-{RUN}/#", f"plant-{RUN}/+/key", f"$share/s-{RUN}/plant-{RUN}/#"]
    assert await subscribe(client, f"plant-{RUN}/m1/#", f"{SITE}/#") == [1, 1]
    for one in filters:
        assert await subscribe(client, one) == [1 if partial else ReasonCode.NOT_AUTHORIZED], one
    other = await RawClient.connect(process.address("mqtt"))
    assert await publish(other, f"plant-{RUN}/m1/key", b"first") == 0
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        header = [("mqtt.topic", f"plant-{RUN}/safe/key".encode())]
        key = b"plant-%b/m1/key" % RUN.encode()  # in the same partition, so before the last one
        await producer.send_and_wait(f"machines-{RUN}", b"secret", key=key, headers=header)
    assert await publish(other, f"plant-{RUN}/m1/key", b"last", retain=True) == 0
    seen = []
    while not seen or seen.count(b"last") < (2 if partial else 1):
        seen.append((await client.expect(Publish)).payload)
    assert b"secret" not in seen
    late = await RawClient.connect(process.address("mqtt"))
    wanted = f"plant-{RUN}/#" if partial else f"plant-{RUN}/m1/#"
    assert await subscribe(late, wanted) == [1]
    retained = await late.expect(Publish)
    assert (retained.payload, retained.retain) == (b"last", True)
    assert await publish(late, f"plant-{RUN}/m1/key", b"", retain=True) == 0
    other.drop()
    late.drop()


NO_RULES = ListedRules([AccessRule(topic="#", allow=False), AccessRule(group="*", allow=False)])


class Revocable(NamedTuple):
    """A gateway in this process, whose clients' rights can be revoked while a step of a client waits for Kafka."""

    server: MqttServer
    made: Assembled

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.server.bound.rpartition(":")
        return host, int(port)

    def revoke_after(self, monkeypatch: pytest.MonkeyPatch, part: object, step: str) -> None:
        """Revoke all rights of all clients when `part` has done this step, before its caller goes on."""
        done = getattr(part, step)

        async def then_revoked(*arguments: Any, **options: Any) -> Any:
            result = await done(*arguments, **options)
            for client in self.server.departing():  # what `AccessList.use` does for new rules
                if client.grant is not None and client.grant.renew(NO_RULES.rules_for(client.grant.identity, None, "")):
                    client.rights_changed()
            return result

        monkeypatch.setattr(part, step, then_revoked)


@pytest.fixture
async def revocable(bootstrap: str) -> AsyncIterator[Revocable]:
    security = {"allow_anonymous": True, "access": [{"topic": "#"}, {"group": "*"}]}
    async with assembled(bootstrap, create=True, security=security, mqtt={"address": "127.0.0.1:0"}) as made:
        servers = make_servers(made.process, made.security, made.log, made.state)
        (server,) = (one for one in servers if isinstance(one, MqttServer))
        await server.start()
        yield Revocable(server, made)
        server.stop_receiving()
        await server.stop(4.0)


async def test_a_right_that_is_revoked_while_a_client_joins_a_group_is_refused(
    revocable: Revocable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was no member yet when the subscriptions of its session were checked."""
    client = await RawClient.connect(revocable.address)
    topic, group = f"joined-{RUN}", f"group-{RUN}"
    assert await publish(client, f"{topic}/a") == 0
    revocable.revoke_after(monkeypatch, revocable.made.log.groups, "join")
    client.send(Subscribe(9, (Subscription(f"$share/{group}/{topic}/#", 1),)))
    assert (await client.answer(Suback, 9, timeout=90)).reason_codes == (ReasonCode.NOT_AUTHORIZED,)
    await wait_until(lambda: group not in {one.group for one in revocable.made.log.groups.statistics()})
    client.drop()


async def test_a_will_whose_right_is_revoked_during_connect_is_refused(
    revocable: Revocable, monkeypatch: pytest.MonkeyPatch
) -> None:
    revocable.revoke_after(monkeypatch, revocable.made.state.mqtt.opening, "open")
    client = await RawClient.connect(revocable.address, will=Will(f"raw-{RUN}/will", b"x"))
    assert client.connack.reason_code == ReasonCode.NOT_AUTHORIZED
    client.drop()


class _Replaced(ListedRules):
    """Rules that replace others, as Kafka's ACLs do."""

    def may_change_for(self, identity: Identity) -> bool:
        return True


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("retained", [False, True])
async def test_a_message_in_flight_is_not_sent_again_without_the_right(
    revocable: Revocable, new_topic: NewTopicFactory, qos: int, retained: bool
) -> None:
    """A client that has connected again gets what it may still read, and nothing is left over."""
    topic = await new_topic(partitions=1)
    gone, kept, end = (f"{topic}/{name}" for name in ("gone", "kept", "end"))
    writer = await RawClient.connect(revocable.address)
    options = {"clean_start": False, "properties": Properties(session_expiry_interval=600)}
    reader = await RawClient.connect(revocable.address, topic, **options)
    if not retained:
        await reader.subscribe(Subscription(f"{topic}/#", qos))
    for name in (gone, kept):
        assert await writer.publish(name, b"x", qos, retain=retained) == 0
    if retained:
        await reader.subscribe(Subscription(f"{topic}/#", qos))
    assert {(await reader.expect(Publish)).topic for _ in range(2)} == {gone, kept}
    reader.drop()
    await wait_until(lambda: topic not in revocable.made.state.mqtt.sessions.live)
    rules = [AccessRule(topic=gone, action="subscribe", allow=False), AccessRule(topic="#")]
    revocable.made.security.access_list.use(_Replaced(rules))
    again = await RawClient.connect(revocable.address, topic, **options)
    for name in (gone, end):
        assert await publish(writer, name) == 0
    seen = set()
    while not {kept, end} <= seen:
        packet = await again.receive()
        if isinstance(packet, Publish):
            seen.add(packet.topic)
        else:
            assert isinstance(packet, Pubrel), "at QoS 2 the client may have the message: the exchange is completed"
            assert qos == 2
    assert seen == {kept, end}
    for client in (again, writer):
        client.drop()
