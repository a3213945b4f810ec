"""Foreign records in the topics of sessions and retained messages are ignored, counted and logged once."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiokafka import AIOKafkaProducer

from gateway.mqtt.state import records
from gateway.mqtt.state.records import (
    InflightMessage,
    InflightRecord,
    PendingRetained,
    SessionRecord,
    SessionSubscription,
    encode,
)
from gateway.mqtt.state.store import SessionStore
from mapping.record import Received
from protocols.mqtt.packets import Publish, Subscription, Version, Will
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.waiting import wait_until

SOUND = SessionRecord(
    "n",
    "anonymous",
    1,
    "g/1",
    60,
    1,
    (SessionSubscription(Subscription("a/#", 1)),),
    records.PendingWill(Will("a", b""), Version.V5, 5),
)
INFLIGHT = InflightRecord(
    "n",
    1,
    {"t": {0: 5}},
    (InflightMessage(1, "t", 0, 4, 1),),
    (PendingRetained("a/#"),),
    3,
    {7: 2},
    (4,),
    {"t": {0: 1}},
    {8: 3},
)


def changed(record: Any, **fields: Any) -> bytes:
    return encode(msgspec.structs.replace(record, **fields))


def subscription(
    topic_filter: str = "a", qos: int = 1, handling: int = 0, identifier: int = 0
) -> tuple[SessionSubscription]:
    return (SessionSubscription(Subscription(topic_filter, qos, retain_handling=handling), identifier),)


SESSIONS: dict[str, bytes] = {
    "no JSON": b"\xff\x00",
    "another JSON": b'["n"]',
    "a text that is not UTF-8": encode(SOUND).replace(b'"anonymous"', b'"\xff"'),
    "nested without end": b'{"x":' + b"[" * 100_000,
    "fields are missing": b'{"nonce":"n"}',
    "a field of another type": json.dumps({"nonce": "n", "principal": 5, "epoch": 1}).encode(),
    "a filter that is none": changed(SOUND, subscriptions=subscription("a/#/b")),
    "an empty filter": changed(SOUND, subscriptions=subscription("")),
    "QoS 7": changed(SOUND, subscriptions=subscription(qos=7)),
    "a handling that is none": changed(SOUND, subscriptions=subscription(handling=3)),
    "an identifier below 0": changed(SOUND, subscriptions=subscription(identifier=-1)),
    "an epoch below 0": changed(SOUND, epoch=-1),
    "an expiry that is too long": changed(SOUND, expiry=1 << 32),
    "gone before time": changed(SOUND, gone_at=-1),
    "gone after all time": changed(SOUND, gone_at=1 << 62),
    "a will to a filter": changed(SOUND, will=records.PendingWill(Will("a/#", b""), Version.V5)),
    "a will at QoS 3": changed(SOUND, will=records.PendingWill(Will("a", b"", 3), Version.V5)),
    "a will before time": changed(SOUND, will=records.PendingWill(Will("a", b""), Version.V5, -1)),
}
INFLIGHTS: dict[str, bytes] = {
    "no JSON": b"{",
    "packet identifier 0": changed(INFLIGHT, messages=(InflightMessage(0, "t", 0, 0, 1),)),
    "packet identifier 65,536": changed(INFLIGHT, messages=(InflightMessage(65_536, "t", 0, 0, 1),)),
    "a stage that is none": changed(INFLIGHT, messages=(InflightMessage(1, "t", 0, 0, 4),)),
    "an offset below 0": changed(INFLIGHT, messages=(InflightMessage(1, "t", 0, -1, 1),)),
    "a retained message of a filter": changed(INFLIGHT, messages=(InflightMessage(1, "t", 0, 0, 1, "a/#"),)),
    "reached below 0": changed(INFLIGHT, reached={"t": {0: -1}}),
    "a start offset below 0": changed(INFLIGHT, scan_from={"t": {-1: 0}}),
    "open: identifier 0": changed(INFLIGHT, open={0: 1}),
    "open: sequence below 0": changed(INFLIGHT, open={1: -1}),
    "uncertain: identifier 0": changed(INFLIGHT, uncertain={0: 1}),
    "released below 0": changed(INFLIGHT, released=(-1,)),
    "a low-water mark below 0": changed(INFLIGHT, low_water_mark=-1),
    "retained messages of no filter": changed(INFLIGHT, pending_retained=(PendingRetained("#/a"),)),
}
STORED_BEFORE = (
    b'{"nonce":"n","epoch":1,"reached":{"t":{"0":5}},"flights":[[1,"t",0,4,1,""]],"owed":[["a/#",-1,-1]],"mark":3,'
    b'"open":{"7":2},"released":[4],"scan":{"t":{"0":1}},"doubts":{"8":3}}'
)
KEYS = [None, b"", b"session", b"sessions/x", b"\xff/x", b"session/\xff", "ключ".encode()]


def test_the_names_in_kafka_are_those_of_the_first_version() -> None:
    """A gateway reads the records of an earlier version, and the other way round."""
    assert encode(INFLIGHT) == STORED_BEFORE
    assert records.decode(records.InflightRecord, STORED_BEFORE) == INFLIGHT
    assert b'{"nonce":"n",' in encode(SOUND)


def received(key: bytes | None, value: bytes | None) -> Received:
    return Received("__trivium_sessions", key, value, (), 0, 0, 0)


def test_what_is_sound() -> None:
    assert SessionStore("g/1").read(received(b"session/a/b", encode(SOUND))) == ("session/", "a/b")
    assert SessionStore("g/1").read(received(b"flight/a", encode(INFLIGHT))) == ("flight/", "a")
    assert SessionStore("g/1").read(received(b"gateway/a", b'{"incarnation":"i","at":1}')) == ("gateway/", "a")
    for kind in ("session/", "flight/", "gateway/"):
        assert SessionStore("g/1").read(received(kind.encode() + b"a", None)) == (kind, "a")


@pytest.mark.parametrize("key", KEYS)
def test_what_is_no_key(key: bytes | None) -> None:
    assert SessionStore("g/1").read(received(key, encode(SOUND))) is None
    assert SessionStore("g/1").read(received(key, None)) is None


@pytest.mark.parametrize("name", SESSIONS)
def test_what_is_no_session(name: str) -> None:
    assert SessionStore("g/1").read(received(b"session/a", SESSIONS[name])) is None


@pytest.mark.parametrize("name", INFLIGHTS)
def test_what_is_no_inflight_record(name: str) -> None:
    assert SessionStore("g/1").read(received(b"flight/a", INFLIGHTS[name])) is None


async def invalid(gateway: GatewayProcess) -> tuple[int, int]:
    """The number of ignored records, of sessions and of retained messages."""
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://{gateway.addresses['management']}/metrics") as answer,
    ):
        lines = (await answer.text()).splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line and line[0] != "#")
    names = "trivium_mqtt_sessions_invalid_total", "trivium_retained_invalid_total"
    sessions, retained = (int(float(found[name])) for name in names)
    return sessions, retained


async def test_a_gateway_starts_and_serves_beside_them(
    bootstrap: str, new_gateway: Callable[..., GatewayProcess], tmp_path: Path
) -> None:
    config = "[kafka]\ncreate_topics = true\n"
    first = await new_gateway(bootstrap, "--data-dir", str(tmp_path / "1"), config=config, name="1").start()
    before = await invalid(first)
    name = f"foreign-{uuid.uuid4().hex[:8]}"
    headers = [
        ("expiry", b"soon"),
        ("mqtt.qos", b"9"),
        ("mqtt.format", b"\xff"),
        ("content-type", b"\xff"),
        ("x", None),
    ]
    bad_keys = 0
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        for key in KEYS[1:]:  # a compacted topic takes no record without a key
            await producer.send("__trivium_sessions", b"x", key=key)
        for number, value in enumerate(SESSIONS.values()):
            await producer.send("__trivium_sessions", value, key=f"session/{name}-{number}".encode())
        for number, value in enumerate(INFLIGHTS.values()):
            await producer.send("__trivium_sessions", value, key=f"flight/{name}-{number}".encode())
        await producer.send("__trivium_sessions", b"now", key=f"gateway/{name}".encode())
        for key in (b"", b"\xff", b"a/#", b"a\x00b"):
            await producer.send("__trivium_retained", b"x", key=key)
            bad_keys += 1
        await producer.send("__trivium_retained", b"odd", key=f"{name}/odd".encode(), headers=headers)
        await producer.flush()
        count = len(KEYS[1:]) + len(SESSIONS) + len(INFLIGHTS) + 1

        async with asyncio.timeout(60):
            now = before
            while now[0] < before[0] + count or now[1] < before[1] + bad_keys:
                now = await invalid(first)
        second = await new_gateway(bootstrap, "--data-dir", str(tmp_path / "2"), config=config, name="2").start()
        for gateway in (first, second):
            client = await RawClient.connect(
                gateway.address("mqtt"), f"{name}-{len(SESSIONS) - 1}", clean_start=False, session_expiry_interval=60
            )
            assert not client.connack.session_present
            await client.subscribe(Subscription(f"{name}/#", 1))
            message = await client.expect(Publish)
            assert (message.topic, message.payload, message.retain) == (f"{name}/odd", b"odd", True)
            await client.disconnect(session_expiry_interval=0)
        for key in {f"session/{name}-{number}" for number in range(20)} | {f"flight/{name}-{n}" for n in range(20)}:
            await producer.send("__trivium_sessions", None, key=key.encode())
        await producer.send("__trivium_retained", None, key=f"{name}/odd".encode())
    for gateway in (first, second):
        text = gateway.log.read_text()
        assert "Traceback" not in text
        await wait_until(lambda text=text: text.count("an invalid record in the sessions topic") >= 1)
        assert text.count("an invalid record in the sessions topic") == 1
        assert text.count("is not an MQTT topic name; such records are ignored") == 1
        assert await gateway.stop() == 0
