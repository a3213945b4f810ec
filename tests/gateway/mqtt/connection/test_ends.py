"""What an MQTT client may no longer do once its rights have changed, or once the gateway has ended its connection."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from gateway.kafka.contracts import Refused
from gateway.mqtt.connection.client import Client
from gateway.mqtt.server import MqttServer
from gateway.presence.records import PresenceRecord, decode
from gateway.process.listeners import make_mqtt
from gateway.security.rights.access_rules import ListedRules
from gateway.settings.config import AccessRule, Address
from mapping.outcomes import Outcome
from protocols.mqtt import packets
from protocols.mqtt.packets import Subscription
from protocols.mqtt.reasons import ReasonCode
from tests.support.assembled import Assembled, assembled
from tests.support.mqtt import RawClient
from tests.support.mqtt_packets import encode_packet
from tests.support.one_task import in_one_task
from tests.support.topics import read_all
from tests.support.waiting import wait_until

PRESENCE = f"presence-{uuid.uuid4().hex[:8]}"
LOCAL = {"address": Address("127.0.0.1:0")}


class Gateway:
    """A gateway in the test's process."""

    def __init__(self, made: Assembled, server: MqttServer) -> None:
        self.made = made
        self.server = server

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.server.listeners[0].bound.rpartition(":")
        return host, int(port)

    def client(self, client_id: str) -> Client:
        (found,) = (client for client in self.server.departing() if client.client_id == client_id)
        return found

    def ended(self, client_id: str) -> tuple[str, int | str | None] | None:
        """How a client's last connection ended, in the presence topic: by whom, and the code."""
        assert self.made.state.presence is not None
        entry = self.made.state.presence.ledger.known.get(f"mqtt/{client_id}")
        record: PresenceRecord | None = None if entry is None else decode(entry.value)
        return None if record is None or record.reason is None else (record.reason.by, record.reason.code)


@contextlib.asynccontextmanager
async def running(bootstrap: str, **settings: Any) -> AsyncIterator[Gateway]:
    async with assembled(bootstrap, create=True, mqtt=LOCAL, **settings) as made:
        server = make_mqtt(made.process, made.security, made.state)
        await server.start()
        try:
            yield Gateway(made, server)
        finally:
            server.stop_accepting()
            await server.stop(2.0)


@pytest.fixture(scope="module")
async def gateway(bootstrap: str) -> AsyncIterator[Gateway]:
    async with in_one_task(running(bootstrap, presence={"topic": PRESENCE})) as made:
        yield made


def only(*rules: AccessRule) -> ListedRules:
    return ListedRules([*rules, AccessRule(topic="#")])


async def test_what_a_client_may_not_read_any_more_is_not_sent_again(gateway: Gateway, bootstrap: str) -> None:
    root = f"ends-{uuid.uuid4().hex[:8]}"
    options: dict[str, Any] = {"clean_start": False, "session_expiry_interval": 60}
    writer = await RawClient.connect(gateway.address)
    assert await writer.publish(f"{root}/kept", b"secret", retain=True) == 0
    reader = await RawClient.connect(gateway.address, root, **options)
    await reader.subscribe(Subscription(f"{root}/#", 2))
    assert (await reader.expect(packets.Publish)).topic == f"{root}/kept"
    for topic, qos in (("secret", 1), ("secret", 2), ("open", 1)):
        assert await writer.publish(f"{root}/{topic}", b"x", qos) in {0, ReasonCode.NO_MATCHING_SUBSCRIBERS}
        await reader.expect(packets.Publish)
    reader.drop()
    denied = [AccessRule(topic=f"{root}/{name}", allow=False) for name in ("secret", "kept")]
    gateway.made.security.access_list.use(only(*denied))
    try:
        reader = await RawClient.connect(gateway.address, root, **options)
        said = [await reader.receive(), await reader.receive()]
        assert [type(one) for one in said].count(packets.Pubrel) == 1, "the exchange at QoS 2 ends without the message"
        (again,) = (one for one in said if isinstance(one, packets.Publish))
        assert (again.topic, again.dup) == (f"{root}/open", True)
        await reader.ping()
        await reader.disconnect(session_expiry_interval=0)
    finally:
        gateway.made.security.access_list.use(only())
    assert await writer.publish(f"{root}/kept", b"", retain=True) == 0
    writer.drop()


async def test_presence_tells_that_rights_were_withdrawn(gateway: Gateway) -> None:
    name = f"ends-{uuid.uuid4().hex[:8]}"
    client = await RawClient.connect(gateway.address, name)
    await client.subscribe(f"{name}/#")
    served = gateway.client(name)
    assert served.grant is not None
    rules = only(AccessRule(topic=f"{name}/#", allow=False))
    served.grant.renew(rules.rules_for(served.grant.identity, None, ""))
    try:
        served.rights_changed()
        (said,) = await client.expect_end()
        assert isinstance(said, packets.Disconnect)
        assert said.reason_code == ReasonCode.NOT_AUTHORIZED
        await wait_until(lambda: gateway.ended(name) is not None)
        assert gateway.ended(name) == ("server", ReasonCode.NOT_AUTHORIZED)
        client.drop()
    finally:
        served.grant.renew(only().rules_for(served.grant.identity, None, ""))


async def test_what_was_sent_behind_a_subscribe_is_not_handled_after_a_takeover(
    gateway: Gateway, bootstrap: str, new_topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session is the new connection's: a PUBLISH of the old one would take its packet identifier."""
    topic, name = await new_topic(partitions=1), f"ends-{uuid.uuid4().hex[:8]}"
    options: dict[str, Any] = {"clean_start": False, "session_expiry_interval": 60}
    router = gateway.made.state.mqtt.parts.router
    asked, go_on, hold = asyncio.Event(), asyncio.Event(), router.hold

    async def slow(*arguments: Any) -> Any:
        asked.set()
        await go_on.wait()
        return await hold(*arguments)

    old = await RawClient.connect(gateway.address, name, **options)
    monkeypatch.setattr(router, "hold", slow)
    old.send_bytes(
        encode_packet(packets.Subscribe(1, (Subscription("a/b", 1),)), old.version)
        + encode_packet(packets.Publish(topic, b"old", 2, packet_id=9), old.version)
    )
    await asked.wait()
    monkeypatch.setattr(router, "hold", hold)
    connecting = asyncio.create_task(RawClient.connect(gateway.address, name, **options))
    said = await old.expect(packets.Disconnect)
    assert said.reason_code == ReasonCode.SESSION_TAKEN_OVER
    go_on.set()
    new = await connecting
    new.send(packets.Publish(topic, b"new", 2, packet_id=9))
    assert (await new.answer(packets.Pubrec, 9)).reason_code in {0, ReasonCode.NO_MATCHING_SUBSCRIBERS}
    new.send(packets.Pubrel(9))
    await new.answer(packets.Pubcomp, 9)
    assert [record.value for record in await read_all(bootstrap, topic)] == [b"new"]
    await new.disconnect(session_expiry_interval=0)
    old.drop()


async def test_a_deleted_topic_s_start_offsets_are_forgotten_without_a_session_that_uses_them(
    gateway: Gateway, admin: AIOKafkaAdminClient, new_topic: Any
) -> None:
    """A new topic of that name begins at 0: after a crash its QoS 2 messages would not be found above an old offset."""
    topic, log = await new_topic(partitions=1), gateway.made.log
    client = await RawClient.connect(gateway.address, session_expiry_interval=60)
    assert await client.publish(topic, b"x", 2) in {0, ReasonCode.NO_MATCHING_SUBSCRIBERS}
    await client.disconnect(session_expiry_interval=0)
    assert topic in gateway.made.state.mqtt.parts.qos2.start_offsets
    await admin.delete_topics([topic])
    async with asyncio.timeout(60):
        while topic in log.topics.names:
            await log.topics.refresh()
    assert topic not in gateway.made.state.mqtt.parts.qos2.start_offsets


async def test_a_refused_connect_does_not_count_for_the_limits(bootstrap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket is open for another second, in which the client tries again."""
    rules = [{"per": "listener", "connections": 1}]
    async with running(bootstrap, limits={"rules": rules}) as gateway:
        opening = gateway.made.state.mqtt.opening
        open_session = opening.open

        async def busy(*_: Any, **__: Any) -> Any:
            raise Refused(Outcome.BUSY, "Kafka does not answer")

        monkeypatch.setattr(opening, "open", busy)
        refused = await RawClient.connect(gateway.address)
        assert refused.connack.reason_code == ReasonCode.SERVER_UNAVAILABLE
        monkeypatch.setattr(opening, "open", open_session)
        again = await RawClient.connect(gateway.address)
        assert again.connack.reason_code == 0
        refused.drop()
        again.drop()
