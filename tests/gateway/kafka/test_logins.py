"""Logging in to a Kafka that requires it: each mechanism and kind of client, renewal, refusal and reports."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaError

from gateway.kafka.driver.admin_client import AdminClient
from gateway.kafka.driver.client_settings import client_settings
from gateway.kafka.driver.kafka_consumer import group_consumer, log_consumer, poll
from gateway.kafka.driver.lifecycle import open_consumer
from gateway.kafka.driver.login import Login, logins
from gateway.kafka.driver.produce.kafka_producer import new_producer
from gateway.runtime.spawn import Tasks
from gateway.settings.config import ConfigError, KafkaConfig
from loadtest.ports import free_port
from mapping.outcomes import Outcome
from mapping.record import Record
from protocols.mqtt import packets
from tests.support.gateway import GatewayProcess, wait_until
from tests.support.mqtt import RawClient
from tests.support.secured import TokenEndpoint, secured_of
from tests.support.topics import create_topic, read_all
from tools.cluster import Cluster
from tools.secured import USER, Authority

CANARY = "ca/nary+7"


def config_of(cluster: Cluster, listener: str, **options: Any) -> KafkaConfig:
    secured = secured_of(cluster)
    given = {
        "bootstrap_servers": cluster.servers(listener), "ssl_cafile": secured.ca,
        "security_protocol": "SSL" if listener == "TLS" else "SASL_SSL", **options,
    }  # fmt: skip
    return KafkaConfig.model_validate(given)


def login_of(config: KafkaConfig) -> Login:
    login = logins.of(config)
    assert login is not None
    return login


@pytest.fixture
async def own_topic(secured_broker: Cluster) -> AsyncIterator[Callable[..., Any]]:
    """`await own_topic(partitions)`: a topic of the secured broker."""
    admin = AIOKafkaAdminClient(bootstrap_servers=secured_broker.bootstrap_servers)
    await admin.start()
    yield lambda partitions=1: create_topic(admin, partitions)
    await admin.close()


WAYS = {
    "certificate": ("TLS", {}),
    "PLAIN": ("SASL", {"sasl_username": USER}),
    "SCRAM-SHA-256": ("SASL", {"sasl_username": USER, "sasl_mechanism": "SCRAM-SHA-256"}),
    "SCRAM-SHA-512": ("SASL", {"sasl_username": USER, "sasl_mechanism": "SCRAM-SHA-512"}),
    "token file": ("SASL", {"sasl_mechanism": "OAUTHBEARER"}),
    "token endpoint": ("TOKENS", {"sasl_mechanism": "OAUTHBEARER"}),
}


@pytest.fixture
def way(
    request: pytest.FixtureRequest, secured_broker: Cluster, endpoint: TokenEndpoint, tmp_path: Path
) -> KafkaConfig:
    """Return a configuration for one of these mechanisms."""
    secured = secured_of(secured_broker)
    listener, options = WAYS[request.param]
    if request.param == "certificate":
        options = {"ssl_certfile": secured.certificate, "ssl_keyfile": secured.key}
    elif listener == "TOKENS":
        endpoint.secured = secured
        oauth = {"token_url": endpoint.url, "client_id": "a:b", "client_secret": "s s+s"}
        options = {**options, "oauth": oauth}
    elif "sasl_username" in options:
        options = {**options, "sasl_password": secured.password}
    else:
        file = tmp_path / "token"
        file.write_text(secured.token(signed=False))
        options = {**options, "oauth": {"token_file": file, "extensions": {"logicalCluster": "lkc-1"}}}
    return config_of(secured_broker, listener, **options)


@pytest.mark.parametrize("way", WAYS, indirect=True)
async def test_each_kind_of_client_logs_in(way: KafkaConfig, own_topic: Callable[..., Any]) -> None:
    topic = await own_topic()
    place = TopicPartition(topic, 0)
    tasks = Tasks(lambda _: None)
    for options in ({"enable_idempotence": True}, {"transactional_id": f"trivium-{topic}"}):
        producer = new_producer(way, "publisher", **options)
        await producer.start()
        if "transactional_id" in options:
            async with producer.transaction():
                await producer.send_and_wait(topic, b"in a transaction")
        else:
            await producer.send_and_wait(topic, b"idempotent")
        await producer.stop()
    group = group_consumer(client_settings(way, "group"), topic, session_timeout_ms=6000)
    log = log_consumer(client_settings(way, "tail"))
    for consumer in (group, log):
        values: list[bytes | None] = []
        async with open_consumer(consumer, tasks.spawn):
            if consumer is log:
                consumer.assign([place])
                consumer.seek(place, 0)
            else:
                consumer.subscribe([topic])
            async with asyncio.timeout(60):
                while len(values) < 2:
                    values += [one.value for one in (await poll(consumer, wait_ms=100)).get(place, ())]
            if consumer is group:
                await consumer.commit({place: 2})
        assert values == [b"idempotent", b"in a transaction"]
    admin = AdminClient(**client_settings(way, "http"))
    await admin.start()
    (described,) = await admin.describe_topics([topic])
    assert (await admin.list_consumer_group_offsets(topic))[place].offset == 2
    await admin.close()
    assert described["topic"] == topic
    assert login_of(way).problem is None
    await tasks.close()


@pytest.mark.parametrize("way", ["token endpoint", "SCRAM-SHA-256"], indirect=True)
async def test_a_login_is_renewed_in_time_without_interruption(
    way: KafkaConfig, kit: Any, own_topic: Callable[..., Any], endpoint: TokenEndpoint,
    *, caplog: pytest.LogCaptureFixture, logged: list[Any],
) -> None:  # fmt: skip
    """Tokens live 6 s, logins by that mechanism 4 s; Kafka closes connections that outlive theirs."""
    endpoint.expires_in = 6
    topic = await own_topic()
    place = TopicPartition(topic, 0)
    login = login_of(way)
    read: list[bytes | None] = []
    tasks = Tasks(lambda _: None)
    consumer = log_consumer(client_settings(way, "tail"))
    async with (
        kit(way.bootstrap_servers, **way.model_dump(exclude={"bootstrap_servers"})) as k,
        open_consumer(consumer, tasks.spawn),
    ):
        consumer.assign([place])
        consumer.seek(place, 0)
        owner = k.recorder()
        sent = 0
        caplog.clear()
        logged.clear()
        async with asyncio.timeout(60):
            while login.counts.renewed < 4 or len(read) < sent:
                if login.counts.renewed < 4:
                    k.submit(Record(topic, None, b"%d" % sent, partition=0), owner, sent)
                    sent += 1
                read += [one.value for one in (await poll(consumer, wait_ms=20)).get(place, ())]
        await k.until(lambda: len(owner.fates) == sent)
        assert set(owner.outcomes().values()) == {Outcome.STORED}
        assert read == [b"%d" % number for number in range(sent)]
    told = [record.getMessage() for record in caplog.records if record.levelname in {"WARNING", "ERROR"}]
    told += [line["event"] for line in logged if line["log_level"] in {"warning", "error"}]
    # uvloop's own words for bytes that came to a connection in the moment in which it was aborted, behind its close.
    assert [text for text in told if not text.startswith("Fatal error on SSL protocol")] == []
    if endpoint.asked:
        assert login.counts.tokens == len(endpoint.asked) >= 2
    await tasks.close()


def refused(cluster: Cluster, directory: Path) -> dict[str, tuple[KafkaConfig, str]]:
    """Return the configurations that Kafka refuses, each with the reported text."""
    secured = secured_of(cluster)
    other = Authority()
    key, certificate = other.issue(USER)
    for name, content in (("other.key", key), ("other.pem", certificate), ("authority.pem", other.pem)):
        (directory / name).write_bytes(content)
    token = directory / "token"
    token.write_text(secured.token(name=CANARY)[:-20] + "A" * 20)
    ours = {"ssl_certfile": secured.certificate, "ssl_keyfile": secured.key}
    theirs = {"ssl_certfile": directory / "other.pem", "ssl_keyfile": directory / "other.key"}
    password = {"sasl_username": USER, "sasl_password": CANARY}
    return {
        "no certificate": (config_of(cluster, "TLS"), r"TLS handshake failed: \w*CERTIFICATE\w* \(kafka.ssl_certfile"),
        "another's certificate": (
            config_of(cluster, "TLS", **theirs),
            r"TLS handshake failed: \w*CERTIFICATE\w* \(kafka.ssl_certf",
        ),
        "another authority": (
            config_of(cluster, "TLS", **ours | {"ssl_cafile": directory / "authority.pem"}),
            r"Kafka's certificate is not trusted: .* \(kafka.ssl_cafile\)",
        ),
        "password": (
            config_of(cluster, "SASL", **password),
            "Kafka rejects the login with PLAIN: Authentication failed",
        ),
        "SCRAM": (
            config_of(cluster, "SASL", sasl_mechanism="SCRAM-SHA-512", **password),
            "Kafka rejects the login with SCRAM-SHA-512: Authentication failed",
        ),
        "mechanism": (config_of(cluster, "TOKENS", **password), r"does not support PLAIN \(kafka.sasl_mechanism\)"),
        "token": (
            config_of(cluster, "TOKENS", sasl_mechanism="OAUTHBEARER", oauth={"token_file": token}),
            "Kafka rejects the token: invalid_token$",
        ),
    }


async def test_refusals_of_kafka_are_reported_in_a_sentence(
    secured_broker: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, logged: list[Any]
) -> None:
    for name, (config, told) in refused(secured_broker, tmp_path).items():
        client = AIOKafkaClient(**client_settings(config))
        for _ in range(2):
            with pytest.raises(KafkaError):
                await client.bootstrap()
        login = login_of(config)
        assert login.problem is not None, name
        host = config.bootstrap_servers
        assert login.problem.startswith(f"{host}: "), name
        assert re.search(told, login.problem), (name, login.problem)
        assert [line["event"] for line in logged if line["error"] == login.problem] == ["cannot log in to Kafka"], name
        await client.close()
        logins._logins.remove(login)  # drop this login's problem from the process
    assert CANARY not in f"{caplog.text} {logged}"


async def test_a_certificate_that_was_replaced_is_shown_from_then_on(secured_broker: Cluster, tmp_path: Path) -> None:
    secured = secured_of(secured_broker)
    certificate, key = tmp_path / "c.pem", tmp_path / "c.key"

    def put(one: tuple[bytes, bytes]) -> None:
        for path, content in ((key, one[0]), (certificate, one[1])):
            fresh = path.with_suffix(".new")
            fresh.write_bytes(content)
            fresh.replace(path)

    async def connects() -> bool:
        client = AIOKafkaClient(**client_settings(config))
        try:
            await client.bootstrap()
        except KafkaError:
            return False
        finally:
            await client.close()
        return True

    good = secured.key.read_bytes(), secured.certificate.read_bytes()
    put(good)
    config = config_of(secured_broker, "TLS", ssl_certfile=certificate, ssl_keyfile=key)
    login = login_of(config)
    assert await connects()
    certificate.write_bytes(b"broken")
    assert await connects(), "the old one stays"
    put(Authority().issue(USER))
    assert not await connects(), "the new one is shown, which this Kafka does not believe"
    put(Authority().issue(USER, days=-1))
    assert not await connects(), "of one that has ended nothing is shown"
    put(good)
    assert await connects()
    assert login.problem is None
    assert (login.counts.reloads, login.counts.failed_reloads) == (2, 2)
    login.reload()
    assert (login.counts.reloads, login.counts.failed_reloads) == (3, 2)
    logins._logins.remove(login)


def test_invalid_login_settings_are_reported_with_their_key(tmp_path: Path) -> None:
    authority = Authority()
    names = ("good", "ended")
    for name, (key, certificate) in zip(names, (authority.issue("a"), authority.issue("a", days=-1)), strict=True):
        (tmp_path / f"{name}.key").write_bytes(key)
        (tmp_path / f"{name}.pem").write_bytes(certificate)
    (tmp_path / "broken.pem").write_text("broken")
    for options, told in (
        ({"ssl_cafile": "none"}, "kafka.ssl_cafile: cannot read .*none: No such file"),
        ({"ssl_cafile": "broken.pem"}, "kafka.ssl_cafile: "),
        ({"ssl_certfile": "none"}, "kafka.ssl_certfile: cannot read"),
        ({"ssl_certfile": "good.pem", "ssl_keyfile": "none"}, "kafka.ssl_keyfile: cannot read"),
        ({"ssl_certfile": "broken.pem", "ssl_keyfile": "good.key"}, "kafka.ssl_certfile, kafka.ssl_keyfile: cannot be"),
        ({"ssl_certfile": "good.pem", "ssl_keyfile": "ended.key"}, r"cannot be used together \(KEY_VALUES_MISMATCH\)"),
        ({"ssl_certfile": "ended.pem", "ssl_keyfile": "ended.key"}, "the certificate in .*ended.pem has expired on 20"),
        ({"sasl_username": "u", "sasl_password_file": "none"}, "kafka.sasl_password_file: cannot read"),
        ({"sasl_username": "u"}, "kafka.sasl_username and kafka.sasl_password"),
    ):
        protocol = "SASL_SSL" if "sasl_username" in options else "SSL"
        given = {
            key: str(tmp_path / value) if key.endswith("file") else value for key, value in options.items()
        }  # fmt: skip
        with pytest.raises(ConfigError, match=told):
            logins.of(KafkaConfig.model_validate({"security_protocol": protocol, **given}))


async def test_a_gateway_whose_password_is_wrong_for_a_while(
    secured_broker: Cluster, new_gateway: Callable[..., GatewayProcess],
    own_topic: Callable[..., Any], tmp_path: Path,
) -> None:  # fmt: skip
    """At its start and in its midst. Logins by this mechanism last 4 s, so it is asked for it all the time."""
    secured = secured_of(secured_broker)
    free_address = f"127.0.0.1:{free_port()}"
    file = tmp_path / "password"
    file.write_text(CANARY)
    topic = await own_topic()
    config = f"""
[kafka]
security_protocol = "SASL_SSL"
sasl_mechanism = "SCRAM-SHA-256"
sasl_username = "{USER}"
sasl_password_file = "{file}"
ssl_cafile = "{secured.ca}"
create_topics = true
"""
    gateway = new_gateway(secured_broker.servers("SASL"), "--management", free_address, config=config)
    starting = asyncio.ensure_future(gateway.start(120))
    async with aiohttp.ClientSession(f"http://{free_address}") as http:

        async def asked(path: str) -> tuple[int, str]:
            try:
                async with http.get(path) as answer:
                    return answer.status, await answer.text()
            except aiohttp.ClientError:
                return 0, ""

        async def login() -> str | None:
            status, body = await asked("/ready")
            return str(json.loads(body).get("kafka_login")) if status else None

        async def is_refused() -> bool:
            return "Kafka rejects the login with SCRAM-SHA-256: Authentication failed" in (await login() or "")

        await wait_until(is_refused)
        status, _ = await asked("/ready")
        assert status == 503
        assert "cannot log in to Kafka" in gateway.log.read_text()
        file.write_text(secured.password)
        await starting
        assert (await asked("/ready"))[0] == 200
        assert await login() == "None"
        client = await RawClient.connect(gateway.address("mqtt"), session_expiry_interval=60)
        await client.publish(topic, b"before")

        file.write_text(CANARY)
        await wait_until(is_refused)
        packet = client.new_id()
        client.send(packets.Publish(topic, b"meanwhile", qos=1, packet_id=packet))
        await client.ping()  # the gateway has it, and there was no PUBACK before this answer
        file.write_text(secured.password)
        await client.answer(packets.Puback, packet)
        await client.disconnect()

        before = (await asked("/metrics"))[1]
        os.kill(gateway.pid, signal.SIGHUP)

        async def reloads() -> float:
            text = (await asked("/metrics"))[1]
            return float(text.split("\ntrivium_kafka_login_reloads_total ")[1].split()[0])

        assert "trivium_kafka_login_reloads_total 0.0" in before

        async def has_reloaded() -> bool:
            return await reloads() == 1

        await wait_until(has_reloaded)
        told = before + (await asked("/ready"))[1] + (await asked("/flow"))[1]
    assert [one.value for one in await read_all(secured_broker.bootstrap_servers, topic)] == [b"before", b"meanwhile"]
    assert await gateway.stop() == 0
    told += gateway.log.read_text()
    assert CANARY not in told
    assert secured.password not in told
