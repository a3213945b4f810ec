"""Faults of other clients: they vanish, do not read, ignore limits, send byte by byte, or all connect together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, cast

from loadtest.clients import amqp_wire, mqtt_wire
from loadtest.clients.http_wire import CONTROL, request_head
from loadtest.clients.talk import CONNACK, DISCONNECT, AmqpTalk, MqttTalk, Talk
from loadtest.clients.topics import create_topic
from loadtest.engine.steady import PROTOCOLS
from loadtest.faults.bench import Stage, fault
from loadtest.faults.proxy import Peer, Proxy
from loadtest.gateway import frozen, process_descriptors

MANY: Final = 20  # of each protocol
KEEP_ALIVE_S: Final = 2
SLACK: Final = 8  # descriptors that stay: connections to Kafka
LARGE: Final = b"x" * 20_000
LITTLE: Final = 4096  # receive buffer, bytes
NON_READING_MIB: Final = 16  # memory of all non-reading clients beyond the budget
OVER: Final = 50_000  # transfers; the credit is a thousand
CROWD_S: Final = 1.0  # period in which all of them connect


async def _connect(address: tuple[str, int], *, little: bool = False) -> Peer:
    if not little:
        return await asyncio.open_connection(*address)
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LITTLE)
    own.setblocking(False)
    await asyncio.get_running_loop().sock_connect(own, address)
    return await asyncio.open_connection(sock=own, limit=LITTLE)


@contextlib.asynccontextmanager
async def _many(
    stage: Stage, addresses: Mapping[str, tuple[str, int]], said: Mapping[str, bytes], *, little: bool = False
) -> AsyncIterator[None]:
    """Have `MANY` clients of each protocol log in and say something; they are cut off after the block."""
    peers: list[Peer] = []
    try:
        for protocol, address in addresses.items():
            for number in range(MANY):
                peers.append(await _connect(address, little=little))
                await _log_in(protocol, peers[-1], f"{stage.load.numbering.run}-many-{number}", said[protocol])
                if little:
                    cast("asyncio.Transport", peers[-1][1].transport).pause_reading()
        yield
    finally:
        for _, writer in peers:
            _cut(writer)


async def _log_in(protocol: str, peer: Peer, name: str, first: bytes = b"") -> None:
    """Wait until the server has accepted the client, then send `first`."""
    if protocol == "mqtt":
        await MqttTalk(*peer).ask([mqtt_wire.connect_packet(name, keep_alive_s=KEEP_ALIVE_S)], CONNACK)
    elif protocol == "amqp":
        await AmqpTalk(*peer).ask([amqp_wire.GREETING], amqp_wire.SASL_OUTCOME)
        peer[1].write(amqp_wire.opening(name))
    peer[1].write(first)


def _cut(writer: asyncio.StreamWriter) -> None:
    """Close without any protocol message."""
    writer.transport.abort()


async def _forgotten(stage: Stage, before: int) -> None:
    """Wait until the gateway has released all connections except the honest ones."""
    begun = time.monotonic()
    await stage.until(
        lambda: process_descriptors(stage.gateway.pid) <= before + SLACK, "the gateway releases connections"
    )
    stage.seen[f"all released after {time.monotonic() - begun:.0f} s"] += 1


@fault("vanish", silent=True)
async def vanish(stage: Stage) -> None:
    """20 clients of each protocol vanish in the network in mid-frame, without a close."""
    before = process_descriptors(stage.gateway.pid)
    half = {
        "mqtt": mqtt_wire.publish_packet("vanished", LARGE, 1, 1)[:-1],
        "amqp": amqp_wire.attach_sender("vanished", "vanished", stage.load.topic("amqp"))[:-1],
        "http": request_head("POST", f"/topics/{stage.load.topic('http')}", CONTROL, "Content-Length: 1000"),
    }
    proxies = {protocol: Proxy(stage.gateway.address(protocol)) for protocol in PROTOCOLS}
    try:
        for proxy in proxies.values():
            await proxy.start()
        async with _many(stage, {protocol: proxy.address for protocol, proxy in proxies.items()}, half):
            await asyncio.sleep(0.5)
            for proxy in proxies.values():
                proxy.block()
            await _forgotten(stage, before)
    finally:
        for proxy in proxies.values():
            await proxy.stop()


@fault("no reading", silent=True, receives=True, held_mib=NON_READING_MIB)
async def no_reading(stage: Stage) -> None:
    """20 receivers of each protocol request everything and read nothing for {short:g} s."""
    wish = {
        "mqtt": mqtt_wire.subscribe_packet(1, [(f"{stage.load.topic('mqtt')}/#", 1)]),
        "amqp": amqp_wire.attach_receiver("slow", "slow", stage.load.topic("amqp")) + amqp_wire.credit(0, 0, 1_000_000),
        "http": request_head("GET", f"/topics/{stage.load.topic('http')}/stream", CONTROL, "Accept: */*"),
    }
    before = process_descriptors(stage.gateway.pid)
    addresses = {protocol: stage.gateway.address(protocol) for protocol in PROTOCOLS}
    async with _many(stage, addresses, wish, little=True):
        await asyncio.sleep(stage.plan.short)
    await _forgotten(stage, before)


async def _flood(stage: Stage, seconds: float) -> None:
    """Send large QoS 0 messages and uploads of lines, as fast as the sockets accept them."""
    topic = f"faults-flood-{stage.load.numbering.run}"
    message = mqtt_wire.publish_packet(f"{topic}/x", LARGE, 0)
    line = json.dumps({"value": LARGE.decode()}).encode() + b"\n"
    head = request_head("POST", f"/topics/{topic}/records", "application/x-ndjson", "Transfer-Encoding: chunked")
    pieces = {"mqtt": message, "http": b"%x\r\n%b\r\n" % (len(line), line)}
    written: dict[str, int] = dict.fromkeys(pieces, 0)
    peers: list[Peer] = []

    async def press(protocol: str, peer: Peer) -> None:
        reader, writer = peer
        async with asyncio.TaskGroup() as both:
            discard = both.create_task(_discard(reader))
            with contextlib.suppress(OSError):
                while True:
                    writer.write(pieces[protocol])
                    await writer.drain()
                    written[protocol] += len(pieces[protocol])
            discard.cancel()

    async with asyncio.TaskGroup() as group:
        tasks = []
        for protocol in pieces:
            for number in range(4):
                peers.append(await _connect(stage.gateway.address(protocol)))
                first = head if protocol == "http" else b""
                await _log_in(protocol, peers[-1], f"{stage.load.numbering.run}-flood-{number}", first)
                tasks.append(group.create_task(press(protocol, peers[-1])))
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
    for _, writer in peers:
        _cut(writer)
    for protocol, size in written.items():
        stage.seen[f"{protocol}: flood of {size >> 20} MiB"] += 1


async def _discard(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(65536):
            pass


@fault("flood", silent=True)
async def flood(stage: Stage) -> None:
    """Eight clients send 20 kB messages without a pause for {short:g} s."""
    await create_topic(stage.kafka.bootstrap_servers, f"faults-flood-{stage.load.numbering.run}")
    await _flood(stage, stage.plan.short)


@fault("flood, stalled", silent=True)
async def flood_stalled(stage: Stage) -> None:
    """The same flood while Kafka is stopped (SIGSTOP) for {short:g} s: the budget must pause the clients."""
    await create_topic(stage.kafka.bootstrap_servers, f"faults-flood-{stage.load.numbering.run}")
    with frozen(stage.kafka.pid):
        await _flood(stage, stage.plan.short)


@fault("no credit", silent=True)
async def no_credit(stage: Stage) -> None:
    """Transfers far beyond the link credit; PUBLISH at QoS 2 beyond the Receive Maximum, never released."""
    name, topic = f"{stage.load.numbering.run}-greedy", stage.load.topic("amqp")
    amqp = await AmqpTalk.open(stage.gateway.address("amqp"), name)
    await amqp.ask([amqp_wire.attach_sender("greedy", "greedy", topic)], amqp_wire.FLOW)
    body = amqp_wire.data_section(b"greedy")
    amqp.writer.write(b"".join(amqp_wire.transfer(number, struct.pack(">I", number), body) for number in range(OVER)))
    mqtt = await MqttTalk.open(stage.gateway.address("mqtt"), mqtt_wire.connect_packet(name))
    topic = f"{stage.load.topic('mqtt')}/greedy"
    mqtt.writer.write(b"".join(mqtt_wire.publish_packet(topic, b"greedy", 2, number) for number in range(1, 1000)))
    ends = (amqp_wire.DETACH, amqp_wire.END, amqp_wire.CLOSE)
    for protocol, talk, kinds in (("amqp", amqp, ends), ("mqtt", mqtt, (DISCONNECT,))):
        said = await _end(stage, talk, kinds)
        if said is None:
            stage.problems.append(f"{protocol}: more than the credit was accepted")
        elif protocol == "mqtt":
            stage.seen[f"mqtt: DISCONNECT 0x{said[0]:02x}"] += 1
        else:
            errors = [field[1] for field in said if isinstance(field, tuple)]
            stage.seen[f"amqp: {errors[0][0].decode() if errors else 'ended without a condition'}"] += 1
        talk.drop()


async def _end(stage: Stage, talk: Talk, kinds: tuple[int, ...]) -> Any:
    """Return what the server's end of a link, session or connection holds; None if it does not end it."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(stage.plan.patience):
            return await talk.first_of(kinds)
    return None


@fault("one byte a second", silent=True)
async def dribble(stage: Stage) -> None:
    """20 clients of each protocol send their handshake that way; the gateway must not wait forever."""
    words = {
        "mqtt": mqtt_wire.connect_packet("d" * 100),
        "amqp": amqp_wire.GREETING,
        "http": request_head("GET", "/topics", CONTROL, "X-Long: " + "x" * 100),
    }

    async def one(protocol: str) -> None:
        reader, writer = await _connect(stage.gateway.address(protocol))
        begun = time.monotonic()
        async with asyncio.TaskGroup() as both:
            discard = both.create_task(_discard(reader))
            for byte in words[protocol]:
                writer.write(bytes((byte,)))
                done, _ = await asyncio.wait({discard}, timeout=1.0)
                if done:
                    stage.seen[f"{protocol}: cut off after {round(time.monotonic() - begun)} s"] += 1
                    break
            else:
                stage.problems.append(f"{protocol}: a handshake of {len(words[protocol])} s was accepted")
            discard.cancel()
        _cut(writer)

    async with asyncio.TaskGroup() as group:
        for protocol in PROTOCOLS:
            for _ in range(MANY):
                group.create_task(one(protocol))


@fault("crowd", silent=True)
async def crowd(stage: Stage) -> None:
    """{crowd} clients of all protocols connect within a second; seconds until the last one is answered."""
    before = process_descriptors(stage.gateway.pid)
    words = {
        "mqtt": lambda number: mqtt_wire.connect_packet(f"{stage.load.numbering.run}-crowd-{number}"),
        "amqp": lambda number: amqp_wire.GREETING,
        "http": lambda number: request_head("GET", "/topics", CONTROL, "Accept: */*"),
    }
    begun = last = time.monotonic()

    async def one(number: int) -> None:
        nonlocal last
        protocol = PROTOCOLS[number % len(PROTOCOLS)]
        await asyncio.sleep(number / stage.plan.crowd * CROWD_S)
        try:
            async with asyncio.timeout(stage.plan.patience):
                reader, writer = await _connect(stage.gateway.address(protocol))
                try:
                    writer.write(words[protocol](number))
                    data = await reader.read(65536)
                    if not data:
                        raise ConnectionResetError("closed")
                    fine = data[:4] == b"\x20" + data[1:3] + b"\0" if protocol == "mqtt" else b"HTTP/1.1 5" not in data
                    stage.seen[f"{protocol} {'answered' if fine else 'refused'}"] += 1
                    await asyncio.sleep(
                        max(0.0, 2 * CROWD_S - (time.monotonic() - begun))
                    )  # keep all connected together
                finally:
                    _cut(writer)
        except (OSError, TimeoutError) as error:
            stage.seen[f"{protocol} {type(error).__name__}"] += 1
        last = max(last, time.monotonic())

    async with asyncio.TaskGroup() as group:
        for number in range(stage.plan.crowd):
            group.create_task(one(number))
    stage.seen[f"all answered within {last - begun:.0f} s"] += 1
    await _forgotten(stage, before)
