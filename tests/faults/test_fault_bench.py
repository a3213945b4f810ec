"""A short `python -m loadtest faults`, and a check that it finds a loss."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from gateway.embedded.broker import EmbeddedBroker
from loadtest.faults import of_clients, of_gateway, of_kafka
from loadtest.faults.bench import Bench, Fault, Plan, Stage
from loadtest.faults.kafka import second_listener
from loadtest.faults.proxy import Proxy
from loadtest.ports import free_port

PLAN = Plan(
    connections=2, window=10, rate=100, before=4, after=0.1, stall=3, short=0.5, patience=120, delivery_timeout=120
)


@pytest.fixture
async def bench(new_broker: Callable[..., EmbeddedBroker], tmp_path: Path) -> AsyncIterator[Bench]:
    port, controller, inner = (free_port() for _ in range(3))
    proxy = Proxy(("127.0.0.1", inner))
    await proxy.start()
    settings = second_listener(port, controller, inner, proxy.address[1])
    broker = new_broker(port=port, controller_port=controller, settings=settings)
    await broker.start()
    yield Bench(tmp_path, PLAN, broker, proxy)
    await proxy.stop()
    await broker.stop()


async def several(stage: Stage) -> None:
    """Several faults, one after the other."""
    for act in (of_kafka.stall, of_kafka.cuts, of_clients.no_credit, of_gateway.freeze, of_kafka.kill):
        await act(stage)
        assert await stage.until(stage.load.progressed(), f"answers to all after {act.__name__}")


async def lose_what_is_stored(stage: Stage) -> None:
    """Delete records in Kafka that were acknowledged to the AMQP senders, then kill the gateway."""
    topic = stage.load.topic("amqp")
    admin = AIOKafkaAdminClient(bootstrap_servers=stage.kafka.bootstrap_servers)
    await admin.start()
    everything = {TopicPartition(topic, number): RecordsToDelete(before_offset=-1) for number in range(3)}
    await admin.delete_records(everything)
    await admin.close()
    consumer = AIOKafkaConsumer(bootstrap_servers=stage.kafka.bootstrap_servers)
    await consumer.start()
    stage.seen["deleted"] = sum((await consumer.beginning_offsets(list(everything))).values())
    await consumer.stop()
    sent = {one: one.sent for one in stage.load.all}  # a record deleted before its answer is not sent again
    assert await stage.until(lambda: all(one.answered >= sent[one] for one in sent), "all that was sent is answered")
    await of_gateway.kill(stage)


@pytest.mark.timeout(400)
async def test_faults_under_load_lose_nothing_and_a_planted_loss_is_found(bench: Bench) -> None:
    outcome = await bench.run(Fault("several", several, silent=True, proxied=True))
    assert outcome.problems == []
    assert {one: verdict.lost for one, verdict in outcome.stored.verdicts.items()} == {"mqtt": 0, "amqp": 0, "http": 0}
    assert min(verdict.acknowledged for verdict in outcome.stored.verdicts.values()) > 50
    assert outcome.seen["amqp: amqp:link:transfer-limit-exceeded"] == 1
    assert outcome.seen["mqtt: DISCONNECT 0x93"] == 1
    assert outcome.course.disconnected == 0
    assert len(outcome.samples) > 4

    outcome = await bench.run(Fault("planted loss", lose_what_is_stored, connected=False))
    lost = outcome.seen["deleted"]
    assert lost > 0
    acknowledged = outcome.stored.verdicts["amqp"].acknowledged
    assert outcome.course.disconnected == 3 * PLAN.connections, "by the kill, and only by it"
    assert outcome.problems == [f"amqp: {lost} of {acknowledged} acknowledged messages are lost"]
