"""No address of one tenant, in any protocol's form, resolves to a topic or a group of another."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.security.identity import Identity
from gateway.security.rights.authorization import AccessList, Grant
from gateway.settings.config import AccessRule
from mapping.amqp.addresses import AddressError, parse_source, parse_target
from mapping.record import MQTT_TOPIC, is_topic_name
from mapping.rules import RuleError, Rules, RuleText
from mapping.tenant_rules import TenantRules
from mapping.tenants import MOUNT, OUTSIDE, Names, Tenancy, is_tenant, tenant_of
from protocols.mqtt.topics import SubscriptionTrie, is_valid_filter, is_valid_name, parse_share

TENANCY: Final = Tenancy(True)
RULES: Final = [RuleText("factory/{site}/#", "{site}"), RuleText("{a}/{b}/dot", "x.{a}", "{b}")]

# Two tenants whose names start with the same letters, and names with which a client could try to cross over.
tenants = st.sampled_from(["a", "b", "a-b", "aa", "A", "-", "sensors", "mqtt"])
pieces = st.sampled_from(
    ["a", "b", "aa", ".", "/", "-", "_", "a.b", "b.", MOUNT, "$tenants/b/", "$share/g/", "$share/", "$SYS/", "..", "__",
     "%2e", "%2F", "+", "#", "mqtt", "factory", "dot", "topic://", "queue://", "/queues/", "::", "/group.id/",
     "/partitions/0", "/ConsumerGroups/b.g/Partitions/0", "é", "\0", " "]
)  # fmt: skip
whole = st.sampled_from(
    ["b.x", "b.x/y", "$tenants/b/x", "$tenants/b/#", "$tenants/+/#", "$share/b.g/b.x/#", "$share/g/$tenants/b/#", "#",
     "+/#", "mqtt/$tenants/b/x", "../b.x", "x", "factory/b.x/y", "b/c/dot", "b.x/c/dot"]
)  # fmt: skip
texts = st.one_of(whole, st.lists(pieces, min_size=1, max_size=6).map("".join), st.text(max_size=12))
rules = st.sampled_from(
    [TenantRules(), TenantRules(RULES), TenantRules(RULES, dotted=()), TenantRules(catch_all="a-b")]
)
owners = st.one_of(tenants.map(TENANCY.names), st.just(OUTSIDE))


def grant(names: Names, *access: AccessRule) -> Grant:
    return AccessList(access, TenantRules(), tenancy=TENANCY).for_client(Identity("n", "token", tenant=names.tenant))


@settings(max_examples=400)
@given(owners, owners, texts, texts)
def test_two_tenants_have_no_topic_and_no_group_in_common(one: Names, other: Names, mine: str, theirs: str) -> None:
    # Rights keep clients without a tenant from tenants' topics: their names are whole ones.
    whole = one.topic(mine)
    if one.has(whole) and one != other:
        assert not other.has(whole)
        assert one.group(mine) != other.group(theirs) or not other.has(other.group(theirs))
    if one.tenant and other.tenant and one != other:
        folded = one.topic(mine).replace(".", "_"), other.topic(theirs).replace(".", "_")
        assert folded[0] != folded[1], "Kafka takes such names for one"


@settings(max_examples=400)
@given(owners, owners, texts, rules)
def test_an_mqtt_topic_leads_to_the_tenants_own(one: Names, other: Names, text: str, mapping: TenantRules) -> None:
    whole = one.mqtt(text)
    if not is_valid_name(text) or not one.has_mqtt(whole):
        return
    found = mapping.destination(whole).topic
    assert is_topic_name(found)
    assert one.has(found)
    assert one == other or not other.has(found)


@settings(max_examples=400)
@given(owners, owners, texts, st.binary(max_size=6) | texts.map(str.encode), texts, rules)
def test_records_are_delivered_only_to_the_topics_tenant(  # noqa: PLR0917 - what is in a record
    one: Names, other: Names, text: str, key: bytes, said: str, mapping: TenantRules
) -> None:
    """Any client may have written a record's key and headers, perhaps directly into Kafka."""
    topic = one.topic(text)
    if not is_topic_name(topic) or not one.has(topic):
        return
    for headers in ((), ((MQTT_TOPIC, said.encode("utf-8", "replace")),)):
        found = mapping.mqtt_topic(topic, key, headers)
        assert found is None or one.has_mqtt(found)
        assert found is None or one == other or not other.has_mqtt(found)


@settings(max_examples=400)
@given(owners, owners, texts, texts, st.lists(texts, max_size=3), rules)
def test_a_filter_matches_nothing_of_another_tenant(  # noqa: PLR0917 - two clients, and what there is
    one: Names, other: Names, text: str, published: str, there: list[str], mapping: TenantRules
) -> None:
    if one == other or not is_valid_filter(text):
        return
    whole = one.filter(text)
    shared = parse_share(whole)
    if shared is not None:
        assert one.tenant is None or one.has(shared.group)
        assert not (one.has(shared.group) and other.has(shared.group))
        whole = shared.topic_filter
    allowed = grant(one).mqtt_subscribe.filter(whole)
    if not allowed:
        return
    known = {other.topic(name) for name in there if is_topic_name(other.topic(name)) and other.has(other.topic(name))}
    assert not mapping.kafka_topics(whole, known)
    assert not [topic for topic in mapping.literal_topics(whole) if other.has(topic)]
    trie: SubscriptionTrie[str, None] = SubscriptionTrie()
    trie.add(whole, "me", None)
    if is_valid_name(published) and other.has_mqtt(other.mqtt(published)):
        assert not trie.match(other.mqtt(published))


@settings(max_examples=400)
@given(owners, owners, texts)
def test_an_amqp_address_leads_to_the_tenants_own(one: Names, other: Names, text: str) -> None:
    for parse in (parse_target, parse_source):
        try:
            parsed = parse(text)
        except AddressError:
            continue
        whole = one.topic(parsed.topic)
        assert one == other or not (one.has(whole) and other.has(whole))
        group = getattr(parsed, "group", None)
        if group is not None:
            assert one == other or not (one.has(one.group(group)) and other.has(one.group(group)))


@settings(max_examples=400)
@given(owners, owners, texts, st.sampled_from(["#", "+/#", "a", "{tenant}"]), st.booleans())
def test_no_rule_gives_a_right_on_another_tenants_names(
    one: Names, other: Names, text: str, rule: str, in_kafka: bool
) -> None:
    """The second line of defence: the client's rights would refuse an address that was not translated."""
    access = [AccessRule(kafka=rule) if in_kafka else AccessRule(topic=rule), AccessRule(group="*")]
    whole = other.topic(text)
    if one == other or not other.has(whole):
        return
    for rights in (grant(one), grant(one, *access)):
        for right in (rights.publish, rights.subscribe, rights.admin):
            assert not right(whole, b"key")
            assert right.uniform(whole) is False
            assert not right.some(whole)
            assert not right.whole_topic(whole)
        assert rights.group("read", whole) is False
        assert not rights.visible_topics([whole])
        assert not rights.may_administer("delete", whole)
        assert not rights.mqtt_publish.of_topic(other.mqtt(text)) or one.has_mqtt(other.mqtt(text))


def test_a_topic_of_a_rule_is_the_clients_own_name_and_a_kafka_is_a_whole_one() -> None:
    of_a = grant(TENANCY.names("a"), AccessRule(action="publish", topic="sensors/{tenant}/#"))
    assert of_a.publish("a.sensors", b"a/x")
    assert not of_a.publish("a.sensors", b"b/x")
    assert of_a.mqtt_publish.of_topic("$tenants/a/sensors/a/x")
    assert not of_a.mqtt_publish.of_topic("$tenants/b/sensors/a/x")
    whole = grant(TENANCY.names("a"), AccessRule(action="publish", kafka="a.sensors/#"))
    assert whole.publish("a.sensors", b"x")
    assert whole.mqtt_publish.of_topic("$tenants/a/sensors/x")
    assert not whole.publish("a.others", b"x")


@pytest.mark.parametrize(
    ("name", "good"),
    [("acme", True), ("Acme-2", True), ("a.b", False), ("a_b", False), ("", False), ("a/b", False), ("é", False),
     ("x" * 64, True), ("x" * 65, False)],
)  # fmt: skip
def test_a_tenants_name_has_no_separator(name: str, good: bool) -> None:
    assert is_tenant(name) is good
    assert (tenant_of(f"{name}.sensors") == name) is good


def test_no_key_or_header_leads_into_a_tenant() -> None:
    """For a record from a client without a tenant in the catch-all topic, or from a Kafka client anywhere."""
    spoof = b"$tenants/b/x"
    assert TenantRules().mqtt_topic("mqtt", spoof) is None
    assert TenantRules().mqtt_topic("x", b"y", ((MQTT_TOPIC, spoof),)) is None
    assert TenantRules().mqtt_topic("a.x", b"y", ((MQTT_TOPIC, b"b.x"),)) == "$tenants/a/b.x"
    assert TenantRules().mqtt_topic("a.x", b"y", ((MQTT_TOPIC, spoof),)) is None, "a name with $ is no tenant's"


def test_a_text_names_things_as_the_client_does() -> None:
    text = TENANCY.names("a").text
    assert text("Topic a.b.c not found; a.b.c-0 of a.group, not of aa.b or x-a.b") == (
        "Topic b.c not found; b.c-0 of group, not of aa.b or x-a.b"
    )
    assert OUTSIDE.text("a.b") == "a.b"


def test_a_catch_all_topic_of_a_tenants_is_refused() -> None:
    with pytest.raises(RuleError, match="tenant 'a'"):
        TenantRules(catch_all="a.rest")


def test_tenants_rules_override_every_method() -> None:
    """A method added to `Rules` must be overridden for tenants, whose names are whole ones."""
    same = {"destination", "is_target", "fixed_topics"}  # by `_find`, in own names, by `literal_topics`
    assert {name for name in vars(Rules) if not name.startswith("_")} <= vars(TenantRules).keys() | same
