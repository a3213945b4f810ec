"""Kafka's ACLs as the access list: same verdicts as Kafka's own authorizer, and unknown ACLs deny access."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import struct
import uuid
from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp
import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from hypothesis import given, settings
from hypothesis import strategies as st
from proton import ConnectionException
from proton.utils import BlockingConnection

from gateway.kafka.cluster.doctor import Finding, examine
from gateway.kafka.cluster.rights import AclOperation
from gateway.kafka.cluster.topic_queries import TopicQueries
from gateway.kafka.driver.acl_requests import ALL, GROUP, TOPIC, Acl
from gateway.kafka.driver.wire import EncodedRequest, rights_request
from gateway.process.listeners import make_servers
from gateway.runtime.spawn import Tasks
from gateway.security.fair_queue import Unavailable
from gateway.security.identity import Identity
from gateway.security.rights.acl_source import AclSource
from gateway.security.rights.authorization import AccessList, Grant
from gateway.security.rights.kafka_acls import AclBook, principal_of, principal_template
from gateway.settings.config import Config, ConfigError, KafkaConfig, SecurityConfig
from mapping.rules import Rules, RuleText
from protocols.amqp.sasl import SaslCode
from tests.support.assembled import assembled
from tests.support.mqtt import RawClient
from tests.support.secured import kafka_of
from tests.support.topics import until_led
from tests.support.waiting import wait_until
from tools.acls import Acls
from tools.cluster import Cluster
from tools.secured import CLIENTS

RUN: Final = uuid.uuid4().hex[:8]
NAMES: Final = tuple(f"acl-{RUN}{end}" for end in ("", "-a", "-ab", "-b", ".c"))
"""Names of topics and groups."""
PATTERNS: Final = [
    *((name, False) for name in (*NAMES, "*")),
    *((name[:-1], True) for name in NAMES),
    (f"acl-{RUN}", True),
]
OF_TOPICS: Final = [*map(int, AclOperation), ALL]
OF_GROUPS: Final = [AclOperation.READ, AclOperation.DELETE, AclOperation.DESCRIBE, ALL]
TEMPLATE: Final = principal_template(SecurityConfig())


class _DescribeGroups(EncodedRequest):
    API_KEY = 15
    API_VERSION = 3


class User:
    """One of Kafka's users, and the operations that Kafka allows it."""

    def __init__(self, name: str, queries: TopicQueries) -> None:
        self.name = name
        self._queries = queries

    async def topics(self) -> dict[str, int | None]:
        """Return the allowed operations of each topic, one bit per operation; None when the topic is hidden."""
        answer = await self._queries.request(rights_request(NAMES))
        return {name: None if topic.error else topic.operations for name, topic in answer.topics.items()}

    async def groups(self) -> dict[str, int | None]:
        body = struct.pack(">i", len(NAMES)) + b"".join(struct.pack(">h", len(name)) + name.encode() for name in NAMES)
        data = await self._queries.request(_DescribeGroups(body + b"\x01"))
        found: dict[str, int | None] = {}
        at = 8
        for _ in NAMES:
            (error,) = struct.unpack_from(">h", data, at)
            texts, at = [], at + 2
            for _ in range(4):
                (size,) = struct.unpack_from(">h", data, at)
                texts.append(data[at + 2 : at + 2 + max(0, size)].decode())
                at += 2 + max(0, size)
            members, operations = struct.unpack_from(">ii", data, at)
            assert not members
            at += 8
            assert error in {0, 30}, error  # GROUP_AUTHORIZATION_FAILED
            found[texts[0]] = None if error else operations
        return found


@pytest.fixture(scope="module")
async def users(secured_broker: Cluster) -> AsyncIterator[list[User]]:
    """Yield users that are logged in to a broker with the topics and the groups."""
    admin = AIOKafkaAdminClient(bootstrap_servers=secured_broker.bootstrap_servers)
    await admin.start()
    await admin.create_topics([NewTopic(name, 1, 1) for name in NAMES])
    for name in NAMES:
        await until_led(admin, name)
    await admin.close()
    consumer = AIOKafkaConsumer(NAMES[0], bootstrap_servers=secured_broker.bootstrap_servers, group_id=f"make-{RUN}")
    await consumer.start()  # so that Kafka creates its topic for groups' offsets
    await consumer.stop()
    tasks = Tasks(lambda _: None)
    clock = asyncio.get_running_loop().time
    queries = {name: TopicQueries(kafka_of(secured_broker, name), tasks.spawn, clock) for name in CLIENTS}
    yield [User(name, each) for name, each in queries.items()]
    for each in queries.values():
        await each.stop()
    await tasks.close()


@pytest.fixture(scope="module")
async def acls(secured_broker: Cluster) -> AsyncIterator[Acls]:
    async with Acls(secured_broker.bootstrap_servers) as acls:
        yield acls


@contextlib.asynccontextmanager
async def there(acls: Acls, *wanted: Acl) -> AsyncIterator[None]:
    await acls.create(*wanted)
    try:
        yield
    finally:
        await acls.delete(*wanted)


def grant_by(found: list[Acl], user: str, *, everyone: bool = False, peer: str = "127.0.0.1:1") -> Grant:
    access = AccessList(None)
    access.use(AclBook(found, TEMPLATE, everyone=everyone))
    return access.for_client(Identity(user, "password"), "c", peer=peer)


def ours_of_topic(grant: Grant, topic: str) -> dict[AclOperation, bool]:
    return {
        AclOperation.READ: grant.subscribe.whole_topic(topic),
        AclOperation.WRITE: grant.publish.whole_topic(topic),
        AclOperation.CREATE: grant.may_administer("create", topic),
        AclOperation.DELETE: grant.may_administer("delete", topic),
        AclOperation.ALTER_CONFIGS: grant.may_administer("configure", topic),
        AclOperation.DESCRIBE_CONFIGS: grant.may_administer("inspect", topic),
        AclOperation.DESCRIBE: grant.visible_topics([topic]) == [topic],
    }


def ours_of_group(grant: Grant, group: str) -> dict[AclOperation, bool]:
    return {
        AclOperation.READ: bool(grant.group("read", group)),
        AclOperation.DELETE: bool(grant.group("delete", group)),
        AclOperation.DESCRIBE: bool(grant.group("admin", group)),
    }


def any_acl(kind: int, operations: list[int]) -> st.SearchStrategy[Acl]:
    return st.builds(
        lambda pattern, user, host, operation, allow: Acl(kind, *pattern, f"User:{user}", host, operation, allow),
        st.sampled_from(PATTERNS),
        st.sampled_from([*CLIENTS, "*"]),
        st.sampled_from(["*", "*", "127.0.0.1", "10.1.2.3"]),
        st.sampled_from(operations),
        st.sampled_from([True, True, False]),
    )


any_acls = st.lists(any_acl(TOPIC, OF_TOPICS) | any_acl(GROUP, OF_GROUPS), min_size=1, max_size=16, unique=True)


@settings(max_examples=40)
@given(wanted=any_acls)
async def test_the_verdicts_are_those_of_kafkas_own_authorizer(
    users: list[User], acls: Acls, wanted: list[Acl]
) -> None:
    async with there(acls, *wanted):
        for user in users:
            grant = grant_by(await acls.all(), user.name)
            for theirs, ours in ((await user.topics(), ours_of_topic), (await user.groups(), ours_of_group)):
                for name, operations in theirs.items():
                    mine = ours(grant, name)
                    if operations is None:
                        assert not mine[AclOperation.DESCRIBE], (user.name, name)
                        continue
                    assert mine == {one: bool(operations >> one & 1) for one in mine}, (user.name, name)


# by rules alone


def acl(name: str, *, operation: int = AclOperation.WRITE, user: str = "ann", **more: Any) -> Acl:
    given = {"kind": TOPIC, "prefixed": False, "host": "*", "allow": True, **more}
    return Acl(name=name, principal=f"User:{user}", operation=operation, **given)


@pytest.mark.parametrize(
    ("host", "peer", "allowed"),
    [
        ("10.1.2.3", "10.1.2.3:5000", True),
        ("10.1.2.3", "10.1.2.4:5000", False),
        ("10.1.2.3", "[::ffff:10.1.2.3]:5000", True),
        ("2001:db8:0:0:0:0:0:1", "[2001:db8::1]:5000", True),
        ("2001:db8::1", "[2001:db8::2]:5000", False),
    ],
)
def test_a_host_is_the_same_however_it_is_written(host: str, peer: str, allowed: bool) -> None:
    assert grant_by([acl("t", host=host)], "ann", peer=peer).publish("t") is allowed


def test_topics_without_acls_are_open_where_configured() -> None:
    found = [
        acl("a", user="bob"), acl("b", user="bob", prefixed=True), acl("c"), acl("c", allow=False, operation=ALL),
        acl("g", kind=GROUP, user="bob", operation=AclOperation.READ),
    ]  # fmt: skip
    expected = {"a": False, "ab": True, "b": False, "bc": False, "c": False, "other": True}
    grant = grant_by(found, "ann", everyone=True)
    assert {topic: grant.publish(topic) for topic in expected} == expected
    assert {topic: grant.may_administer("delete", topic) for topic in expected} == expected
    assert [grant.group("read", name) for name in ("g", "h")] == [False, True]
    assert grant.may_transact("c1")
    nobody = grant_by(found, "ann")
    assert not any(nobody.publish(topic) for topic in expected if topic != "c")
    assert not nobody.may_transact("c1")


def test_mqtt_topics_have_the_rights_of_their_kafka_topic() -> None:
    rules = Rules([RuleText("plant/{site}/#", "plant-{site}", None)])
    access = AccessList(None, rules)
    found = [acl("plant-oslo"), acl("plant-", prefixed=True, operation=AclOperation.READ)]
    access.use(AclBook(found, TEMPLATE, everyone=False))
    grant = access.for_client(Identity("ann", "password"))
    for site, may in (("oslo", True), ("rome", False)):
        place = rules.destination(f"plant/{site}/t")
        assert grant.mqtt_publish(f"plant/{site}/t", place.topic, place.key) is may
        assert grant.mqtt_subscribe.filter(f"plant/{site}/t")
    assert not grant.mqtt_subscribe.filter("elsewhere/t")


@pytest.mark.parametrize("name", ["#", "+", "a/b", "a/#", "+/x"])
def test_an_invalid_topic_name_allows_nothing(name: str) -> None:
    for prefixed in (False, True):
        grant = grant_by([acl(name, prefixed=prefixed)], "ann")
        assert not any(grant.publish(topic, key) for topic in ("a", "b", "x") for key in (None, "b", "x"))


@pytest.mark.parametrize(
    ("principal", "identity", "expected"),
    [
        ("User:{name}", Identity("ann", "password"), "User:ann"),
        ("User:CN={cn}", Identity("ann", "password", common_name="device-7"), "User:CN=device-7"),
        ("User:CN={cn}", Identity("ann", "password"), None),
        ("User:{claim:azp}", Identity("ann", "token", (), (("azp", ("shop",)),)), "User:shop"),
        ("User:{claim:azp}", Identity("ann", "token", (), (("azp", ("shop", "till")),)), None),
        ("User:{name}", Identity("*", "certificate"), "User:*"),
    ],
)
def test_the_kafka_principal_of_a_client(principal: str, identity: Identity, expected: str | None) -> None:
    assert principal_of(identity, principal_template(SecurityConfig(access_principal=principal))) == expected


@pytest.mark.parametrize(
    "principal", ["User:ann", "{name}", "User:{client}", "User:{group}", "User:{nobody}", "User:{"]
)
def test_a_principal_that_cannot_tell_clients_apart_stops_the_start(principal: str) -> None:
    with pytest.raises(ConfigError, match=r"^security\.access_principal: "):
        principal_template(SecurityConfig(access_principal=principal))


async def test_grants_are_updated_in_place_and_changes_are_reported() -> None:
    access = AccessList(None)
    told: list[frozenset[Grant]] = []
    access.watch(lambda changed: told.append(frozenset(changed)))
    with pytest.raises(Unavailable):
        access.for_client(Identity("ann", "password"))
    access.use(AclBook([acl("t"), acl("t", user="bob")], TEMPLATE, everyone=False))
    ann, bob = (access.for_client(Identity(name, "password"), "c", peer="127.0.0.1:1") for name in ("ann", "bob"))
    publish, by_mqtt = ann.publish, ann.mqtt_publish
    assert publish("t", "k")
    assert by_mqtt("t/k", "t", b"k")
    assert bob.publish("t")
    access.use(AclBook([acl("t", user="bob"), acl("u")], TEMPLATE, everyone=False))
    await wait_until(lambda: told)
    assert told == [{ann}]
    assert not publish("t", "k")
    assert not by_mqtt("t/k", "t", b"k")
    assert publish("u")
    assert bob.publish("t")


@pytest.mark.parametrize("user", ["bob", "*"])
async def test_overlapping_changes_of_acls_reach_every_affected_client(user: str) -> None:
    access = AccessList(None)
    books = [AclBook([acl("t")], TEMPLATE, everyone=False)]
    for more in ([acl("t"), acl("u", user=user)], [acl("u", user=user)]):
        books.append(AclBook(more, TEMPLATE, everyone=False, before=books[-1]))
    access.use(books[0])
    clients = [access.for_client(Identity(name, "password"), "c", peer="127.0.0.1:1") for name in ("ann", "bob")]
    crowd = [access.for_client(Identity(f"u{number}", "password"), "c", peer="10.0.0.1:1") for number in range(5000)]
    for book in books[1:]:  # the second comes before the first has reached all of the crowd
        access.use(book)
    everybody = user == "*"
    await wait_until(lambda: clients[1].publish("u") and all(each.publish("u") is everybody for each in crowd))
    await wait_until(lambda: not clients[0].publish("t"))
    assert clients[0].publish("u") is everybody


# Kafka is away


async def test_the_last_acls_stay_while_kafka_is_away(bootstrap: str, secured_broker: Cluster, acls: Acls) -> None:
    """The shared broker has no authorizer; the third address has no broker."""
    tasks = Tasks(lambda _: None)
    clock = asyncio.get_running_loop().time
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        away, open_to_all, secured = (
            TopicQueries(KafkaConfig(bootstrap_servers=servers, request_timeout_s=5), tasks.spawn, clock)
            for servers in (f"127.0.0.1:{nobody.getsockname()[1]}", bootstrap, secured_broker.bootstrap_servers)
        )
        asked = [away]
        access = AccessList(None)
        config = SecurityConfig.model_validate({"access_source": "kafka", "access_refresh_s": 0.1})
        source = AclSource(config, access, clock=clock)

        async def ask(question: EncodedRequest) -> bytes:
            return await asked[-1].request(question)

        running = tasks.spawn(source.run(ask))
        await wait_until(lambda: source.problem is not None and "does not answer" in source.problem)
        assert not access.is_known
        asked.append(open_to_all)
        await wait_until(lambda: source.problem is not None and "no authorizer" in source.problem)
        assert not access.is_known
        mine = acl(f"mine-{RUN}")
        async with there(acls, mine):
            asked.append(secured)
            await wait_until(lambda: source.problem is None and access.is_known)
            grant = access.for_client(Identity("ann", "password"))
            await wait_until(lambda: grant.publish(mine.name))
            for queries in (away, open_to_all):
                failures = source.statistics().failures_total
                asked.append(queries)
                await wait_until(lambda most=failures + 3: source.statistics().failures_total > most)
                assert source.problem is not None
                assert grant.publish(mine.name)
            assert source.statistics().age_seconds > 0.1
            asked.append(secured)
        await wait_until(lambda: source.problem is None and not grant.publish(mine.name))
        running.cancel()
        for each in (away, open_to_all, secured):
            await each.stop()
        await tasks.close()


async def test_logins_while_kafka_is_away_are_asked_to_retry(bootstrap: str) -> None:
    """Kafka is reachable for messages; the cluster that checks passwords is not, and the ACLs are unknown."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        servers = f"127.0.0.1:{nobody.getsockname()[1]}"
        security: dict[str, Any] = {"password_source": "kafka", "password_servers": servers}
        security |= {"password_protocol": "SASL_PLAINTEXT", "access_source": "kafka"}
        anywhere = {protocol: {"address": "127.0.0.1:0"} for protocol in ("mqtt", "amqp", "http")}
        async with assembled(bootstrap, create=True, security=security, **anywhere) as parts:
            listeners = make_servers(*parts)[:3]
            for listener in listeners:
                await listener.start()
            mqtt, amqp, http = (listener.bound for listener in listeners)
            host, _, port = mqtt.rpartition(":")
            logins = {"with a password": {"username": "ann", "password": b"secret"}, "anonymous": {}}
            for fields in logins.values():
                for version, code in ((5, 0x88), (4, 3)):
                    client = await RawClient.connect((host, int(port)), version=version, **fields)
                    assert client.connack.reason_code == code
                    client.drop()
            with pytest.raises(ConnectionException) as caught:
                await asyncio.to_thread(lambda: BlockingConnection(f"amqp://{amqp}", allowed_mechs="ANONYMOUS"))
            assert "amqp:connection:forced" in str(caught.value)
            assert await sasl_outcome(amqp, b"\0ann\0secret") == SaslCode.SYS_TEMP
            async with aiohttp.ClientSession(f"http://{http}") as session:
                login = {"Authorization": "Basic " + base64.b64encode(b"ann:secret").decode()}
                for headers, known, status in (
                    ({}, False, 503),
                    (login, False, 503),
                    (login, True, 503),
                    ({}, True, 200),
                ):
                    if known:
                        parts.security.access_list.use(AclBook([], TEMPLATE, everyone=False))
                    async with session.get("/topics", headers=headers) as answer:
                        assert answer.status == status
                        assert ("Retry-After" in answer.headers) is (status == 503)
            statistics = parts.security.authenticator.statistics()
            assert (statistics.refused_total, statistics.throttled_total) == (0, 0)
            assert statistics.errors_total >= 3
            for listener in listeners:
                listener.stop_receiving()
                await listener.stop(1.0)


async def sasl_outcome(address: str, response: bytes) -> int:
    """Return the code of a login by PLAIN."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    fields = b"\xa3\x05PLAIN\xa0" + bytes([len(response)]) + response
    init = b"\x00\x53\x41\xc0" + bytes([len(fields) + 1, 2]) + fields
    writer.write(b"AMQP\x03\x01\x00\x00" + struct.pack(">IBBH", len(init) + 8, 2, 1, 0) + init)
    data = b""
    while b"\x00\x53\x44" not in data or not data[data.index(b"\x00\x53\x44") :].count(b"\x50"):
        data += await asyncio.wait_for(reader.readexactly(1), 60)
    code = await reader.readexactly(1)
    writer.close()
    return code[0]


async def test_the_doctor_checks_whether_acls_can_be_read(bootstrap: str, secured_broker: Cluster) -> None:
    security = {"access_source": "kafka"}
    for servers, good, text in ((bootstrap, False, "no authorizer"), (secured_broker.bootstrap_servers, True, "read")):
        said: list[Finding] = []
        config = Config.model_validate({"kafka": {"bootstrap_servers": servers}, "security": security})
        await examine(config, said.append)
        (finding,) = [one for one in said if one.text.startswith("ACLs: ")]
        assert finding.good is good
        assert text in finding.text
