"""Topic names, filters, shared subscriptions, and the trie, compared with a trivial matcher."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from protocols.mqtt.topics import Shared, SubscriptionTrie, is_valid_filter, is_valid_name, parse_share


def naive(topic_filter: str, topic: str) -> bool:
    """Section 4.7 word by word."""
    if topic[:1] == "$" and topic_filter[:1] in ("+", "#"):
        return False
    if topic_filter == "#":
        return True
    wanted, given_levels = topic_filter.split("/"), topic.split("/")
    if wanted[-1] == "#":
        wanted = wanted[:-1]
        given_levels = given_levels[: len(wanted)]
    if len(wanted) != len(given_levels):
        return False
    return all(one in ("+", other) for one, other in zip(wanted, given_levels, strict=True))


# The standard's own examples (sections 4.7.1.2, 4.7.1.3, 4.7.2).
EXAMPLES = [
    ("sport/tennis/player1/#", "sport/tennis/player1", True),
    ("sport/tennis/player1/#", "sport/tennis/player1/ranking", True),
    ("sport/tennis/player1/#", "sport/tennis/player1/score/wimbledon", True),
    ("sport/#", "sport", True),
    ("sport/tennis/+", "sport/tennis/player1", True),
    ("sport/tennis/+", "sport/tennis/player1/ranking", False),
    ("sport/+", "sport", False),
    ("sport/+", "sport/", True),
    ("+/+", "/finance", True),
    ("/+", "/finance", True),
    ("+", "/finance", False),
    ("#", "$SYS/monitor", False),
    ("+/monitor/Clients", "$SYS/monitor/Clients", False),
    ("$SYS/#", "$SYS/monitor", True),
    ("$SYS/monitor/+", "$SYS/monitor/Clients", True),
    ("ACCOUNTS", "Accounts", False),
    ("a//b", "a//b", True),
    ("a/+/b", "a//b", True),
]


@pytest.mark.clause("MQTT-4.7.2-1", "MQTT311-4.7.2-1")
@pytest.mark.clause("MQTT-4.7.3-4", "MQTT311-4.7.3-4")
@pytest.mark.parametrize(("topic_filter", "topic", "matches"), EXAMPLES)
def test_examples_of_the_standard(topic_filter: str, topic: str, matches: bool) -> None:
    assert naive(topic_filter, topic) is matches
    trie: SubscriptionTrie[str, int] = SubscriptionTrie()
    trie.add(topic_filter, "me", 1)
    assert trie.match(topic) == ([("me", 1)] if matches else [])


@pytest.mark.clause("MQTT-4.7.1-1")
@pytest.mark.clause("MQTT-4.7.1-2")
@pytest.mark.parametrize(
    ("topic_filter", "valid"),
    [
        ("#", True), ("+", True), ("+/#", True), ("a/+/b", True), ("/", True), ("//", True), ("a b", True),
        ("", False), ("a#", False), ("a/#/b", False), ("#/", False), ("+a", False), ("a/b+", False), ("a\0", False),
        ("x" * 65_535, True), ("x" * 65_536, False), ("\u00e9" * 32_768, False),
    ],
)  # fmt: skip
def test_filters(topic_filter: str, valid: bool) -> None:
    assert is_valid_filter(topic_filter) is valid


@pytest.mark.clause("MQTT-3.3.2-2")
@pytest.mark.clause("MQTT-4.7.3-1")
@pytest.mark.clause("MQTT-4.7.3-3")
@pytest.mark.parametrize(
    ("topic", "valid"),
    [
        ("a", True),
        ("/", True),
        ("$SYS/x", True),
        ("", False),
        ("a/#", False),
        ("+", False),
        ("\0", False),
        ("x" * 65_536, False),
    ],
)
def test_names(topic: str, valid: bool) -> None:
    assert is_valid_name(topic) is valid


@pytest.mark.clause("MQTT-4.8.2-1")
@pytest.mark.clause("MQTT-4.8.2-2")
@pytest.mark.parametrize(
    ("topic_filter", "parts"),
    [
        ("$share/g/a", Shared("g", "a")),
        ("$share/g/a/+/#", Shared("g", "a/+/#")),
        ("$share/g//a", Shared("g", "/a")),
        ("$share/g/", None),
        ("$share/g", None),
        ("$share//a", None),
        ("$share/+/a", None),
        ("$share/g#/a", None),
        ("$share/g/a#", None),
        ("share/g/a", None),
    ],
)
def test_shared(topic_filter: str, parts: Shared | None) -> None:
    assert parse_share(topic_filter) == parts
    if topic_filter.startswith("$share/"):
        assert is_valid_filter(topic_filter) is (parts is not None)
        assert is_valid_filter(topic_filter, shared=False) is ("a#" not in topic_filter and "g#" not in topic_filter)


LEVELS = st.sampled_from(["", "a", "b", "$a"])
TOPICS = st.lists(LEVELS, min_size=1, max_size=4).map("/".join).filter(bool)
FILTERS = st.builds(
    lambda levels, end: "/".join(levels + end) or "+",
    st.lists(st.sampled_from(["", "a", "b", "$a", "+"]), max_size=4),
    st.sampled_from([[], ["#"]]),
)


class TrieAgainstNaive(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.trie: SubscriptionTrie[int, int] = SubscriptionTrie()
        self.model: dict[tuple[str, int], int] = {}

    @rule(topic_filter=FILTERS, who=st.integers(0, 2), what=st.integers(0, 9))
    def add(self, topic_filter: str, who: int, what: int) -> None:
        assert self.trie.add(topic_filter, who, what) is ((topic_filter, who) not in self.model)
        self.model[topic_filter, who] = what

    @rule(topic_filter=FILTERS, who=st.integers(0, 2))
    def remove(self, topic_filter: str, who: int) -> None:
        assert self.trie.remove(topic_filter, who) is (self.model.pop((topic_filter, who), None) is not None)

    @rule(topic=TOPICS)
    def match(self, topic: str) -> None:
        expected = sorted((who, what) for (one, who), what in self.model.items() if naive(one, topic))
        assert sorted(self.trie.match(topic)) == expected

    @invariant()
    def holds_what_was_put_in(self) -> None:
        assert len(self.trie) == len(self.model)
        assert {(one, who): what for one, who, what in self.trie} == self.model

    def teardown(self) -> None:
        for topic_filter, who in list(self.model):
            assert self.trie.remove(topic_filter, who)
        assert self.trie._root.is_empty()  # nothing is left behind of filters that are gone


TrieAgainstNaive.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestTrieAgainstNaive = TrieAgainstNaive.TestCase


@given(FILTERS, TOPICS)
def test_one_filter_one_topic(topic_filter: str, topic: str) -> None:
    assert is_valid_filter(topic_filter)
    trie: SubscriptionTrie[str, None] = SubscriptionTrie()
    trie.add(topic_filter, "x", None)
    assert bool(trie.match(topic)) is naive(topic_filter, topic)


@pytest.mark.clause("MQTT-3.8.4-3")
def test_the_same_filter_again_replaces() -> None:
    trie: SubscriptionTrie[str, int] = SubscriptionTrie()
    assert trie.add("a/b", "me", 0)
    assert not trie.add("a/b", "me", 1)
    assert trie.match("a/b") == [("me", 1)]
