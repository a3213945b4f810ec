"""Draining: what a gateway that stops sends to clients of each protocol, at which rate, and where they go."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import aiokafka
import pytest
from paho.mqtt.client import MQTTv311
from typer.testing import CliRunner

from gateway.process.cli import app
from gateway.process.listeners import make_mqtt
from gateway.settings.config import DrainConfig
from gateway.views.drain import TICK_S, Drain
from protocols.mqtt import packets
from protocols.rest.streams.live_messages import SUBPROTOCOL
from tests.support.amqp import ThreadedSender
from tests.support.assembled import assembled
from tests.support.gateway import GatewayProcess, wait_until
from tests.support.mqtt import PahoClient, RawClient

ELSEWHERE = "other.example:1884"
CONFIG = f"""
[kafka]
create_topics = true
[mqtt]
server_reference = "{ELSEWHERE}"
[amqp]
redirect = "other.example:5673"
[drain]
lead_s = 2
"""
NewTopic = Callable[..., Awaitable[str]]
KEPT: dict[str, Any] = {"clean_start": False, "session_expiry_interval": 60}


class FakeConnection:
    """A connection without a protocol."""

    def __init__(self, said: list[tuple[FakeConnection, float]], answered: asyncio.Event) -> None:
        self.asked = self.left = False
        self._said = said
        self._answered = answered  # by Kafka

    @property
    def may_leave(self) -> bool:
        return self._answered.is_set()

    def prepare_to_leave(self) -> bool:
        self.asked = True
        return False

    def leave(self) -> None:
        assert self.asked
        assert not self.left
        self.left = True
        self._said.append((self, asyncio.get_running_loop().time()))


class Answering(FakeConnection):
    """A connection that leaves with its next answer, without waiting for Kafka."""

    may_leave = False

    def prepare_to_leave(self) -> bool:
        asyncio.get_running_loop().call_later(0.01, self.leave)
        return not super().prepare_to_leave()


class FakeListener:
    """A listener with such connections."""

    def __init__(self, connections: list[FakeConnection]) -> None:
        self.connections = connections
        self.closed_at = 0.0

    def departing(self) -> list[FakeConnection]:
        return self.connections

    def stop_accepting(self) -> None:
        self.closed_at = asyncio.get_running_loop().time()


async def test_connections_leave_at_a_rate_in_random_order_and_waiting_ones_last() -> None:
    said: list[tuple[FakeConnection, float]] = []
    kafka, slowly = asyncio.Event(), asyncio.Event()
    slow, never = FakeConnection(said, slowly), FakeConnection(said, asyncio.Event())
    kinds = (FakeConnection, Answering) * 50
    listeners = [FakeListener([kind(said, kafka) for kind in kinds]) for _ in range(2)]
    listeners[1].connections += [slow, never]
    everybody = [one for listener in listeners for one in listener.connections]
    rate = 100.0
    drain = Drain(DrainConfig(lead_s=0.2, rate_per_s=rate), lambda: listeners, settle_s=60)
    hurry = asyncio.Event()
    loop = asyncio.get_running_loop()
    began = loop.time()
    running = loop.create_task(drain.run(hurry))
    await wait_until(lambda: sum(one.asked and not one.left for one in everybody) > 0.8 * rate)
    assert {type(one) for one, _ in said} <= {Answering}
    kafka.set()
    await wait_until(lambda: len(said) == len(everybody) - 2)
    slowly.set()
    await wait_until(lambda: slow.left)
    hurry.set()
    await running
    assert min(listener.closed_at for listener in listeners) - began >= 0.19, "nobody before the lead is over"
    assert not never.left, "left for the stop itself"
    assert said[-1][0] is slow
    steps = [abs(after - before) for before, after in itertools.pairwise(everybody.index(one) for one, _ in said)]
    assert sum(steps) / len(steps) > len(everybody) / 5, "a third of them all by chance; a sixth within one listener"
    times = [at for _, at in said]
    for first, at in enumerate(times):  # ten more: the machine may pause between reading the clock and recording it
        assert sum(one - at < 1 for one in times[first:]) <= rate + 1 + 10
    statistics = drain.statistics()
    assert (statistics.connections, statistics.sent_away_total) == (1, len(everybody) - 1)


async def test_the_wait_for_kafkas_answers_is_limited() -> None:
    listener = FakeListener([FakeConnection([], asyncio.Event())])
    drain = Drain(DrainConfig(lead_s=0), lambda: [listener], settle_s=0.1)
    await asyncio.wait_for(drain.run(asyncio.Event()), 30)
    assert listener.connections[0].asked
    assert not listener.connections[0].left


async def test_a_second_signal_ends_the_lead_time() -> None:
    listener = FakeListener([FakeConnection([], asyncio.Event())])
    hurry = asyncio.Event()
    running = asyncio.create_task(Drain(DrainConfig(lead_s=600), lambda: [listener], settle_s=1).run(hurry))
    await asyncio.wait([running], timeout=2 * TICK_S)
    assert not running.done()
    hurry.set()
    await asyncio.wait_for(running, 10)
    assert not listener.connections[0].left


async def test_records_that_kafka_stored_are_acknowledged_before_the_close(bootstrap: str, new_topic: NewTopic) -> None:
    topic = await new_topic()
    async with assembled(bootstrap, create=False, mqtt={"address": "127.0.0.1:0"}) as made:
        listener = make_mqtt(made.process, made.security, made.state)
        await listener.start()
        host, _, port = listener.bound.rpartition(":")
        client = await RawClient.connect((host, int(port)))
        (leaving,) = listener.departing()
        client.send(packets.Publish(f"{topic}/a", b"1", 1, packet_id=7))
        async with asyncio.timeout(60):
            for waits in (False, True):  # polled in each turn of the loop
                while (leaving.load > 0) is waits:  # noqa: ASYNC110
                    await asyncio.sleep(0)
        assert not leaving.may_leave, "its acknowledgement comes at the end of the turn"
        leaving.leave()  # as for all remaining connections at the end
        assert [type(one) for one in await client.expect_end()] == [packets.Puback, packets.Disconnect]
        client.drop()
        listener.stop_receiving()
        await listener.stop(10)


async def answers_ready(gateway: GatewayProcess) -> tuple[int, dict[str, Any]]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{gateway.addresses['management']}/ready") as response,
    ):
        return response.status, await response.json()


async def send_away(gateway: GatewayProcess) -> None:
    """Start the drain as an operator does."""
    url = f"http://{gateway.addresses['management']}"
    done = await asyncio.to_thread(CliRunner().invoke, app, ["drain", "--url", url, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output) == {"draining": True, "stopped": False}


async def records_of(bootstrap: str, client_id: str) -> list[tuple[str, dict[str, Any]]]:
    """Read a client's records in the sessions topic, in order."""
    consumer = aiokafka.AIOKafkaConsumer(
        "__trivium_sessions", bootstrap_servers=bootstrap, auto_offset_reset="earliest"
    )
    await consumer.start()
    try:
        found = []
        ends = await consumer.end_offsets(consumer.assignment())
        for partition, end in ends.items():
            while await consumer.position(partition) < end:
                for record in (await consumer.getmany(partition, timeout_ms=1000)).get(partition, ()):
                    kind, _, name = record.key.decode(errors="replace").partition("/")  # other keys may not be text
                    if name == client_id and record.value is not None:
                        found.append((kind, json.loads(record.value)))
        return found
    finally:
        await consumer.stop()


OPEN = b"\x00\x53\x10\xc0\x04\x01\xa1\x01x"
OPEN_FRAME = b"AMQP\x00\x01\x00\x00" + (8 + len(OPEN)).to_bytes(4, "big") + b"\x02\x00\x00\x00" + OPEN
CONNECT = b"\x10\x0d\x00\x04MQTT\x05\x02\x00\x3c\x00\x00\x00"
AMQP_CLOSE = b"\x00\x00\x00\x0c\x02\x00\x00\x00\x00\x53\x18\x45"
FIRST_WORDS = {"mqtt": CONNECT, "amqp": OPEN_FRAME}


async def last_words(socket: aiohttp.ClientWebSocketResponse) -> tuple[bytes, int | None]:
    """Return the last message before the WebSocket is closed, and the close code."""
    said = b""
    async with asyncio.timeout(60):
        while (message := await socket.receive()).type is aiohttp.WSMsgType.BINARY:
            said += message.data
            if b"amqp:connection:" in message.data:
                await socket.send_bytes(AMQP_CLOSE)
    return said, socket.close_code


@pytest.mark.clause("MQTT-3.14.2-1")
async def test_every_protocol_is_redirected_and_the_session_follows(
    bootstrap: str, gateway: GatewayProcess, new_gateway: Callable[..., GatewayProcess]
) -> None:
    name = f"drain-{uuid.uuid4().hex[:10]}"
    leaving = await new_gateway(bootstrap, config=CONFIG).start()
    http = f"http://{leaving.addresses['http']}"
    said: list[Any] = []
    paho = PahoClient(leaving.address("mqtt"))
    paho.paho.on_disconnect = lambda _c, _d, _f, reason, properties: said.append((reason.value, properties))
    old = PahoClient(leaving.address("mqtt"), protocol=MQTTv311)
    await paho.connect()
    await old.connect()
    kept = await RawClient.connect(leaving.address("mqtt"), name, **KEPT)
    await kept.subscribe(f"{name}/out")
    kept.send(packets.Publish(f"{name}/in", b"1", 2, packet_id=7))
    await kept.answer(packets.Pubrec, 7)
    amqp = await ThreadedSender(leaving.addresses["amqp"], name).connect()
    curl = await asyncio.create_subprocess_exec(
        "curl", "-si", "-T", "-", "-X", "POST", "-H", "Content-Type: application/vnd.kafka.json.v2+json",
        f"{http}/topics/{name}", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert curl.stdin is not None
    curl.stdin.write(b'{"records":[')
    host, port = leaving.address("http")
    idle, idle_writer = await asyncio.open_connection(host, port)
    idle_writer.write(b"GET /healthy HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await idle.readuntil(b"\r\n\r\n")
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session,
        session.ws_connect(f"{http}/stream", protocols=(SUBPROTOCOL,)) as socket,
        session.get(f"{http}/topics/{name}/stream") as events,
        session.ws_connect(f"{http}/mqtt", protocols=("mqtt",)) as mqtt,
        session.ws_connect(f"{http}/amqp", protocols=("amqp",)) as amqp_socket,
    ):
        assert events.status == 200
        for one in (mqtt, amqp_socket):
            await one.send_bytes(FIRST_WORDS[str(one.protocol)])
            await one.receive_bytes()
        await send_away(leaving)
        assert (await answers_ready(leaving))[0] == 503
        late = await RawClient.connect(leaving.address("mqtt"), f"{name}-late")  # the balancer does not know yet
        assert late.connack.reason_code == 0

        assert (await socket.receive()).type in {aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED}
        assert socket.close_code == 1012
        stream = (await events.read()).decode()
        word, code = await last_words(mqtt)
        assert (word[0], word[2], code) == (0xE0, 0x9C, 1012)
        word, code = await last_words(amqp_socket)
        assert b"amqp:connection:redirect" in word
        assert code == 1012
    retries = [int(line.partition(": ")[2]) for line in stream.splitlines() if line.startswith("retry")]
    assert len(retries) == 2
    assert 1000 <= retries[1] <= 3000
    assert await asyncio.wait_for(idle.read(), 60) is not None
    idle_writer.close()

    await wait_until(lambda: said)
    assert (said[0][0], said[0][1].ServerReference) == (0x9C, ELSEWHERE)
    await wait_until(lambda: old.disconnected is not None)
    assert await amqp.end() == "amqp:connection:redirect"
    assert amqp.info() == {"hostname": "other.example", "network-host": "other.example", "port": 5673}
    answer = (await curl.communicate(b'{"value":1}]}'))[0].decode()
    assert answer.startswith("HTTP/1.1 200") or "HTTP/1.1 200" in answer
    assert "connection: close" in answer.lower()
    for client in (kept, late):
        ended = [one for one in await client.expect_end() if isinstance(one, packets.Disconnect)]
        assert [one.reason_code for one in ended] == [0x9C]
        client.drop()

    async def is_released() -> bool:
        return any(value.get("left") for _, value in await records_of(bootstrap, name))

    await wait_until(is_released)  # a client may reconnect before Kafka has stored that
    again = await RawClient.connect(gateway.address("mqtt"), name, **KEPT)
    while again.connack.reason_code == 0x88:  # the leaving gateway has ended: another one of the fleet was faster
        again.drop()
        again = await RawClient.connect(gateway.address("mqtt"), name, **KEPT)
    assert leaving.process is not None
    leaving_runs = leaving.process.returncode is None
    assert again.connack.session_present
    again.send(packets.Publish(f"{name}/in", b"1", 2, packet_id=7, dup=True))
    await again.answer(packets.Pubrec, 7)
    again.send(packets.Pubrel(7))
    await again.answer(packets.Pubcomp, 7)
    records = await records_of(bootstrap, name)
    assert [kind for kind, value in records if value.get("left")] == ["flight"]
    asked = [value for kind, value in records if kind == "session" and value.get("from")]
    assert not (leaving_runs and asked)
    again.drop()
    for client in (paho, old):
        await client.close()
    assert await asyncio.wait_for(leaving.process.wait(), 60) == 0
    assert "Traceback" not in leaving.log.read_text()


CONNECTS = {
    b"\x10\x10\x00\x04MQTT\x05\x02\x00\x3c\x00\x00\x03abc": b"\x00\x88",  # Server unavailable
    b"\x10\x0f\x00\x04MQTT\x04\x02\x00\x3c\x00\x03abc": b" \x02\x00\x03",
}


async def test_late_clients_are_refused_and_a_second_signal_ends_the_wait(
    bootstrap: str, new_gateway: Callable[..., GatewayProcess]
) -> None:
    gateway = await new_gateway(bootstrap, config="[drain]\nlead_s = 0\nrate_per_s = 0.001\n").start()
    client = await RawClient.connect(gateway.address("mqtt"))
    accepted = [await asyncio.open_connection(*gateway.address("mqtt")) for _ in CONNECTS]
    peer, peer_writer = await asyncio.open_connection(*gateway.address("amqp"))
    http = aiohttp.ClientSession()
    sockets = [await http.ws_connect(f"http://{gateway.addresses['http']}/mqtt", protocols=("mqtt",)) for _ in range(2)]
    await sockets[0].send_bytes(CONNECT)
    await sockets[0].receive_bytes()
    assert gateway.process is not None
    gateway.process.send_signal(signal.SIGTERM)

    async def refuses() -> bool:
        try:
            _, writer = await asyncio.open_connection(*gateway.address("mqtt"))
        except ConnectionRefusedError:
            return True
        writer.close()
        return False

    await wait_until(refuses)
    status, details = await answers_ready(gateway)
    assert (status, details["stopping"]) == (503, True)
    for (reader, writer), (connect, answer) in zip(accepted, CONNECTS.items(), strict=True):
        writer.write(connect)
        assert answer in await asyncio.wait_for(reader.read(), 30)
        writer.close()
    await sockets[1].send_bytes(CONNECT)
    word, code = await last_words(sockets[1])
    assert (word[0], word[3], code) == (0x20, 0x88, 1012)
    peer_writer.write(OPEN_FRAME)
    assert b"amqp:connection:forced" in await asyncio.wait_for(peer.read(), 30)
    peer_writer.close()
    async with http.post(f"http://{gateway.addresses['management']}/drain") as response:
        assert response.status == 409
    assert gateway.process.returncode is None
    gateway.process.send_signal(signal.SIGINT)
    ended = [one for one in await client.expect_end() if isinstance(one, packets.Disconnect)]
    assert [one.reason_code for one in ended] == [0x8B]
    client.drop()
    word, code = await last_words(sockets[0])
    assert (word[0], word[2], code) == (0xE0, 0x8B, 1012)
    await http.close()
    assert await asyncio.wait_for(gateway.process.wait(), 60) == 0


async def test_two_drains_at_the_same_moment_are_one(
    bootstrap: str, new_gateway: Callable[..., GatewayProcess]
) -> None:
    gateway = await new_gateway(bootstrap, config="[drain]\nlead_s = 60\n").start()
    assert gateway.process is not None
    operators = [await asyncio.open_connection(*gateway.address("management")) for _ in range(2)]
    for reader, writer in operators:
        writer.write(b"GET /healthy HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"}")
    gateway.process.send_signal(signal.SIGSTOP)  # both requests are read in one iteration of the event loop
    for _, writer in operators:
        writer.write(b"POST /drain HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
    gateway.process.send_signal(signal.SIGCONT)
    heads = [await asyncio.wait_for(reader.readuntil(b"\r\n"), 30) for reader, _ in operators]
    assert sorted(head.split()[1] for head in heads) == [b"202", b"409"]
    status, details = await answers_ready(gateway)
    assert (status, details["stopping"], details["listeners"]["mqtt"]) == (503, True, True)
    for _, writer in operators:
        writer.close()
    gateway.process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(gateway.process.wait(), 60) == 0
