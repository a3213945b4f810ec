"""The access list: first match, deny once a list exists, whole subscriptions only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.security.identity import ANONYMOUS, Identity
from gateway.security.rights.authorization import AccessList
from gateway.security.rights.filters import matches
from gateway.security.rights.permissions import CACHED_DECISIONS, name_of
from gateway.settings.config import AccessRule, ConfigError

ANN = Identity("ann", "password")
BOB = Identity("bob", "certificate")


def rules(*lines: str) -> AccessList:
    """Parse rules such as `allow ann publish sensors/#`."""
    parsed = []
    for line in lines:
        verdict, principal, action, topic = line.split()
        fields = {"principal": principal, "action": action, "topic": topic, "allow": verdict == "allow"}
        parsed.append(AccessRule.model_validate(fields))
    return AccessList(parsed)


def test_no_list_allows_everything() -> None:
    access = AccessList()
    assert access.for_client(ANONYMOUS).publish("sensors", b"x")
    assert access.for_client(ANN).admin("sensors")
    assert access.for_client(ANONYMOUS).mqtt_subscribe.filter("#")
    assert access.for_client(ANN).publish.some("anything")


def test_a_list_denies_what_no_rule_allows() -> None:
    access = rules("allow ann publish sensors")
    assert access.for_client(ANN).publish("sensors", "kitchen/temp")
    assert not access.for_client(ANN).publish("other", "kitchen/temp")
    assert not access.for_client(ANN).subscribe("sensors", "kitchen/temp")
    assert not access.for_client(BOB).publish("sensors")


def test_the_first_match_decides() -> None:
    access = rules("deny ann publish sensors/kitchen/#", "allow * publish sensors", "deny * * #")
    assert not access.for_client(ANN).publish("sensors", "kitchen/temp")
    assert not access.for_client(ANN).publish("sensors", b"kitchen/temp")
    assert access.for_client(ANN).publish("sensors", "hall/temp")
    assert access.for_client(ANN).publish("sensors")
    assert access.for_client(BOB).publish("sensors", "kitchen/temp")


def test_a_plain_topic_stands_for_all_its_keys() -> None:
    access = rules("allow * * sensors")
    for key in (None, "", "a", "a/b", b"\xff\x00"):
        assert access.for_client(ANN).publish("sensors", key)
    assert not access.for_client(ANN).publish("sensors2", "a")


def test_anonymous_is_a_principal_of_its_own() -> None:
    access = rules("allow anonymous subscribe public", "deny anonymous * #", "allow * * #")
    assert access.for_client(ANONYMOUS).subscribe("public", "x")
    assert not access.for_client(ANONYMOUS).publish("public", "x")
    assert access.for_client(ANN).publish("public", "x")


def test_a_proven_name_is_not_the_anonymous_principal() -> None:
    access = rules("allow anonymous * #")
    assert not access.for_client(Identity("anonymous", "certificate")).publish("sensors")


def test_sending_to_a_topic_whose_keys_come_later() -> None:
    access = rules("deny * publish sensors/kitchen", "allow ann publish sensors/+", "deny * publish sensors")
    grant = access.for_client(ANN)
    assert grant.publish.some("sensors")
    assert grant.publish.uniform("sensors") is None
    assert not access.for_client(BOB).publish.some("sensors")
    assert access.for_client(BOB).publish.uniform("sensors") is False


@pytest.mark.parametrize(
    ("wanted", "granted"),
    [
        ("sensors/hall/#", True),
        ("sensors/hall/+", True),
        ("sensors/kitchen/temp", False),
        ("sensors/+/temp", False),  # overlaps the deny rule
        ("sensors/#", False),
        ("#", False),
        ("+/hall/temp", False),  # more than the allow rule covers
        ("sensors/#/hall", False),
    ],
)
def test_whole_topics_are_granted_as_a_whole(wanted: str, granted: bool) -> None:
    access = rules("deny * subscribe sensors/kitchen/#", "allow ann subscribe sensors")
    assert access.for_client(ANN).subscribe.whole(wanted) is granted


def test_a_deny_rule_after_the_covering_one_changes_nothing() -> None:
    access = rules("allow ann subscribe sensors", "deny * subscribe #")
    assert access.for_client(ANN).subscribe.whole_topic("sensors")
    assert not access.for_client(BOB).subscribe.whole_topic("sensors")


@pytest.mark.parametrize("topic", ["a/#/b", "", "a+", "a\0"])
def test_bad_rules_stop_the_start(topic: str) -> None:
    for key in ("topic", "kafka"):
        with pytest.raises(ConfigError, match=rf"^security\.access\[2\]\.{key}: "):
            AccessList([AccessRule(), AccessRule.model_validate({key: topic})])


@pytest.mark.parametrize("kafka", ["$SYS/#", "no kafka name"])
def test_a_rule_about_what_kafka_cannot_have_stops_the_start(kafka: str) -> None:
    with pytest.raises(ConfigError, match=r"^security\.access\[1\]\.kafka: "):
        AccessList([AccessRule(kafka=kafka)])
    AccessList([AccessRule(topic=kafka)])  # MQTT has such topics


def test_a_rule_is_about_one_kind_of_names() -> None:
    with pytest.raises(ConfigError, match=r"^security\.access\[1\]: "):
        AccessList([AccessRule(kafka="a", topic="b")])


def test_an_empty_principal_stops_the_start() -> None:
    with pytest.raises(ConfigError, match=r"^security\.access\[1\]\.principal"):
        AccessList([AccessRule(principal="")])


topics = st.sampled_from(("a", "b"))
keys = st.none() | st.lists(st.sampled_from(("a", "b", "")), min_size=1, max_size=3).map("/".join)
patterns = st.sampled_from(("#", "+", "+/#", "a", "b", "a/+", "a/b/#", "+/a", "+/+/b", "a/a/+", "b/a"))
compiled = st.lists(st.builds(AccessRule, topic=patterns, allow=st.booleans()), min_size=1, max_size=6)


@given(compiled, st.lists(st.tuples(topics, keys), min_size=1, max_size=8))
def test_memory_changes_no_decision(given_rules: list[AccessRule], records: list[tuple[str, str | None]]) -> None:
    grant = AccessList(given_rules).for_client(ANN)
    for topic, key in [*records, *records]:
        name = name_of(topic, key)
        first = next((rule.allow for rule in given_rules if matches(full(rule.topic), name)), False)
        assert grant.publish(topic, key) is first
        if first:
            assert grant.publish.some(topic)


@given(compiled, patterns, topics, keys)
def test_a_granted_filter_holds_no_denied_name(
    given_rules: list[AccessRule], wanted: str, topic: str, key: str | None
) -> None:
    grant = AccessList(given_rules).for_client(ANN)
    if grant.subscribe.whole(wanted) and matches(wanted.split("/"), name_of(topic, key)):
        assert grant.subscribe(topic, key)


def full(pattern: str) -> list[str]:
    return [pattern, "#"] if pattern in ("a", "b") else pattern.split("/")


def test_memory_is_bounded() -> None:
    grant = rules("allow * publish sensors/a/#").for_client(ANN)
    for number in range(3 * CACHED_DECISIONS):
        assert not grant.publish("sensors", f"{number}")
        assert grant.publish("sensors", f"a/{number}" + "x" * 1000)
        assert not grant.publish(f"topic-{number}", "a")
    assert len(grant.publish._by_key) <= CACHED_DECISIONS
    assert len(grant.publish._topics) <= CACHED_DECISIONS
    assert all(len(key or "") < 1000 for _, key in grant.publish._by_key)


@pytest.mark.parametrize("rest", ["#", "a/#"])
def test_a_long_first_level_is_not_kept(rest: str) -> None:
    """An MQTT topic may have 65,535 bytes, all of them in its first level."""
    permission = rules(f"allow * publish +/{rest}").for_client(ANN).mqtt_publish
    for number in range(3):
        topic = f"{number}" + "x" * 60_000
        assert permission(f"{topic}/a/b", "mqtt", b"key")
    by_text = permission._by_text
    assert by_text is not None
    assert not by_text._topics
    assert not by_text._by_key
