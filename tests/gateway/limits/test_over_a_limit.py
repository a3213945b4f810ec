"""What happens to a client of each protocol above each limit; every test has its own principal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog
from proton import ConnectionException, Delivery
from proton.utils import BlockingConnection
from pwdlib.hashers.argon2 import Argon2Hasher
from structlog.testing import capture_logs

from gateway.process.listeners import make_servers
from gateway.settings.config import Address
from gateway.views.pauses import OUTGOING_RATES, RATES, pauses
from protocols.mqtt import packets
from protocols.mqtt.reasons import ReasonCode
from tests.support.amqp import body_of, data
from tests.support.assembled import Assembled, assembled
from tests.support.mqtt import PahoClient, RawClient
from tests.support.waiting import wait_until

NewTopic = Callable[..., Awaitable[str]]
Ours = tuple[str, int]

PASSWORD = "of them all"
OWN = {"address": Address("127.0.0.1:0")}
RATE = 200
"""Messages a second; the burst is half of that."""
TEXT = {"Accept": "application/vnd.kafka.text.v2+json"}
MESSAGES = 200  # so they take half a second, and are above any burst
PAGE = 20
LIMITS: dict[str, dict[str, Any]] = {
    "few": {"connections": 1},
    "rare": {"connects_per_s": 0.001},
    "rash": {"in_messages_per_s": 5, "disconnect": True},
    "writer": {"in_messages_per_s": RATE},
    "reader": {"out_messages_per_s": RATE},
    "pages": {"out_messages_per_s": PAGE},
    "posts": {"in_messages_per_s": 0.5, "in_bytes_per_s": 1000},
}
PROTOCOLS = ("mqtt", "amqp", "http")


def named(kind: str, place: str) -> str:
    """A principal of one test, with the limits of its kind."""
    return f"{kind}-{place}"


class Gateway:
    """Starts all listeners in this process."""

    def __init__(self, made: Assembled, servers: dict[str, Any]) -> None:
        self.made = made
        self._servers = servers

    def address(self, protocol: str) -> tuple[str, int]:
        host, _, port = self._servers[protocol].bound.rpartition(":")
        return host, int(port)

    def open(self, protocol: str) -> int:
        """The number of open connections."""
        return int(self._servers[protocol].statistics().open_connections)

    @property
    def statistics(self) -> Any:
        return self.made.security.limits.statistics()

    @contextlib.asynccontextmanager
    async def mqtt(self, user: str, **options: Any) -> AsyncIterator[RawClient]:
        client = await RawClient.connect(self.address("mqtt"), username=user, password=PASSWORD.encode(), **options)
        try:
            yield client
        finally:
            client.drop()

    async def connack(self, user: str, **options: Any) -> int:
        async with self.mqtt(user, **options) as client:
            return client.connack.reason_code

    def amqp(self, user: str) -> BlockingConnection:
        host, port = self.address("amqp")
        return BlockingConnection(
            f"amqp://{host}:{port}", timeout=60, user=user, password=PASSWORD, allowed_mechs="PLAIN"
        )

    def http(self, user: str, **options: Any) -> aiohttp.ClientSession:
        host, port = self.address("http")
        headers = {"Authorization": aiohttp.encode_basic_auth(user, PASSWORD)}
        return aiohttp.ClientSession(f"http://{host}:{port}", headers=headers, **options)


@contextlib.asynccontextmanager
async def serving(bootstrap: str) -> AsyncIterator[Gateway]:
    cheap = Argon2Hasher(time_cost=1, memory_cost=64, parallelism=1).hash(PASSWORD)
    places = [*PROTOCOLS, "mqtt311", "paho", "sse", "websocket", "records", "group", "qos0", "proton", "moved"]
    places.append("logged")
    users = [named(kind, place) for kind in LIMITS for place in places]
    rules = [{"per": "principal", "principal": named(kind, at), **LIMITS[kind]} for kind in LIMITS for at in places]
    rules.append({"per": "listener", "listener": "amqp", "principal": "free", "connects_per_s": 0.001})
    with tempfile.NamedTemporaryFile("w", suffix=".passwords") as file:
        file.write("".join(f"{user}:{cheap}\n" for user in (*users, "free")))
        file.flush()
        security = {"password_file": Path(file.name), "allow_anonymous": False, "failed_attempt_delay_s": 0}
        async with assembled(
            bootstrap,
            create=False,
            mqtt=OWN,
            amqp=OWN,
            http=OWN,
            security=security,
            limits={"rules": rules, "burst_s": 0.5},
        ) as made:
            servers = {one.name: one for one in make_servers(made.process, made.security, made.log, made.state)}
            for one in servers.values():
                await one.start()
            yield Gateway(made, servers)
            for one in servers.values():
                one.stop_receiving()
            await made.log.publisher.drain(1.0)
            for one in servers.values():
                await one.stop(4.0)


@pytest.fixture(scope="module")
async def gateway(bootstrap: str) -> AsyncIterator[Gateway]:
    ready: asyncio.Queue[Gateway] = asyncio.Queue()
    over = asyncio.Event()

    async def serve() -> None:
        async with serving(bootstrap) as made:
            ready.put_nowait(made)
            await over.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(serve())
        yield await ready.get()
        over.set()


@contextlib.asynccontextmanager
async def paused(reason: str, of: str) -> AsyncIterator[None]:
    """Assert that within the block a subject that contains `of` is paused for this reason."""
    seen: list[str] = []
    begin = pauses.begin

    def note(why: str, what: object, subject: str) -> None:
        if why == reason and of in subject:
            seen.append(subject)
        begin(why, what, subject)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pauses, "begin", note)
        yield
    assert seen


async def store(gateway: Gateway, topic: str, count: int = MESSAGES) -> list[bytes]:
    """Store messages as a principal without limits."""
    values = [b"%05d" % number for number in range(count)]
    records = [{"key": f"{topic}/a", "value": value.decode()} for value in values]
    async with gateway.http("free") as http:
        await post(http, topic, records)
    return values


async def post(http: aiohttp.ClientSession, topic: str, records: list[Any]) -> tuple[int, Any, Any]:
    headers = {"Content-Type": "application/vnd.kafka.text.v2+json"}
    async with http.post(f"/topics/{topic}", json={"records": records}, headers=headers) as answer:
        return answer.status, answer.headers, await answer.json()


# connections


async def test_mqtt_has_no_more_connections(gateway: Gateway) -> None:
    user = named("few", "mqtt")
    async with gateway.mqtt(user, client_id="few-1") as first:
        assert await gateway.connack(user, client_id="few-2") == ReasonCode.QUOTA_EXCEEDED
        assert await gateway.connack(user, client_id="few-3", version=4) == 3
        async with gateway.mqtt(user, client_id="few-1") as moved:  # in the place of the first
            assert moved.connack.reason_code == 0
            assert (await first.expect(packets.Disconnect)).reason_code == ReasonCode.SESSION_TAKEN_OVER
            async with gateway.mqtt(user, client_id="few-1") as again:  # at once, while the others may linger
                assert again.connack.reason_code == 0
                await again.disconnect()

    async def admitted() -> bool:
        return await gateway.connack(user, client_id="few-2") == 0

    await wait_until(admitted)


async def test_an_mqtt_client_that_was_never_connected_is_not_logged_as_disconnected(gateway: Gateway) -> None:
    user = named("few", "logged")

    def ended() -> set[str]:
        return {line["client"] for line in logged if line["event"] == "client disconnected"}

    with capture_logs() as logged:
        async with gateway.mqtt(user, client_id="few-1"):
            assert await gateway.connack(user, client_id="few-2") == ReasonCode.QUOTA_EXCEEDED
        await wait_until(lambda: "few-1" in ended())
    assert ended() == {"few-1"}
    (refused,) = [line for line in logged if line["event"] == "connection refused"]
    assert (refused["client"], refused["log_level"]) == ("few-2", "debug")


async def test_paho_is_told_why(gateway: Gateway) -> None:
    for kind, code in (("few", 0x97), ("rare", 0x9F)):
        options = {"user": named(kind, "paho"), "password": PASSWORD}
        first = await PahoClient(gateway.address("mqtt"), **options).connect()
        other = await PahoClient(gateway.address("mqtt"), **options).connect()
        assert (first.connack.value, other.connack.value) == (0, code)
        await first.close()
        await other.close()


async def test_mqtt_does_not_connect_faster(gateway: Gateway) -> None:
    user = named("rare", "mqtt")
    before = gateway.statistics.refused_connections_total["connects"]
    assert await gateway.connack(user) == 0
    assert await gateway.connack(user) == ReasonCode.CONNECTION_RATE_EXCEEDED
    assert await gateway.connack(user, version=4) == 3
    assert gateway.statistics.refused_connections_total["connects"] == before + 2


async def test_amqp_has_no_more_connections(gateway: Gateway) -> None:
    def work() -> None:
        user = named("few", "proton")
        first = gateway.amqp(user)
        with pytest.raises(ConnectionException, match=r"amqp:resource-limit-exceeded.*connections of the principal"):
            gateway.amqp(user)
        first.close()

    await asyncio.to_thread(work)

    async def admitted() -> bool:
        def connect() -> bool:
            with contextlib.suppress(ConnectionException):
                gateway.amqp(named("few", "proton")).close()
                return True
            return False

        return await asyncio.to_thread(connect)

    await wait_until(admitted)  # when the first one's socket is gone


async def test_amqp_does_not_connect_faster_to_a_listener(gateway: Gateway) -> None:
    def work() -> None:
        gateway.amqp("free").close()
        with pytest.raises(
            ConnectionException, match=r"amqp:resource-limit-exceeded.*connects a second of the listener"
        ):
            gateway.amqp("free")
        gateway.amqp(named("few", "amqp")).close()

    await asyncio.to_thread(work)


async def test_the_log_tells_of_a_refused_amqp_connection_at_debug_only(gateway: Gateway) -> None:
    """A flood of refused connections would fill the log; none of them is told as opened or closed."""
    user, limits = named("rare", "amqp"), gateway.statistics

    def work() -> None:
        gateway.amqp(user).close()
        with pytest.raises(ConnectionException, match="connects a second of the principal"):
            gateway.amqp(user)

    async def ended() -> bool:
        return not gateway.open("amqp")

    with structlog.testing.capture_logs() as lines:
        await asyncio.to_thread(work)
        await wait_until(ended)
    told = {line["event"]: line for line in lines if line.get("protocol") == "amqp"}
    assert sorted(line["event"] for line in lines if line.get("protocol") == "amqp") == sorted(told)
    levels = {"connection opened": "info", "connection closed": "info", "connection refused": "debug"}
    assert {event: line["log_level"] for event, line in told.items()} == levels
    assert told["connection closed"]["client"] == told["connection opened"]["client"]
    assert told["connection refused"]["peer"].startswith("127.0.0.1:")
    assert gateway.statistics.refused_connections_total["connects"] == limits.refused_connections_total["connects"] + 1


@pytest.mark.parametrize("kind", ["few", "rare"])
async def test_http_has_no_more_connections(gateway: Gateway, kind: str) -> None:
    user = named(kind, "http")
    async with gateway.http(user) as first:
        for _ in range(3):  # requests of one connection
            async with first.get("/topics") as answer:
                assert answer.status == 200
        async with gateway.http(user) as other, other.get("/topics") as answer:
            assert answer.status == 429
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.headers["Connection"] == "close"
            assert "of the principal" in (await answer.json())["message"]
    if kind == "few":

        async def admitted() -> bool:
            async with gateway.http(user) as http, http.get("/topics") as answer:
                return answer.status == 200

        await wait_until(admitted)


@pytest.mark.part("live websockets")
async def test_a_stream_is_a_connection_until_it_ends(gateway: Gateway, new_topic: NewTopic) -> None:
    user, topic = named("few", "sse"), await new_topic(partitions=1)

    async def status() -> int:
        async with gateway.http(user) as http, http.get("/topics") as answer:
            return answer.status

    async with gateway.http(user) as http:
        async with http.get(f"/topics/{topic}/stream") as events:
            assert events.status == 200
            assert await status() == 429

        async def admitted() -> bool:
            return await status() == 200

        await wait_until(admitted)
        async with http.ws_connect("/stream", protocols=["trivium.v1"]):
            assert await status() == 429
        await wait_until(admitted)


async def test_a_connection_of_http_is_its_last_clients(gateway: Gateway) -> None:
    """Behind a proxy that shares connections, one client does not use up another's limit."""
    one, other = named("few", "moved"), "free"
    connector = aiohttp.TCPConnector(limit=1)
    async with gateway.http(one, connector=connector) as http:
        async with http.get("/topics") as answer:
            assert answer.status == 200
        headers = {"Authorization": aiohttp.encode_basic_auth(other, PASSWORD)}
        async with http.get("/topics", headers=headers) as answer:
            assert answer.status == 200
        async with gateway.http(one) as second, second.get("/topics") as answer:
            assert answer.status == 200


# publishing


async def test_a_rash_client_of_mqtt_is_sent_away_where_it_is_wanted(gateway: Gateway, new_topic: NewTopic) -> None:
    topic = await new_topic(partitions=1)
    before = gateway.statistics.disconnected_total
    for place, version, told in (("mqtt", 5, [ReasonCode.MESSAGE_RATE_TOO_HIGH]), ("mqtt311", 4, [])):
        async with gateway.mqtt(named("rash", place), version=version) as rash:
            for number in range(20):
                rash.send(packets.Publish(f"{topic}/a", b"x", 1, packet_id=number + 1))
            said = await rash.expect_end()
            assert [one.reason_code for one in said if isinstance(one, packets.Disconnect)] == told
    assert gateway.statistics.disconnected_total == before + 2


async def test_mqtt_is_not_read_and_its_silence_not_judged(gateway: Gateway, new_topic: NewTopic) -> None:
    topic = await new_topic(partitions=1)
    count = 3 * RATE  # two and a half seconds' worth; after one and a half the keep-alive is over
    async with (
        paused(RATES[1], "mqtt writer"),
        gateway.mqtt(named("writer", "mqtt"), client_id="writer", keep_alive=1) as writer,
    ):
        for _ in range(count):
            writer.send(packets.Publish(f"{topic}/a", b"x"))
        assert await writer.publish(f"{topic}/a", b"last") == 0
        await writer.ping()


@pytest.mark.part("live websockets")
async def test_a_websocket_is_not_read(gateway: Gateway, new_topic: NewTopic) -> None:
    user, topic = named("writer", "websocket"), await new_topic(partitions=1)
    async with (
        paused(RATES[1], f"http {user}"),
        gateway.http(user) as http,
        http.ws_connect("/stream", protocols=["trivium.v1"]) as socket,
    ):
        for number in range(MESSAGES):
            message = {"type": "produce", "id": str(number), "topic": topic, "records": [{"value": number}]}
            await socket.send_str(json.dumps(message))
        answers = [json.loads((await socket.receive(60)).data) for _ in range(MESSAGES)]
    assert [answer["id"] for answer in answers] == [str(number) for number in range(MESSAGES)]
    assert all(answer["offsets"][0]["offset"] == number for number, answer in enumerate(answers))


async def test_amqp_gets_less_credit(gateway: Gateway, new_topic: NewTopic) -> None:
    user, topic = named("writer", "amqp"), await new_topic(partitions=1)

    def work() -> None:
        connection = gateway.amqp(user)
        sender = connection.create_sender(topic)
        deliveries = []
        for number in range(MESSAGES):  # as fast as there is credit: one by one a busy machine stays below the limit
            connection.wait(lambda: sender.link.credit > 0, timeout=60)
            deliveries.append(sender.link.send(data(b"%d" % number)))
        connection.wait(lambda: all(delivery.settled for delivery in deliveries), timeout=60)
        assert {delivery.remote_state for delivery in deliveries} == {Delivery.ACCEPTED}
        assert sender.link.credit <= RATE // 2
        connection.close()

    async with paused(RATES[1], "amqp"):
        await asyncio.to_thread(work)


async def test_http_is_told_when_to_come_again(gateway: Gateway, new_topic: NewTopic) -> None:
    topic = await new_topic(partitions=1)
    async with gateway.http(named("posts", "http")) as http:
        assert (await post(http, topic, [{"value": "x"}] * 3))[0] == 200
        status, headers, body = await post(http, topic, [{"value": "x"}])
    assert status == 429
    assert headers["Retry-After"] == "4"  # 3 messages of 1 at once, and a half a second
    assert (
        headers["RateLimit-Policy"] == '"records";q=1;w=2;qu="records", "content-bytes";q=1000;w=1;qu="content-bytes"'
    )
    assert headers["RateLimit"] == '"records";r=0;t=4, "content-bytes";r=0;t=4'
    assert "rate of the principal" in body["message"]


# receiving


async def test_mqtt_is_sent_qos_1_at_the_rate_and_nothing_is_lost(gateway: Gateway, new_topic: NewTopic) -> None:
    topic = await new_topic(partitions=1)
    options = {"user": named("reader", "paho"), "password": PASSWORD, "client_id": "slow-reader"}
    reader = await PahoClient(gateway.address("mqtt"), **options).connect()
    assert await reader.subscribe(f"{topic}/#") == 1
    async with paused(OUTGOING_RATES[1], "mqtt slow-reader"):
        values = await store(gateway, topic)
        await wait_until(lambda: len(reader.messages) >= len(values))
    assert [message.payload for message in reader.messages] == values
    await reader.close()


async def test_mqtt_drops_qos_0_above_the_rate_and_counts_it(gateway: Gateway, new_topic: NewTopic) -> None:
    topic = await new_topic(partitions=1)
    counters = gateway.made.state.mqtt.parts.counters
    before = counters.dropped
    async with gateway.mqtt(named("reader", "qos0")) as reader:
        await reader.subscribe(packets.Subscription(f"{topic}/#", 0))
        values = await store(gateway, topic, 1000)
        await wait_until(lambda: gateway.made.log.live_reader.position(topic, 0) == len(values))
        missed = counters.dropped - before
        assert 0 < missed <= len(values) - RATE // 2
        found = [(await reader.expect(packets.Publish)).payload for _ in range(len(values) - missed)]
    assert found[: RATE // 2] == values[: RATE // 2]
    assert found == sorted(found)


async def test_amqp_is_sent_everything_at_the_rate(gateway: Gateway, new_topic: NewTopic) -> None:
    user, topic = named("reader", "amqp"), await new_topic(partitions=1)
    values = await store(gateway, topic)

    def work() -> list[bytes]:
        connection = gateway.amqp(user)
        receiver = connection.create_receiver(f"{topic}/group.id/{topic}-g", credit=MESSAGES)
        found = []
        for _ in range(MESSAGES):
            found.append(body_of(receiver.receive(timeout=60)))
            receiver.accept()
        connection.close()
        return found

    async with paused(OUTGOING_RATES[1], "amqp"):
        assert await asyncio.to_thread(work) == values


async def test_events_come_at_the_rate(gateway: Gateway, new_topic: NewTopic) -> None:
    user, topic = named("reader", "sse"), await new_topic(partitions=1)
    values = await store(gateway, topic)
    async with (
        paused(OUTGOING_RATES[1], f"http {user}"),
        gateway.http(user) as http,
        http.get(f"/topics/{topic}/stream?from=beginning&format=text&limit={MESSAGES}") as events,
    ):
        found = [json.loads(line[5:])["value"].encode() async for line in events.content if line.startswith(b"data:")]
    assert found == values


@pytest.mark.part("live websockets")
async def test_records_of_a_websocket_come_at_the_rate(gateway: Gateway, new_topic: NewTopic) -> None:
    user, topic = named("reader", "websocket"), await new_topic(partitions=1)
    values = await store(gateway, topic)
    async with (
        paused(OUTGOING_RATES[1], f"http {user}"),
        gateway.http(user) as http,
        http.ws_connect("/stream", protocols=["trivium.v1"]) as socket,
    ):
        message = {"type": "subscribe", "id": "s", "topic": topic, "from": "beginning", "format": "text"}
        await socket.send_str(json.dumps(message))
        found = []
        while len(found) < len(values):
            heard = json.loads((await socket.receive(60)).data)
            if heard["type"] == "record":
                found.append(heard["record"]["value"].encode())
    assert found == values


async def test_pages_are_no_larger_than_half_a_burst_and_then_refused(gateway: Gateway, new_topic: NewTopic) -> None:
    user, topic = named("pages", "records"), await new_topic(partitions=1)
    values = await store(gateway, topic, 2 * PAGE)
    found: list[bytes] = []
    refused, position = 0, "beginning"
    async with gateway.http(user) as http:
        while len(found) < len(values):
            async with http.get(f"/topics/{topic}/records?from={position}", headers=TEXT) as answer:
                if answer.status == 429:
                    refused += 1
                    until = asyncio.get_running_loop().time() + int(answer.headers["Retry-After"])
                    await wait_until(lambda until=until: asyncio.get_running_loop().time() >= until)
                    continue
                page = await answer.json(content_type=None)
                assert 0 < len(page) <= PAGE // 4
                found += [record["value"].encode() for record in page]
                position = answer.headers["Next-Position"]
    assert found == values
    assert refused


async def test_polls_are_no_larger_than_half_a_burst_and_then_refused(gateway: Gateway, new_topic: NewTopic) -> None:
    user, topic = named("pages", "group"), await new_topic(partitions=1)
    values = await store(gateway, topic, 2 * PAGE)
    found: list[bytes] = []
    refused = 0
    control = {"Content-Type": "application/vnd.kafka.v2+json"}
    async with gateway.http(user) as http:
        create = {"name": "c", "format": "binary", "auto.offset.reset": "earliest"}
        async with http.post(f"/consumers/{topic}-g", json=create, headers=control) as answer:
            assert answer.status == 200, await answer.text()
        base = f"/consumers/{topic}-g/instances/c"
        async with http.post(f"{base}/subscription", json={"topics": [topic]}, headers=control) as answer:
            assert answer.status == 204
        accept = {"Accept": "application/vnd.kafka.binary.v2+json"}
        while len(found) < len(values):
            async with http.get(f"{base}/records?timeout=1000", headers=accept) as answer:
                if answer.status == 429:
                    refused += 1
                    until = asyncio.get_running_loop().time() + int(answer.headers["Retry-After"])
                    await wait_until(lambda until=until: asyncio.get_running_loop().time() >= until)
                    continue
                page = await answer.json(content_type=None)
                assert len(page) <= PAGE // 4
                found += [record["value"] for record in page]
        async with http.delete(base) as answer:
            assert answer.status == 204
    assert len(found) == len(values)
    assert refused
