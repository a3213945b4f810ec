"""Scripts of `deploy` that talk to Kafka, run as an operator runs them, with a Kafka that asks for a login."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from tests.support.secured import secured_broker, secured_of
from tests.support.topics import until_led
from tools.cluster import Cluster
from tools.secured import USER

__all__ = ["secured_broker"]

BACKUP = Path(__file__).parents[2] / "deploy" / "backup" / "state_topics.py"


def configuration(cluster: Cluster, way: str) -> str:
    """Return a `trivium.toml` that logs in to the cluster."""
    secured = secured_of(cluster)
    lines = ["[kafka]", f'ssl_cafile = "{secured.ca}"']
    if way == "certificate":
        lines += [f'bootstrap_servers = "{cluster.servers("TLS")}"', 'security_protocol = "SSL"']
        lines += [f'ssl_certfile = "{secured.certificate}"', f'ssl_keyfile = "{secured.key}"']
    else:
        lines += [f'bootstrap_servers = "{cluster.servers("SASL")}"', 'security_protocol = "SASL_SSL"']
        lines += [f'sasl_mechanism = "{way}"', f'sasl_username = "{USER}"', f'sasl_password = "{secured.password}"']
    return "\n".join(lines)


async def run(*arguments: str | Path) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *map(str, arguments), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, said.decode()
    return said.decode()


@pytest.mark.parametrize("way", ["certificate", "PLAIN", "SCRAM-SHA-512"])
async def test_the_backup_logs_in(secured_broker: Cluster, tmp_path: Path, way: str) -> None:
    (tmp_path / "trivium.toml").write_text(configuration(secured_broker, way))
    file = tmp_path / "saved"
    plain = {"bootstrap_servers": secured_broker.bootstrap_servers}
    topic, other = (f"__trivium_{uuid.uuid4().hex[:8]}" for _ in range(2))
    admin = AIOKafkaAdminClient(**plain)
    await admin.start()
    await admin.create_topics([NewTopic(name, 1, len(secured_broker.nodes)) for name in (topic, other)])
    for name in (topic, other):
        await until_led(admin, name)
    await admin.close()
    async with AIOKafkaProducer(**plain) as producer:
        await producer.send_and_wait(topic, b"value", b"key")
    assert "save: " in await run(BACKUP, "save", tmp_path / "trivium.toml", file)
    [row] = [row for row in map(json.loads, file.read_text().splitlines()) if row[0] == topic]
    file.write_text(json.dumps([other, *row[1:]]) + "\n")
    assert await run(BACKUP, "restore", tmp_path / "trivium.toml", file) == "restore: 1 records\n"
    async with AIOKafkaConsumer(**plain, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition(other, 0)])
        record = await asyncio.wait_for(consumer.getone(), 60)
    assert (record.key, record.value) == (b"key", b"value")


async def test_the_written_configuration_passes_the_doctor(secured_broker: Cluster) -> None:
    config = secured_of(secured_broker).write_config(secured_broker.servers("SASL"))
    assert "BAD" not in await run("-m", "gateway", "doctor", "--config", config)
