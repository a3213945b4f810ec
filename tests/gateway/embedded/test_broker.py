"""The embedded broker: a real Kafka, real ports, real signals."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from gateway.embedded import storage
from gateway.embedded.broker import EmbeddedBroker
from gateway.embedded.class_archive import archive_options, archive_path
from gateway.embedded.jars import cache_directory, ensure_jars
from gateway.embedded.java import find_java
from gateway.embedded.storage import BrokerError, Marker, PortTakenError
from tests.support.frozen import freeze
from tests.support.processes import has_argument, maps

ROOT = Path(__file__).parents[3]


async def store(broker: EmbeddedBroker, value: bytes) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=broker.bootstrap_servers, acks="all")
    await producer.start()
    await producer.send_and_wait("kept", value)
    await producer.stop()


async def stored(broker: EmbeddedBroker, count: int) -> list[bytes]:
    consumer = AIOKafkaConsumer("kept", bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest")
    await consumer.start()
    try:
        async with asyncio.timeout(60):
            return [(await consumer.getone()).value for _ in range(count)]
    finally:
        await consumer.stop()


async def test_data_and_ports_survive_a_stop_and_a_crash(new_broker):
    broker = new_broker()
    await broker.start()
    address, first_pid = broker.bootstrap_servers, broker.pid
    admin = AIOKafkaAdminClient(bootstrap_servers=address)
    await admin.start()
    await admin.create_topics([NewTopic("kept", 1, 1)])
    await admin.close()
    await store(broker, b"before the stop")

    began = time.monotonic()
    assert await broker.stop(limit_s=60)
    assert time.monotonic() - began < 60  # it takes one second on an idle machine
    assert not broker.is_running

    again = new_broker()  # it knows the ports only from the directory
    await again.start()
    assert again.bootstrap_servers == address
    assert again.pid != first_pid
    await store(again, b"before the crash")
    watching = asyncio.create_task(again.watch())
    os.kill(again.pid, signal.SIGKILL)
    with pytest.raises(BrokerError, match="ended unexpectedly"):
        await watching
    assert not again.is_running

    await again.start()
    assert again.bootstrap_servers == address
    assert await stored(again, 2) == [b"before the stop", b"before the crash"]
    await again.kill()
    await again.watch()  # a requested end raises nothing
    await again.stop()


async def test_directory_in_use_is_refused_and_a_frozen_broker_is_ended(new_broker):
    broker = new_broker()
    await broker.start()
    with pytest.raises(BrokerError, match=rf"in use by another running broker \(process {broker.pid}\)"):
        await new_broker().start()
    pid = broker.pid
    freeze(pid)
    assert not await broker.stop(limit_s=0.2)
    assert not broker.is_running
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


PARENT = """
import asyncio, sys
from pathlib import Path
from gateway.settings.config import EmbeddedConfig
from gateway.embedded.broker import embedded_broker

async def main():
    broker = embedded_broker(EmbeddedConfig(heap="256m"), Path(sys.argv[1]))
    await broker.start()
    print(broker.pid, flush=True)
    await broker.watch()

asyncio.run(main())
"""


def test_broker_dies_with_its_parent(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, tmp_path], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    broker = os.pidfd_open(int(parent.stdout.readline()))
    try:
        assert select.select([broker], [], [], 0)[0] == []
        parent.kill()
        parent.wait()
        assert select.select([broker], [], [], 30)[0] == [broker]
    finally:
        os.close(broker)
        parent.stdout.close()


@pytest.mark.parametrize("key", ["port", "controller_port"])
async def test_taken_port_is_named_with_its_key(new_broker, key):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(PortTakenError, match=rf"port {taken} on 127\.0\.0\.1 is taken \(embedded\.{key}\)"):
            await new_broker(**{key: taken}).start()


async def test_data_of_another_version_are_refused(new_broker, tmp_path):
    (tmp_path / "broker" / "data").mkdir(parents=True)
    with pytest.raises(BrokerError, match="was not written by Trivium"):
        await new_broker().start()
    storage.write_marker(tmp_path / "broker", Marker(storage.LAYOUT, "4.2.0", "x", 1, 2))
    with pytest.raises(BrokerError, match=r"written by Kafka 4\.2\.0 \(layout 1\), this is 4\.3\.1"):
        await new_broker().start()
    (tmp_path / "broker" / "broker.json").write_text("{")
    with pytest.raises(BrokerError, match=r"broker\.json cannot be read"):
        await new_broker().start()


async def test_unusable_directory_is_named(new_broker, tmp_path, monkeypatch):
    (tmp_path / "broker").write_text("a file is in the way")
    with pytest.raises(BrokerError, match=r"cannot write to .*broker \(data_dir\)"):
        await new_broker().start()
    monkeypatch.setattr(storage, "LEAST_SPACE_BYTES", 1 << 62)
    with pytest.raises(BrokerError, match="the disk is full: "):
        await new_broker("full").start()


async def test_early_end_tells_why(new_broker, tmp_path):
    (tmp_path / "broker" / "data.new" / "half").mkdir(parents=True)  # an interrupted format
    with pytest.raises(BrokerError, match=r"could not be formatted: .*(num\.partitions|Invalid value)"):
        await new_broker(settings={"num.partitions": "many"}).start()
    assert not (tmp_path / "broker" / "data").exists()
    with pytest.raises(BrokerError, match=r"ended while it started: \S+Exception: .*no\.such\.Selector"):
        await new_broker(settings={"replica.selector.class": "no.such.Selector"}).start()
    with pytest.raises(BrokerError, match=r"ended while it started: .*[Hh]eap"):
        await new_broker(heap="1m").start()


async def test_settings_and_files(new_broker, tmp_path):
    archive = tmp_path / "damaged.jsa"
    assert archive_options(archive) == ()
    archive.write_bytes(b"no archive of classes: it is left alone")
    options = archive_options(archive)
    async with new_broker(settings={"num.partitions": "7"}, java_options=options) as broker:
        assert has_argument(broker.pid, *options)
        assert not maps(broker.pid, archive)
        assert "num.partitions=7" in (tmp_path / "broker" / "server.properties").read_text()
        assert "Kafka version: 4.3.1" in broker.log_file.read_text()
        marker = msgspec.json.decode((tmp_path / "broker" / "broker.json").read_bytes(), type=Marker)
        assert (marker.kafka, marker.port) == ("4.3.1", broker.port)
        assert storage.FREE_PORTS[0] <= broker.port < 32768
        assert os.getsid(broker.pid) == broker.pid  # Ctrl-C in our terminal does not reach it
        with pytest.raises(RuntimeError, match="running already"):
            await broker.start()
    with pytest.raises(RuntimeError, match="is not running"):
        _ = broker.pid


def test_free_port_is_the_last_one_unless_taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        assert storage.choose_port(0, taken, "embedded.port", 0) != taken
        draws = iter([taken, 20_001, 20_002, 20_003])
        chosen = storage.choose_port(0, 0, "embedded.port", 20_001, lambda low, high: next(draws))
        assert chosen in {20_002, 20_003}
        with pytest.raises(PortTakenError, match="no free port"):
            storage.choose_port(0, 0, "embedded.port", 0, lambda low, high: taken)


def java_after(script: str, directory: Path) -> Path:
    """A `java` command that runs other code before the real one, when it starts a broker."""
    directory.mkdir()
    wrapper = directory / "java"
    wrapper.write_text(f'#!/bin/bash\ncase "$*" in *kafka.Kafka*) {script};; esac\nexec {find_java().path} "$@"\n')
    wrapper.chmod(0o700)
    return wrapper


async def test_a_start_that_gets_on_is_waited_for_and_one_that_hangs_is_given_up(tmp_path, caplog):
    patience = 4
    archive = archive_options(archive_path("kafka", find_java(), ensure_jars("kafka"), cache_directory()))
    recovering = "for n in $(seq 8); do echo 2026 INFO Recovering log $n >> logs/broker.log; sleep 0.8; done"
    options = {"jars": ensure_jars("kafka"), "heap": "512m", "patience_s": patience, "java_options": archive}
    slow = EmbeddedBroker(tmp_path / "slow", java=java_after(recovering, tmp_path / "slow"), **options)
    repeating = "exec 3<> <(:); while :; do read -t 0.1 -u 3; echo 2026 WARN the same again >> logs/broker.log; done"
    hung = EmbeddedBroker(tmp_path / "hung", java=java_after(repeating, tmp_path / "hung"), **options)
    began = time.monotonic()
    try:
        given_up, _ = await asyncio.gather(hung.start(), slow.start(), return_exceptions=True)
        assert time.monotonic() - began > patience
        assert slow.is_running
        assert slow.directory.stat().st_mode & 0o777 == 0o700
    finally:
        await slow.kill()
    assert isinstance(given_up, BrokerError)
    assert f"no progress for {patience} s, last log line: 2026 WARN the same again" in str(given_up)
    assert not hung.is_running
