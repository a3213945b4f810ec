"""Kafka frozen and Kafka killed: nothing is acknowledged that is not stored, and honest clients stay connected."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from gateway.kafka.embedded import EmbeddedBroker
from loadtest.clients import amqp, mqtt, rest
from loadtest.clients.pace import Pace
from loadtest.clients.topics import create_topic
from loadtest.numbering import Numbering
from loadtest.scenarios.steady import PROTOCOLS, Load, judge, make_sender
from loadtest.verify import Ledger
from tests.support.gateway import GatewayProcess, wait_until

CONNECTIONS = 3
WINDOW = 50

Sender = mqtt.Publisher | amqp.Sender | rest.Producer


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
            await asyncio.wait_for(sender.connected, 20)
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


@pytest.mark.timeout(180)
async def test_nothing_is_acknowledged_while_kafka_is_frozen_and_everything_after(
    new_broker: Callable[..., EmbeddedBroker], new_gateway: Callable[..., GatewayProcess]
) -> None:
    broker = new_broker()
    await broker.start()
    gateway = await new_gateway(broker.bootstrap_servers).start()
    storm = Storm(gateway, messages=6000, rate=1500)
    await storm.start()
    await wait_until(lambda: storm.push() or min(storm.answered().values()) > 500)

    os.kill(broker.pid, signal.SIGSTOP)
    try:
        # What the broker had answered before it froze may still be on its way through the gateway.
        quiet = await settled(storm)
        before = storm.sent()
        await wait_until(lambda: storm.push() or storm.sent() != before)
        loop = asyncio.get_running_loop()
        until = loop.time() + 5
        await wait_until(lambda: storm.push() or storm.answered() != quiet or loop.time() > until, 20)
        assert storm.answered() == quiet, "an acknowledgement left while Kafka was frozen"
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    await wait_until(storm.push, 60)
    await storm.verify()
    assert await gateway.stop() == 0
    await broker.stop()


async def settled(storm: Storm) -> dict[str, int]:
    """Wait until the number of answers has not changed for a second."""
    loop = asyncio.get_running_loop()
    last, since = storm.answered(), loop.time()

    def still() -> bool:
        nonlocal last, since
        now = storm.answered()
        if now != last:
            last, since = now, loop.time()
        return loop.time() - since > 1

    await wait_until(still)
    return last


@pytest.mark.timeout(240)
async def test_a_broker_that_is_killed_and_comes_back_costs_no_acknowledged_message_and_no_connection(
    new_broker: Callable[..., EmbeddedBroker], new_gateway: Callable[..., GatewayProcess]
) -> None:
    broker = new_broker()
    await broker.start()
    gateway = await new_gateway(broker.bootstrap_servers).start()
    storm = Storm(gateway, messages=9000, rate=1500)
    await storm.start()
    for part in (1500, 4000):
        await wait_until(lambda part=part: storm.push() or min(storm.answered().values()) > part, 60)
        await broker.kill()
        await broker.start()
    await wait_until(storm.push, 90)  # raises if a connection was lost
    await storm.verify()
    assert await gateway.stop() == 0
    await broker.stop()
