"""Two drivers on one checkpoint: Kafka's fence ends the earlier one, and the results are those of one job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from gateway.kafka.cluster.rights import AclOperation
from gateway.kafka.driver.acl_requests import GROUP, TOPIC, TRANSACTIONAL_ID, Acl
from spark_sinks.jobs.max_temperature import Options
from spark_sinks.run.failures import told
from spark_sinks.spark.checkpoint import HELD
from spark_sinks.spark.lease import PREFIX, LeaseError
from tests.spark_sinks.test_edited_jobs import START_MS, STATS, Job
from tests.spark_sinks.test_edited_jobs import job as job  # noqa: PLC0414 - a fixture
from tests.support.secured import secured_broker as secured_broker  # noqa: PLC0414 - a fixture
from tests.support.secured import secured_of
from tests.support.topics import read_all
from tools.acls import Acls
from tools.cluster import Cluster


async def send(producer: AIOKafkaProducer, topic: str, count: int) -> None:
    """Send readings of one window."""
    for number in range(count):
        await producer.send(topic, json.dumps({"a": number, "b": 1, "at": START_MS + 1}).encode(), b"k")
    await producer.flush()


async def counts(bootstrap: str, topic: str) -> list[int]:
    """The counts of the newest window in the order of their results."""
    values = [json.loads(record.value) for record in await read_all(bootstrap, topic)]
    return [value["n"] for value in values if value["start"] == START_MS]


async def test_a_second_driver_takes_over_and_the_first_one_ends(
    run_job: Any, job: Job, producer: AIOKafkaProducer, bootstrap: str
) -> None:
    options = job.options(STATS)
    first = await run_job(options)
    await send(producer, job.topics["SOURCE"], 10)
    await first.wait_for(lambda done: sum(one.rows for one in done) == 10, 120)
    second = await run_job(options)
    with pytest.raises(LeaseError, match=f"another driver has taken over the checkpoint .{PREFIX}"):
        await first.wait_for(lambda _: False, 120)
    await send(producer, job.topics["SOURCE"], 10)
    await second.wait_for(lambda done: sum(one.rows for one in done) == 10, 120)
    await second.stop()
    found = await counts(bootstrap, job.topics["TARGET"])
    assert found == sorted(found)
    assert found[-1] == 20
    assert any("did not give up the checkpoint" in text for text in second.said)
    held = Path(options.checkpoint) / "window-stats" / HELD
    assert not held.exists()
    third = await run_job(options)
    await third.stop()
    assert third.said == []  # the second driver ended in order: nothing to wait for


async def test_without_the_rights_of_a_lease_the_sentence_names_the_right(
    run_job: Any, secured_broker: Cluster, tmp_path: Path
) -> None:
    secured, (source, target, dead) = secured_of(secured_broker), (f"lease-{word}" for word in ("in", "out", "dead"))
    admin = AIOKafkaAdminClient(bootstrap_servers=secured_broker.bootstrap_servers)
    await admin.start()
    await admin.create_topics([NewTopic(name, 1, 1) for name in (source, target, dead)])
    await admin.close()
    of_topics, of_id, of_group = (
        [Acl(kind, name, True, "User:ann", "*", operation, True) for operation in operations]
        for kind, name, operations in (
            (TOPIC, "lease-", (AclOperation.READ, AclOperation.WRITE)),
            (TRANSACTIONAL_ID, PREFIX, (AclOperation.WRITE,)),
            (GROUP, PREFIX, (AclOperation.READ,)),
        )
    )
    login = f'username="ann" password="{secured.password}";'
    settings = {
        "security.protocol": "SASL_SSL", "ssl.truststore.type": "PEM", "ssl.truststore.location": str(secured.ca),
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.jaas.config": f"org.apache.kafka.common.security.scram.ScramLoginModule required {login}",
    }  # fmt: skip
    options = Options(
        bootstrap_servers=secured_broker.servers("SASL"), checkpoint=str(tmp_path), source=source, target=target,
        dead_letter=dead, kafka=settings,
    )  # fmt: skip
    async with Acls(secured_broker.bootstrap_servers) as acls:
        for granted in (of_topics, of_id):
            await acls.create(*granted)
            with pytest.raises(LeaseError) as caught:
                await run_job(options)
            said = told(caught.value)
            assert said.startswith("Kafka does not allow the lease of the checkpoint: Write on the")
            assert f"transactional id {PREFIX}" in said
            assert "Read on the group of this name" in said
        await acls.create(*of_group)
        await (await run_job(options)).stop()
