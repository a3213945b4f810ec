"""Each proof finds a loss, a double and a disorder that are planted: in Kafka, and in what subscribers got."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer

from loadtest.clients.topics import create_topic
from loadtest.engine.load import Load, Terms
from loadtest.engine.rounds import Book, Plan, Rounds
from loadtest.engine.steady import PROTOCOLS
from loadtest.gateway import GatewayProcess
from loadtest.numbering import Number, Numbering
from loadtest.verify import Arrivals, Ledger

WHOLE = [0, 1, 2, 3, 4]
LOSS, DOUBLE, DISORDER = [0, 1, 3, 4], [0, 1, 2, 2, 3, 4], [0, 2, 1, 3, 4]
"""The numbers of a sender's messages, in the order in which they are stored or delivered."""


async def store(bootstrap: str, topic: str, numbering: Numbering, numbers: list[int]) -> None:
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        for number in numbers:
            await producer.send(topic, numbering.payload(0, number, 64), partition=0)


async def judged(bootstrap: str, tmp_path: Path, stored: list[int], delivered: list[int]) -> list[str]:
    """Return what `kills` finds: one sender at QoS 2 whose five messages are acknowledged, and one subscriber."""
    gateway = GatewayProcess(tmp_path, bootstrap)
    gateway.addresses = {"kafka": bootstrap}
    rounds = Rounds(gateway, Plan(), print)
    rounds.exact = {0}
    await rounds.create_topic()
    await store(bootstrap, rounds.topic, rounds.numbering, stored)
    for number in WHOLE:
        rounds.ledger.acknowledge(0, number)
    arrivals = Arrivals(rounds.numbering)
    rounds.books["a subscriber"] = Book(arrivals, ordered=True, once=True)
    for number in delivered:
        arrivals.add(Number(0, number))
    await rounds.verify()
    return [problem for problem in rounds.problems if not problem.startswith(" ")]


@pytest.mark.parametrize(
    ("stored", "delivered", "found"),
    [
        (WHOLE, WHOLE, []),
        (LOSS, WHOLE, ["1 messages acknowledged and not in Kafka"]),
        (DOUBLE, WHOLE, ["1 messages of a sender at QoS 2 and in Kafka more than once"]),
        (WHOLE, LOSS, ["1 messages not delivered to a subscriber"]),
        (WHOLE, DOUBLE, ["1 messages delivered more than once to a subscriber"]),
        (WHOLE, DISORDER, ["a subscriber: 1 messages out of order"]),
    ],
)
async def test_kills(bootstrap: str, tmp_path: Path, stored: list[int], delivered: list[int], found: list[str]) -> None:
    assert await judged(bootstrap, tmp_path, stored, delivered) == found


@pytest.mark.parametrize(
    ("stored", "found", "doubled"),
    [
        (WHOLE, [], 0),
        (LOSS, ["1 of 5 acknowledged messages are lost"], 0),
        (DOUBLE, [], 1),
        (DISORDER, ["1 of 5 messages are out of order"], 0),
    ],
)
async def test_the_load_beside_faults_restarts_and_strangers(
    bootstrap: str, tmp_path: Path, stored: list[int], found: list[str], doubled: int
) -> None:
    load = Load(GatewayProcess(tmp_path, bootstrap), bootstrap, Terms(connections=1, exactly=1))
    for protocol in PROTOCOLS:
        await create_topic(bootstrap, load.topic(protocol), 1)
        await store(bootstrap, load.topic(protocol), load.numbering, stored)
        for number in WHOLE:
            load.ledgers[protocol].acknowledge(0, number)
    verified = await load.verify()
    assert verified.problems() == [f"{protocol}: {problem}" for protocol in PROTOCOLS for problem in found]
    assert verified.doubled == doubled * len(PROTOCOLS)


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        (WHOLE, []),
        (LOSS, ["1 of 5 acknowledged messages are lost"]),
        (DOUBLE, ["1 messages are stored more than once"]),
        (DISORDER, ["1 of 5 messages are out of order"]),
    ],
)
def test_a_book_of_what_must_arrive_once(numbers: list[int], found: list[str]) -> None:
    ledger, arrivals = Ledger(), Arrivals(Numbering())
    ledger.acknowledge_run(0, 0, len(WHOLE))
    for number in numbers:
        arrivals.add(Number(0, number))
    assert arrivals.verdict(ledger).problems(once=True) == found
