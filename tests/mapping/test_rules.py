"""Mapping rules: first match wins, checked at the start, and the way back needs no header under the default."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapping import rules as rules_module
from mapping.record import MQTT_TOPIC, is_topic_name
from mapping.rules import Destination, RuleError, Rules, RuleText

FACTORY = RuleText("factory/{site}/{machine}/#", "factory-{site}", "{machine}")

levels = st.text(st.characters(codec="utf-8", exclude_characters="/+#\0", exclude_categories=["Cs"]), max_size=8)
mqtt_topics = st.lists(levels, min_size=1, max_size=5).map("/".join).filter(bool)


@pytest.mark.parametrize(
    ("topic", "kafka", "key"),
    [
        ("sensors/kitchen/temp", "sensors", b"kitchen/temp"),
        ("temperature", "temperature", None),
        ("sensors/", "sensors", b""),
        ("/a", "mqtt", b"/a"),
        ("$weather/a", "mqtt", b"$weather/a"),
        ("my topic/a", "mqtt", b"my topic/a"),
        ("__consumer_offsets/a", "mqtt", b"__consumer_offsets/a"),
        ("mqtt/a", "mqtt", b"mqtt/a"),
        ("é/a", "mqtt", "é/a".encode()),
    ],
)
def test_the_default_takes_the_first_level_as_topic_and_the_rest_as_key(
    topic: str, kafka: str, key: bytes | None
) -> None:
    rules = Rules()
    assert rules.destination(topic) == Destination(kafka, key)
    assert rules.mqtt_topic(kafka, key) == topic


@given(mqtt_topics)
def test_every_mqtt_topic_comes_back_from_its_default_destination(topic: str) -> None:
    rules = Rules()
    kafka, key = rules.destination(topic)
    assert is_topic_name(kafka)
    assert rules.mqtt_topic(kafka, key) == topic


@given(mqtt_topics)
def test_every_topic_has_a_legal_destination_under_rules(topic: str) -> None:
    rules = Rules([FACTORY, RuleText("{a}/+/b", "x.{a}")])
    assert is_topic_name(rules.destination(topic).topic)


names = st.text("ab._-", min_size=1, max_size=6)


@given(st.lists(names, min_size=2, max_size=12), st.sampled_from(["", "a.{x}", "{x}.{y}", "{x}_a.{x}", "b"]))
def test_no_two_kafka_topics_of_mqtt_collide(first_levels: list[str], template: str) -> None:
    """Kafka treats names that differ only in dots and underscores as one (its metrics' names do)."""
    mapped = [RuleText("{x}/{y}/rule", template)] if template else []
    rules = Rules(mapped, dotted=["a.b", "b_b.a"])
    kafka = {rules.destination(f"{one}/{other}/rule").topic for one in first_levels for other in first_levels}
    kafka |= {rules.destination(f"{one}/x").topic for one in first_levels}
    assert len({name.replace(".", "_") for name in kafka}) == len(kafka)
    assert all(is_topic_name(name) for name in kafka)


def test_of_colliding_names_one_is_chosen_and_both_are_read() -> None:
    rules = Rules(dotted=["orders.v1"])
    assert rules.destination("a_b/x") == Destination("a_b", b"x")
    assert rules.destination("a.b/x") == Destination("mqtt", b"a.b/x")
    assert rules.destination("orders.v1/x") == Destination("orders.v1", b"x")
    assert rules.destination("orders_v1/x") == Destination("mqtt", b"orders_v1/x")
    known = ["a.b", "a_b", "orders.v1", "mqtt"]
    assert rules.kafka_topics("a.b/#", known) == {"a.b", "mqtt"}
    assert rules.kafka_topics("a_b/#", known) == {"a_b"}
    assert rules.kafka_topics("orders.v1/#", known) == {"orders.v1", "mqtt"}
    assert rules.literal_topics("a.b/x") == ("mqtt", "a.b")
    assert rules.literal_topics("orders.v1/x") == rules.literal_topics("orders.v1/#") == ("orders.v1", "mqtt")
    assert rules.mqtt_topic("a.b", b"x") == rules.mqtt_topic("mqtt", b"a.b/x") == "a.b/x"


@pytest.mark.parametrize("dotted", [None, ("*",)])
def test_by_default_every_legal_name_is_its_own(dotted: tuple[str, ...] | None) -> None:
    """Where the gateway creates topics as well as where it does not: its answer is Kafka's for the second of two."""
    rules = Rules(dotted=dotted)
    for name in ("a.b", "a_b", "orders.new", "a..b", ".a", "a."):
        assert rules.destination(f"{name}/x") == Destination(name, b"x")
        assert rules.may_create(name)


def test_patterns_say_which_names_may_be_topics() -> None:
    rules = Rules([RuleText("r/{x}", "r.{x}", "k")], dotted=["orders.*", "*.audit", "plant.v1"])
    for name in ("orders.new", "orders.", "orders.new.eu_1", "a.b.audit", "plant.v1", "orders_new", "r.x"):
        assert rules.may_create(name), name
    for name in ("order.new", "audit.x", "plant.v2", "plant_v1", "r_x", "orders./", ".."):
        assert not rules.may_create(name), name
    assert rules.destination("orders.new/x") == Destination("orders.new", b"x")
    assert rules.destination("plant.v2/x") == Destination("mqtt", b"plant.v2/x")


CONFIGURED = st.lists(st.sampled_from(["*", "a.*", "*.b", "a.b", "b_b.a", "a*"]), unique=True)
DOTTED = st.text("ab._-/ ", min_size=1, max_size=8).filter(lambda text: "." in text.split("/")[0])


@given(st.one_of(st.none(), CONFIGURED), CONFIGURED, DOTTED)
def test_a_change_of_the_dotted_names_hides_no_message(before: list[str] | None, after: list[str], topic: str) -> None:
    """A name with a dot is read where it was stored, whatever was configured then, and comes back from both places."""
    old, new = Rules(dotted=before), Rules(dotted=after)
    whole = f"{topic.split('/', maxsplit=1)[0]}/#"
    stored = old.destination(topic)
    assert is_topic_name(stored.topic)
    assert new.mqtt_topic(*new.destination(topic)) == new.mqtt_topic(*stored) == topic
    for topic_filter in (topic, whole, "#"):
        assert stored.topic in new.kafka_topics(topic_filter, [stored.topic, "unrelated"])
    for topic_filter in (topic, whole):
        assert new.literal_topics(topic_filter)[0] == new.destination(topic).topic
        assert stored.topic in new.literal_topics(topic_filter)


@given(CONFIGURED, CONFIGURED, st.text("ab./-", min_size=1, max_size=6), st.sampled_from(["a.{x}", "{x}", "{y}-{x}"]))
def test_a_change_of_the_dotted_names_hides_no_message_of_a_rule(
    before: list[str], after: list[str], levels: str, template: str
) -> None:
    """Whether its placeholders may put dots into the name decides whether a rule matches."""
    topic = f"{levels}/rule"
    old, new = (Rules([RuleText("{x}/{y}/rule", template)], dotted=names) for names in (before, after))
    stored = old.destination(topic)
    for topic_filter in (topic, "#", f"{topic.split('/', maxsplit=1)[0]}/#"):
        assert stored.topic in new.kafka_topics(topic_filter, [stored.topic, "unrelated"])


@pytest.mark.parametrize(
    ("rules", "topic_filter", "place"),
    [
        (Rules(dotted=["*"]), "a.b/#", ["a.b", "#"]),
        (Rules(dotted=["a.b"]), "a.b/#", ["a.b", "#"]),
        (Rules(dotted=[]), "a.b/#", None),
        (Rules(dotted=["*"]), "a b/#", ["mqtt", "a b", "#"]),
    ],
)
def test_rules_of_the_access_list_judge_a_filter_by_where_mqtt_publishes(
    rules: Rules, topic_filter: str, place: list[str] | None
) -> None:
    assert rules.kafka_filter(topic_filter) == place


@pytest.mark.parametrize(
    ("dotted", "why"),
    [
        (["a.b", "a_b"], "collide"),
        (["m.q", "mqtt"], None),
        (["m.*"], None),
        (["*"], None),
        (["no/name"], "legal"),
        (["no/*"], "legal"),
        (["__x.*"], "legal"),
        ([""], "legal"),
    ],
)
def test_dotted_topics_must_be_names_that_do_not_collide(dotted: list[str], why: str | None) -> None:
    if why is None:
        assert Rules(dotted=dotted).destination("m.q/x").topic == "m.q"
        return
    with pytest.raises(RuleError, match=rf"mapping\.dotted_topics.*{why}"):
        Rules(dotted=dotted)


@pytest.mark.parametrize("size", [65_001, 65_535])
def test_the_longest_topic_name_comes_back(size: int) -> None:
    """[MQTT-4.7.3-3]: 65,535 bytes, by the header, by the key, and in the catch-all topic."""
    topic = "t/" + "x" * (size - 2)
    rules = Rules()
    assert rules.mqtt_topic("t", b"?", ((MQTT_TOPIC, topic.encode()),)) == topic
    assert rules.mqtt_topic(*rules.destination(topic)) == topic
    assert rules.mqtt_topic("mqtt", topic.encode()) == topic
    assert rules.mqtt_topic("t", b"x" * 65_534) is None


def test_the_first_matching_rule_decides() -> None:
    rules = Rules([FACTORY, RuleText("factory/#", "rest")])
    assert rules.destination("factory/berlin/press/temp/1") == Destination("factory-berlin", b"press")
    assert rules.destination("factory/berlin") == Destination("rest", b"factory/berlin")
    assert rules.destination("other/x") == Destination("other", b"x")


def test_a_rule_whose_result_would_be_illegal_for_this_topic_does_not_match() -> None:
    assert Rules([FACTORY]).destination("factory/a b/press/x") == Destination("factory", b"a b/press/x")


def test_the_exact_topic_travels_in_a_header_and_wins_on_the_way_back() -> None:
    rules = Rules([FACTORY])
    headers = ((MQTT_TOPIC, b"factory/berlin/press/temp/1"),)
    assert rules.mqtt_topic("factory-berlin", b"press", headers) == "factory/berlin/press/temp/1"
    assert rules.mqtt_topic("factory-berlin", b"press") == "factory/berlin/press"


@pytest.mark.parametrize("key", [b"\xff", b"a/#", b"a+", b"a\0"])
def test_a_key_that_can_be_no_topic_has_none(key: bytes) -> None:
    assert Rules().mqtt_topic("sensors", key) is None


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (RuleText("a/{x}", "t-{y}"), "not a level"),
        (RuleText("a/{x}/{x}", "t"), "twice"),
        (RuleText("a/#/b", "t"), "neither"),
        (RuleText("a/b+", "t"), "neither"),
        (RuleText("a/{b", "t"), "neither"),
        (RuleText("a", "no/slash"), "legal Kafka"),
        (RuleText("a", "__internal"), "legal Kafka"),
        (RuleText("a", "t{"), "brace"),
        (RuleText("#", "t"), "catch_all"),
    ],
)
def test_a_bad_rule_is_refused_with_its_number(rule: RuleText, why: str) -> None:
    with pytest.raises(RuleError, match=rf"mapping\.rules\[2\].*{why}"):
        Rules([FACTORY, rule])


def matches(mqtt_filter: str, topic: str) -> bool:
    want, have = mqtt_filter.split("/"), topic.split("/")
    for index, level in enumerate(want):
        if level == "#":
            return True
        if index >= len(have) or (level not in ("+", have[index])):
            return False
    return len(want) == len(have)


filters = st.lists(st.sampled_from(["sensors", "factory", "berlin", "a b", "+", "", "x"]), min_size=1, max_size=4).map(
    "/".join
)


@given(filters, st.booleans(), st.lists(st.sampled_from(["sensors", "factory", "berlin", "a b", "", "x"]), min_size=1))
def test_the_kafka_topics_of_a_filter_cover_every_topic_it_matches(stem: str, multi: bool, parts: list[str]) -> None:
    rules = Rules([FACTORY, RuleText("{a}/x", "ax-{a}")])
    mqtt_filter = f"{stem}/#" if multi else stem
    topic = "/".join(parts)
    if topic and matches(mqtt_filter, topic):
        kafka = rules.destination(topic).topic
        assert kafka in rules.kafka_topics(mqtt_filter, [kafka, "unrelated"])


def test_a_literal_first_level_watches_one_topic_only() -> None:
    known = ["sensors", "maximum", "mqtt"]
    assert Rules().kafka_topics("sensors/+/temp", known) == {"sensors"}
    assert Rules().kafka_topics("#", known) == set(known)
    assert Rules().kafka_topics("a b/c", known) == {"mqtt"}
    assert Rules().literal_topics("later/#") == ("later",)
    assert Rules().literal_topics("+/a") == ()


def test_what_is_remembered_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_module, "_CACHE_LIMIT", 1024 * 1024)
    rules = Rules()
    for number in range(100):
        topic = f"t{number}/" + "x" * 60_000
        assert rules.destination(topic) == rules.destination(topic) == Destination(f"t{number}", b"x" * 60_000)
        assert sum(map(len, rules._forward)) <= 1024 * 1024
    assert rules._forward
