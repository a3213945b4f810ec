"""Kills gateway (and broker) repeatedly under load; no acknowledged message may be lost (`loadtest.engine.rounds`).

MQTT: senders and subscribers at QoS 1 and 2 with persistent sessions, and Eclipse Paho of each. What a QoS 2 sender
sends is in Kafka once, and once at a QoS 2 subscriber, in order.

AMQP: senders of unsettled messages, and receivers of a queue, of a named group, of a durable and of a shared durable
subscription that accept everything; two are qpid-proton. Committed offsets are read from Kafka while the gateway is
down: nothing below them may be delivered to a later gateway. What was accepted earlier than the commit interval plus
`--grace` before a kill may not be delivered again; time without Kafka does not count.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from loadtest.clients.kept.amqp import KeptReceiver, KeptSender
from loadtest.clients.kept.mqtt import KeptPublisher, KeptSubscriber
from loadtest.clients.kept.paho import PahoPublisher, PahoSubscriber
from loadtest.clients.kept.proton_links import ProtonReceiver, ProtonSender
from loadtest.engine.command import Scenario
from loadtest.engine.rounds import Book, Plan, Rounds
from loadtest.engine.stand import Stand
from loadtest.verify import Arrivals


async def run(stand: Stand, plan: Plan) -> None:
    """Kill, settle, compare."""
    async with stand.gateway() as gateway:
        rounds = Rounds(gateway, plan, stand.say, stand.host if plan.protocol == "amqp" else None)
        await rounds.create_topic()
        (_add_mqtt if plan.protocol == "mqtt" else _add_amqp)(rounds, plan)
        stand.row(**await rounds.run(), starts=gateway.starts)
    stand.problems += rounds.problems


def _take(arrivals: Arrivals, payload: bytes, _qos: int) -> None:
    arrivals.take(payload)


def _add_mqtt(rounds: Rounds, plan: Plan) -> None:
    address, name = rounds.gateway.address("mqtt"), rounds.numbering.run
    kept: list[Any] = []
    for qos in (1, 2):
        for sends in (KeptPublisher,) * plan.senders + (PahoPublisher,):
            messages = rounds.messages()
            if qos == 2:
                rounds.exact.add(len(rounds.senders))
            kept.append(sends(address, f"{name}-{messages.key}", rounds.topic, messages, qos=qos))
            rounds.senders.append(kept[-1])
    for qos in (1, 2):
        for number, makes in enumerate((KeptSubscriber,) * plan.subscribers + (PahoSubscriber,) * (qos == 2)):
            arrivals = Arrivals(rounds.numbering)
            kept.append(makes(address, f"{name}-{qos}-{number}", f"{rounds.topic}/#", qos, partial(_take, arrivals)))
            rounds.receivers.append(kept[-1])
            rounds.started.append(kept[-1].subscribed)
            rounds.books[f"{makes.__name__} {number} at QoS {qos}"] = Book(arrivals, ordered=True, once=qos == 2)
    rounds.doors = [one.door for one in kept if isinstance(one, PahoPublisher | PahoSubscriber)]


def _add_amqp(rounds: Rounds, plan: Plan) -> None:
    address, name, topic = rounds.gateway.address("amqp"), rounds.numbering.run, rounds.topic
    for sends in (KeptSender,) * plan.senders + (ProtonSender,):
        messages = rounds.messages()
        rounds.senders.append(sends(address, f"{name}-{messages.key}", topic, messages))
    named, shared = f"{topic}/group.id/{name}-named", ("shared", "global", "topic")
    for group, receives, container, link, source, durable, capabilities in (
        (topic, KeptReceiver, "queue-1", "q", topic, False, ("queue",)),
        (topic, ProtonReceiver, "queue-2", "q", f"queue://{topic}", False, ()),
        (f"{name}-named", KeptReceiver, "named-1", "n", named, False, ()),
        (f"{name}-named", KeptReceiver, "named-2", "n", named, False, ()),
        (f"{name}-durable:d", KeptReceiver, "durable", "d", topic, True, ("topic",)),
        (f"{name}-shared", KeptReceiver, "shared-1", f"{name}-shared|1", topic, True, shared),
        (f"{name}-shared", KeptReceiver, "shared-2", f"{name}-shared|2", topic, True, shared),
    ):
        book = rounds.group(group)
        receiver = receives(
            address, f"{name}-{container}", link, source, on_delivery=book.take, on_accept=book.accepted,
            generation=lambda: len(rounds.kills), durable=durable, capabilities=capabilities,
        )  # fmt: skip
        rounds.receivers.append(receiver)
        rounds.started.append(receiver.attached)


SCENARIOS = (
    Scenario("kills", "kill the gateway under load; no acknowledged message may be lost", Plan(), run, lines=False),
)
