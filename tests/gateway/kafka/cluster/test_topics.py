"""The topics of a real cluster: looked up once, refreshed, refused for a reason."""

import asyncio
import contextlib
import uuid

import pytest
from aiokafka.admin import NewPartitions
from aiokafka.errors import IncompatibleBrokerVersion
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Int8, Int16, Int32, Schema, String

from gateway.embedded.broker import EmbeddedBroker
from gateway.embedded.jars import ensure_jars
from gateway.embedded.java import find_java
from gateway.kafka.cluster import topic_creation
from gateway.kafka.cluster.topic_info import TopicInfo
from gateway.kafka.cluster.topic_safety import TopicSafety
from gateway.kafka.cluster.topics import UNKNOWN_FOR_S
from gateway.kafka.contracts import Refused
from gateway.kafka.driver.topic_requests import BROKERS_DEFAULT, create_topics_request
from mapping.outcomes import Outcome
from mapping.record import Record


async def refusal(topics, name):
    with pytest.raises(Refused) as refused:
        await topics.get(name)
    return refused.value


async def test_a_topic_is_described(bootstrap, new_topic, kit):
    name = await new_topic(partitions=5, max_message_bytes="4321", cleanup_policy="compact,delete")
    async with kit(bootstrap) as k:
        assert k.topics.known(name) is None
        info = await k.topics.get(name)
        assert (info.name, info.partitions, info.max_message_bytes, info.needs_key) == (name, 5, 4321, True)
        assert info.available == (0, 1, 2, 3, 4)
        assert info.after_ms == 3_600_000  # Kafka's default since 4.0
        assert k.topics.known(name) is info
        assert await k.topics.get(name) is info


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("__consumer_offsets", Outcome.DENIED),
        ("__anything", Outcome.DENIED),
        ("no name", Outcome.UNKNOWN_TOPIC),
        ("", Outcome.UNKNOWN_TOPIC),
        (".", Outcome.UNKNOWN_TOPIC),
        ("x" * 250, Outcome.UNKNOWN_TOPIC),
        ("absent", Outcome.UNKNOWN_TOPIC),
    ],
)
async def test_refuses_what_is_not_there_or_not_for_clients(bootstrap, kit, name, outcome):
    async with kit(bootstrap, create=name != "absent") as k:
        assert (await refusal(k.topics, name)).outcome is outcome


async def test_concurrent_look_ups_of_a_name_are_one(bootstrap, kit):
    name = "once-" + uuid.uuid4().hex
    async with kit(bootstrap, create=True, topic_partitions=4) as k:
        infos = await asyncio.gather(*(k.topics.get(name) for _ in range(50)))
        assert {id(info) for info in infos} == {id(infos[0])}
        assert infos[0].partitions == 4
        assert name in k.topics.names


async def test_an_unknown_name_is_remembered_for_a_while(bootstrap, kit, admin):
    from aiokafka.admin import NewTopic

    name = "late-" + uuid.uuid4().hex
    async with kit(bootstrap) as k:
        await refusal(k.topics, name)
        await admin.create_topics([NewTopic(name, 1, 1)])
        await refusal(k.topics, name)
        async with asyncio.timeout(60):  # a new topic needs a moment to appear in the broker's metadata
            while k.topics.known(name) is None:
                k.ahead[0] += UNKNOWN_FOR_S
                with contextlib.suppress(Refused):
                    await k.topics.get(name)
        assert k.topics.known(name).partitions == 1


async def test_watchers_learn_of_topics_that_come_and_go(bootstrap, new_topic, kit, admin):
    async with kit(bootstrap) as k:
        appeared, disappeared = set(), set()

        def changed(new, gone):
            appeared.update(new)
            disappeared.update(gone)

        k.topics.watch(changed)
        name = await new_topic()
        await k.until(lambda: name in appeared)
        assert name in k.topics.names
        assert not any(known.startswith("__") for known in k.topics.names)
        await admin.delete_topics([name])
        async with asyncio.timeout(60):
            while name not in disappeared:
                await k.topics.refresh()
        assert name not in k.topics.names
        k.topics.unwatch(changed)


async def test_updates_of_looked_up_topics(bootstrap, new_topic, kit, admin):
    name = await new_topic(partitions=2)
    async with kit(bootstrap) as k:
        updates = []
        k.topics.updated.append(updates.append)
        await k.topics.get(name)
        await admin.create_partitions({name: NewPartitions(6)})
        async with asyncio.timeout(60):
            while not updates or updates[-1].partitions < 6:
                await k.topics.refresh()
        assert updates[-1] == k.topics.known(name)


async def test_a_new_topic_has_the_copies_of_the_brokers_default_or_as_configured(bootstrap, kit, admin):
    name = "copies-" + uuid.uuid4().hex
    async with kit(bootstrap, create=True) as k:
        await k.topics.get(name)
        (topic,) = await admin.describe_topics([name])
        assert {len(partition["replicas"]) for partition in topic["partitions"]} == {1}
    async with kit(bootstrap, create=True, topic_replication=2) as k:
        refused = await refusal(k.topics, "two-" + name)  # there is one broker, so two were requested
        assert "eplication factor" in refused.reason


def test_only_new_brokers_choose_the_replication_factor():
    def version(copies, newest):
        return create_topics_request([("t", 3, copies, [])], 1000).prepare({19: (0, newest)}).API_VERSION

    assert version(BROKERS_DEFAULT, 7) == 4
    assert version(3, 7) == 3
    assert version(3, 2) == 2, "an old broker accepts an explicit number"
    with pytest.raises(IncompatibleBrokerVersion, match="replication factor"):
        version(BROKERS_DEFAULT, 3)


async def test_a_created_topic_that_the_broker_does_not_list_in_time_is_no_unknown_topic(bootstrap, kit, monkeypatch):
    name = "late-" + uuid.uuid4().hex

    async def behind(names, node=None):
        return {one: Refused(Outcome.UNKNOWN_TOPIC, f"Topic {one} not found") for one in names}

    async with kit(bootstrap, create=True) as k:
        with monkeypatch.context() as patched:
            patched.setattr(topic_creation, "CREATION_S", 0.0)
            patched.setattr(k.topics.queries, "describe", behind)
            with pytest.raises(Refused) as refused:
                await k.topics.create(name)
        assert refused.value.outcome is Outcome.BUSY
        assert await k.topics.create(name) is False, "it exists"


@pytest.mark.parametrize("required", [False, True])
async def test_a_topic_that_one_broker_alone_holds(bootstrap, new_topic, kit, logged, required):
    name = await new_topic()
    async with kit(bootstrap, require_safe_topics=required) as k:
        assert (await k.topics.get(name)).copies == 1, "it may be read"
        owner = k.recorder()
        for number in range(3):
            k.submit(Record(name, b"k", b"v"), owner, number)
            await k.until(lambda number=number: number in owner.fates)
        assert set(owner.outcomes().values()) == {Outcome.UNSAFE if required else Outcome.STORED}
        assert all(("kafka.require_safe_topics" in result.reason) is required for result in owner.fates.values())
        assert k.topics.safety.statistics().unsafe_topics == 1
    told = [line for line in logged if line.get("topic") == name]
    assert len(told) == int(required), "no warning with a single broker; a refusal is logged once"


class _Answer(Response):
    API_KEY = 30
    API_VERSION = 1
    SCHEMA = Schema(
        ("throttle_time_ms", Int32), ("results", Array(("error_code", Int16), ("error_message", String("utf-8"))))
    )


class _Creation(RequestStruct):
    API_KEY = 30
    API_VERSION = 1
    RESPONSE_TYPE = _Answer
    SCHEMA = Schema(
        (
            "creations",
            Array(
                ("resource_type", Int8),
                ("resource_name", String("utf-8")),
                ("pattern_type", Int8),
                ("principal", String("utf-8")),
                ("host", String("utf-8")),
                ("operation", Int8),
                ("permission_type", Int8),
            ),
        )
    )


class CreateAcls(Request[_Creation]):
    """Deny everyone to write to a topic; aiokafka has no such request."""

    API_KEY = 30

    def __init__(self, topic):
        self.topic = topic

    def build(self, request_struct_class):
        topic_resource, literal, write, deny = 2, 3, 4, 2
        return request_struct_class([(topic_resource, self.topic, literal, "User:ANONYMOUS", "*", write, deny)])


async def test_what_kafka_denies_is_denied(tmp_path, kit):
    """With an authorizer: the batch comes back, the topic is refused, others go on."""
    settings = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    broker = EmbeddedBroker(
        tmp_path / "broker", java=find_java().path, jars=ensure_jars("kafka"), heap="512m", settings=settings
    )
    await broker.start()
    try:
        async with kit(broker.bootstrap_servers, create=True) as k:
            owner = k.recorder()
            k.submit(Record("secret", b"k", b"v"), owner, "allowed")
            await k.until(lambda: owner.fates)
            answer = await k.topics.queries.request(CreateAcls("secret"))
            assert answer.results[0][0] == 0
            async with asyncio.timeout(60):  # the new rule needs a moment to reach the broker
                for number in range(100_000):
                    k.submit(Record("secret", b"k", b"v"), owner, number)
                    k.submit(Record("open", b"k", b"v"), owner, f"open {number}")
                    await k.until(lambda number=number: number in owner.fates)
                    if owner.outcomes()[number] is not Outcome.STORED:
                        break
            assert owner.outcomes()[number] is Outcome.DENIED
            await k.until(lambda: f"open {number}" in owner.fates)
            assert owner.outcomes()[f"open {number}"] is Outcome.STORED
            producers = k.publisher.statistics().producers
            for number in range(100):
                k.submit(Record("secret", b"k", b"v"), owner, f"again {number}")
            await k.until(lambda: "again 99" in owner.fates)
            assert owner.outcomes()["again 99"] is Outcome.DENIED
            assert k.publisher.statistics().producers == producers  # refused from memory
    finally:
        await broker.kill()


@pytest.mark.parametrize("limit", ["max_topics", "max_partitions"])
async def test_concurrent_creations_do_not_exceed_a_limit(bootstrap, kit, limit):
    """Rounds follow each other immediately, and each counts the topics that the one before it has created."""
    async with kit(bootstrap) as k:
        there = {"max_topics": len(k.topics.names), "max_partitions": k.topics.creation.partitions_in_all}[limit]
    run = uuid.uuid4().hex
    async with kit(bootstrap, create=True, topic_partitions=1, **{limit: there + 25}) as k:
        asked = [k.topics.get(f"crowd-{run}-{number}", principal=f"p{number % 3}") for number in range(70)]
        made = await asyncio.gather(*asked, return_exceptions=True)
        refused = [one.outcome for one in made if isinstance(one, Refused)]
        assert refused == [Outcome.FULL] * len(refused)
        assert 0 < len(made) - len(refused) <= 25


async def test_a_topic_that_is_asked_for_again_counts_for_its_principal_still(bootstrap, kit):
    mine, other = (f"mine-{number}-{uuid.uuid4().hex}" for number in range(2))
    async with kit(bootstrap, max_topics_per_principal=1) as k:
        assert await k.topics.create(mine, principal="p")
        assert not await k.topics.create(mine, principal="p")
        with pytest.raises(Refused) as refused:
            await k.topics.create(other, principal="p")
        assert refused.value.outcome is Outcome.FULL
        assert not await k.topics.create(mine, principal="q")
        assert await k.topics.create(other, principal="q")


async def test_a_topic_counts_for_its_principal_though_its_leaders_were_not_seen(bootstrap, kit, monkeypatch):
    mine, other = (f"mine-{number}-{uuid.uuid4().hex}" for number in range(2))
    async with kit(bootstrap, max_topics_per_principal=1) as k:

        async def lost(names, node=None):
            raise Refused(Outcome.BUSY, "the connection broke")

        with monkeypatch.context() as broken:
            broken.setattr(k.topics.queries, "describe", lost)
            with pytest.raises(Refused):
                await k.topics.create(mine, principal="p")
        with pytest.raises(Refused) as refused:
            await k.topics.create(other, principal="p")
        assert refused.value.outcome is Outcome.FULL


@pytest.mark.parametrize("principals", [("p", "p", "p"), ("p", "q", None)])
async def test_one_of_several_requests_creates_the_topic(bootstrap, kit, principals):
    name = "thrice-" + uuid.uuid4().hex
    async with kit(bootstrap) as k:
        made = await asyncio.gather(*(k.topics.create(name, principal=principal) for principal in principals))
        assert made == [True, False, False]


async def test_a_listener_that_fails_does_not_end_the_metadata_s_updates(readers, new_topic):
    topic = await new_topic(partitions=1)

    def fail(_):
        raise RuntimeError("a bug of the test's")

    readers.lookup.add_listener(fail)
    async with asyncio.timeout(20):
        await readers.lookup.refresh()
        readers.lookup.remove_listener(fail)
        assert topic in await readers.lookup.existing([topic])
        await readers.lookup.refresh()


async def test_a_deleted_topic_is_forgotten_though_kafka_could_not_say_so_at_first(
    bootstrap, new_topic, kit, admin, monkeypatch
):
    name = await new_topic()
    async with kit(bootstrap) as k:
        await k.topics.get(name)
        await admin.delete_topics([name])

        async def busy(names):
            return {one: Refused(Outcome.BUSY, "no leader") for one in names}

        with monkeypatch.context() as patched:
            patched.setattr(k.topics.queries, "search", busy)
            async with asyncio.timeout(60):
                while name in (await k.topics.queries.all_topics()).topics:
                    pass
            await k.topics.refresh()
            assert k.topics.known(name) is not None
        await k.topics.refresh()
        assert k.topics.known(name) is None
        assert name not in k.topics.names


def test_a_topic_that_was_deleted_and_made_again_is_warned_about_again(logged):
    safety = TopicSafety(required=True)
    for _ in range(2):
        for _ in range(2):
            assert safety.check(TopicInfo("t", 1)).outcome is Outcome.UNSAFE
        safety.forget("t")
    assert len(logged) == 2
