"""Kafka frozen and Kafka killed: nothing is acknowledged that is not stored, and honest clients stay connected."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer

from gateway.embedded.broker import EmbeddedBroker
from loadtest.clients.pace import Pace
from loadtest.clients.sender import Sender
from loadtest.clients.topics import create_topic
from loadtest.numbering import Numbering
from loadtest.scenarios.steady import PROTOCOLS, Load, judge, make_sender
from loadtest.verify import Ledger
from tests.support.gateway import GatewayProcess, wait_until

CONNECTIONS = 3
WINDOW = 50


class Storm:
    """Paced senders of all three protocols on one gateway, each with its own topic and ledger."""

    def __init__(self, gateway: GatewayProcess, messages: int, rate: float) -> None:
        self.gateway = gateway
        self.runs = {}
        self.messages = messages
        self.rate = rate
        self.senders: dict[str, list[Sender]] = {}

    async def start(self) -> None:
        for protocol in PROTOCOLS:
            numbering, ledger = Numbering(), Ledger()
            topic = f"storm-{protocol}-{numbering.run}"
            await create_topic(self.gateway.addresses["kafka"], topic)
            load = Load(protocol, self.gateway.addresses[protocol], topic, CONNECTIONS, WINDOW, self.messages, batch=10)
            self.runs[protocol] = (load, numbering, ledger)
            self.senders[protocol] = []
            for number in range(CONNECTIONS):
                per_connection = self.messages // CONNECTIONS
                payloads = [numbering.payload(number, sequence, load.size) for sequence in range(per_connection)]
                pace = Pace(WINDOW, self.rate / CONNECTIONS)
                make = make_sender(load, number, payloads, pace, ledger)
                host, port = self.gateway.address(protocol)
                _, sender = await asyncio.get_running_loop().create_connection(make, host, port)
                self.senders[protocol].append(sender)
        for sender in self.all:
            await asyncio.wait_for(sender.connected, 60)
            sender.pace.start()

    @property
    def all(self) -> list[Sender]:
        return [sender for senders in self.senders.values() for sender in senders]

    def push(self) -> bool:
        """Send what the pace allows; True when everything is answered. A failed connection raises here."""
        for sender in self.all:
            if sender.finished.done():
                sender.finished.result()
            else:
                sender.push()
        return all(sender.finished.done() for sender in self.all)

    def answered(self) -> dict[str, int]:
        return {protocol: sum(one.answered for one in senders) for protocol, senders in self.senders.items()}

    def sent(self) -> dict[str, int]:
        return {protocol: sum(one.sent for one in senders) for protocol, senders in self.senders.items()}

    async def verify(self) -> None:
        for protocol, (load, numbering, ledger) in self.runs.items():
            verdict = await judge(self.gateway.addresses["kafka"], load, numbering, ledger)
            refused = sum(sum(one.refused.values()) for one in self.senders[protocol])
            assert verdict.lost == 0, f"{protocol}: {verdict}"
            assert refused == 0, f"{protocol}: {refused} refused"
            assert verdict.acknowledged == self.messages // CONNECTIONS * CONNECTIONS, f"{protocol}: {verdict}"
            assert verdict.reordered == 0, f"{protocol}: {verdict}"
        for sender in self.all:
            sender.close()


@pytest.mark.timeout(400)
async def test_nothing_is_acknowledged_while_kafka_is_frozen_and_everything_after(
    stoppable: EmbeddedBroker, new_gateway: Callable[..., GatewayProcess]
) -> None:
    gateway = await new_gateway(stoppable.bootstrap_servers).start()
    storm = Storm(gateway, messages=4500, rate=1500)
    await storm.start()
    # All three are under way, and none is done yet, however slow the slowest is.
    await wait_until(lambda: storm.push() or min(storm.answered().values()) > 100, 60)

    os.kill(stoppable.pid, signal.SIGSTOP)
    try:
        # What the broker had answered before it froze may still be on its way through the gateway.
        quiet = await settled(storm)
        await wait_until(lambda: storm.push() or all(sent > quiet[one] for one, sent in storm.sent().items()))
        loop = asyncio.get_running_loop()
        until = loop.time() + 5
        await wait_until(lambda: storm.push() or storm.answered() != quiet or loop.time() > until, 20)
        assert storm.answered() == quiet, "an acknowledgement left while Kafka was frozen"
    finally:
        os.kill(stoppable.pid, signal.SIGCONT)
    await wait_until(storm.push, 90)
    await storm.verify()
    assert await gateway.stop() == 0


async def settled(storm: Storm) -> dict[str, int]:
    """Wait until the number of answers has not changed for two seconds."""
    loop = asyncio.get_running_loop()
    last, since = storm.answered(), loop.time()

    def still() -> bool:
        nonlocal last, since
        now = storm.answered()
        if now != last:
            last, since = now, loop.time()
        return loop.time() - since > 2

    await wait_until(still)
    return last


@pytest.mark.timeout(400)
async def test_a_broker_that_is_killed_and_comes_back_costs_no_acknowledged_message_and_no_connection(
    stoppable: EmbeddedBroker, new_gateway: Callable[..., GatewayProcess]
) -> None:
    gateway = await new_gateway(stoppable.bootstrap_servers).start()
    storm = Storm(gateway, messages=6000, rate=1500)
    await storm.start()
    for part in (1000, 3000):
        await wait_until(lambda part=part: storm.push() or min(storm.answered().values()) > part, 90)
        await stoppable.kill()
        await stoppable.start()
    await wait_until(storm.push, 90)  # raises if a connection was lost
    await storm.verify()
    assert await gateway.stop() == 0


@pytest.mark.timeout(400)
async def test_a_flood_into_a_frozen_kafka_is_braked_by_tcp_within_the_budget_and_silence_is_forgiven(
    stoppable: EmbeddedBroker, new_gateway: Callable[..., GatewayProcess]
) -> None:
    config = "[budget]\nprocess_bytes = 8_388_608\nconnection_bytes = 2_097_152\n"
    gateway = await new_gateway(stoppable.bootstrap_servers, config=config).start()
    topic = f"flood-{uuid.uuid4().hex[:6]}"
    await create_topic(stoppable.bootstrap_servers, topic)
    payload = b"x" * 20_000
    body = bytes((0, len(topic))) + topic.encode() + b"\x00" + payload
    packet = b"\x30" + bytes((len(body) & 0x7F | 0x80, len(body) >> 7 & 0x7F | 0x80, len(body) >> 14)) + body
    resident = rss(gateway.pid)
    sent = 0

    async def flood(number: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        nonlocal sent
        reader, writer = await asyncio.open_connection(*gateway.address("mqtt"))
        writer.write(b"\x10\x0f\x00\x04MQTT\x05\x02\x00\x02\x00\x00\x02f%d" % number)  # keep alive 2 s
        assert (await asyncio.wait_for(reader.read(100), 60))[0] == 0x20
        for _ in range(2000):  # 40 MB a connection, if nobody brakes
            writer.write(packet)
            sent += 1
            try:
                await asyncio.wait_for(writer.drain(), 1)
            except TimeoutError:
                return reader, writer
        raise AssertionError("nothing braked the flood")

    os.kill(stoppable.pid, signal.SIGSTOP)
    try:
        async with asyncio.TaskGroup() as group:
            flooding = [group.create_task(flood(number)) for number in range(4)]
        floods = [task.result() for task in flooding]
        loop = asyncio.get_running_loop()
        until = loop.time() + 4
        await wait_until(lambda: loop.time() > until, 10)  # longer than 1.5 times the keep alive
        assert not any(reader.at_eof() for reader, _ in floods)
        assert rss(gateway.pid) - resident < 1.5 * 8_388_608 + 16_000_000
    finally:
        os.kill(stoppable.pid, signal.SIGCONT)
    for _, writer in floods:
        await asyncio.wait_for(writer.drain(), 60)
        writer.write(b"\xe0\x00")
    for reader, writer in floods:
        assert await asyncio.wait_for(reader.read(), 60) == b""  # no DISCONNECT: the gateway has heard ours
        writer.close()
    assert await gateway.stop() == 0
    assert await stored_records(stoppable.bootstrap_servers, topic) == sent


def rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def stored_records(bootstrap: str, topic: str) -> int:
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=bootstrap)
    await consumer.start()
    ends = await consumer.end_offsets(consumer.assignment())
    await consumer.stop()
    return sum(ends.values())
