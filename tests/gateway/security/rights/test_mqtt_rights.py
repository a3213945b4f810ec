"""Rights of MQTT clients over MQTT topics: the same at SUBSCRIBE, PUBLISH and delivery, whatever the mapping."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.security.identity import Identity
from gateway.security.rights.authorization import AccessList, Grant
from gateway.security.rights.filters import matches
from gateway.settings.config import AccessRule
from mapping.rules import Rules, RuleText

ANN = Identity("ann", "password")
MAPPING = Rules((RuleText("f/{site}/#", "f-{site}"), RuleText("a/+/s", "b"), RuleText("l/{x}", "a", "{x}")))


def grant(*rules: dict[str, object], mapping: Rules | None = None, partial: bool = True) -> Grant:
    return AccessList([AccessRule.model_validate(rule) for rule in rules], mapping, partial=partial).for_client(ANN)


def test_rules_are_about_the_topics_that_clients_say() -> None:
    """Topics with a mapping rule and in the catch-all topic: their place in Kafka does not matter."""
    one = grant({"topic": "f/berlin/#"}, {"topic": "no kafka name/#"}, mapping=MAPPING)
    for text, place, key in (
        ("f/berlin/x", "f-berlin", b"f/berlin/x"),
        ("no kafka name/x", "mqtt", b"no kafka name/x"),
    ):
        assert MAPPING.destination(text) == (place, key)
        assert one.mqtt_subscribe.filter(text)
        assert one.mqtt_subscribe.filter(text.rpartition("/")[0] + "/#")
        assert one.mqtt_subscribe(text, place, key)
        assert one.mqtt_publish(text, place, key)
        assert not one.subscribe(place, key), "to AMQP and HTTP the name is Kafka's"
    assert not one.mqtt_subscribe.filter("f-berlin/#")


def test_a_rule_about_kafkas_names_holds_for_every_protocol() -> None:
    one = grant({"kafka": "f-berlin", "allow": False}, {"topic": "#"}, mapping=MAPPING)
    assert not one.subscribe("f-berlin", b"k")
    assert not one.mqtt_subscribe("f/berlin/x", "f-berlin", b"f/berlin/x")
    assert not one.mqtt_subscribe.filter("f/berlin/x")
    assert not one.mqtt_publish.of_topic("f/berlin/x")
    assert one.mqtt_subscribe.filter("f/+/x")
    assert one.mqtt_publish.of_topic("f/paris/x")


@pytest.mark.parametrize(
    ("wanted", "partly", "wholly"),
    [
        ("sensors/hall/#", True, True),
        ("sensors/#", True, False),
        ("#", True, False),
        ("sensors/kitchen/#", False, False),
        ("sensors/kitchen/temp", False, False),
        ("sensors/+/temp", True, False),
        ("other/#", False, False),
        ("other", False, False),
    ],
)
def test_what_is_denied_is_taken_out_of_a_wide_filter_or_refuses_it(wanted: str, partly: bool, wholly: bool) -> None:
    rules = {"topic": "sensors/kitchen/#", "allow": False}, {"topic": "sensors"}
    assert grant(*rules).mqtt_subscribe.filter(wanted) is partly
    assert grant(*rules, partial=False).mqtt_subscribe.filter(wanted) is wholly
    kafka = {"kafka": "sensors/kitchen/#", "allow": False}, {"kafka": "sensors"}
    assert grant(*kafka).mqtt_subscribe.filter(wanted) is partly
    assert grant(*kafka, partial=False).mqtt_subscribe.filter(wanted) is wholly


levels = st.sampled_from(("a", "b", "f", "l", "s", "", "$x", "a b"))
topics = st.lists(levels, min_size=1, max_size=4).map("/".join).filter(bool)
filters = (
    st.tuples(st.lists(levels | st.just("+"), max_size=3), st.booleans())
    .map(lambda one: "/".join([*one[0], "#"] if one[1] or not one[0] else one[0]))
    .filter(bool)
)
kafka_filters = st.sampled_from(
    ("#", "+/#", "+", "a", "b", "mqtt", "f-a", "f-b/+", "a/a/#", "a/+/s", "mqtt/+/a", "b/#")
)
access_rules = st.lists(
    st.builds(lambda topic, allow: {"topic": topic, "allow": allow}, filters, st.booleans())
    | st.builds(lambda kafka, allow: {"kafka": kafka, "allow": allow}, kafka_filters, st.booleans()),
    min_size=1,
    max_size=5,
)
mappings = st.sampled_from((None, MAPPING))


@given(access_rules, mappings, filters | topics, st.lists(topics, max_size=8))
@example([{"kafka": "b", "allow": True}], MAPPING, "a/+/s", ["a/b/s"])
@example([{"topic": "a/#", "allow": False}, {"topic": "#", "allow": True}], None, "#", ["a", "b", "a/b"])
def test_subscribe_and_delivery_never_disagree(
    rules: list[dict[str, object]], mapping: Rules | None, wanted: str, names: list[str]
) -> None:
    """A refused filter matches no deliverable message; a fully granted one matches no denied message."""
    partly = grant(*rules, mapping=mapping).mqtt_subscribe
    wholly = grant(*rules, mapping=mapping, partial=False).mqtt_subscribe
    places = mapping if mapping is not None else Rules()
    text = wanted.split("/")
    for name in [*names, *([] if {"+", "#"} & set(text) else [wanted])]:
        if not matches(text, name.split("/")):
            continue
        topic, key = places.destination(name)
        delivered = partly(name, topic, key)
        assert delivered == partly(name, topic, key) == wholly(name, topic, key) == partly.of_topic(name)
        if not partly.filter(wanted):
            assert not delivered
        if wholly.filter(wanted):
            assert delivered
        if name == wanted:
            assert partly.filter(wanted) == wholly.filter(wanted) == delivered


def test_memory_is_bounded() -> None:
    one = grant({"kafka": "a/#"}).mqtt_publish
    for number in range(5000):
        assert one(f"a/{number}", "a", b"%d" % number)
    assert one("a/" + "x" * 1000, "a", b"x" * 1000)
    assert len(one._known) <= 1024
    assert all(len(text) < 1000 for text, _, _ in one._known)


def test_rules_that_seem_to_mean_kafkas_names_are_told() -> None:
    rules = [AccessRule(topic=topic) for topic in ("f-berlin/#", "mqtt/#", "sensors", "#", "f/berlin/#")]
    doubtful = AccessList([*rules, AccessRule(kafka="f-berlin")], MAPPING).doubtful()
    assert ["f-berlin" in doubtful[0], "mqtt/#" in doubtful[1], len(doubtful)] == [True, True, 2]
