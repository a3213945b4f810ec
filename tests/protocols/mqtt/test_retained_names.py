"""The trie of retained names against a matcher that looks at every name."""

from __future__ import annotations

import gc
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.mqtt.retained_names import NameTrie, _Node

LEVEL = st.sampled_from(["a", "b", "c", "", "$x", "$SYS", "é"])
NAME = st.lists(LEVEL, min_size=1, max_size=6).map("/".join).filter(bool)
FILTER = st.tuples(st.lists(st.one_of(LEVEL, st.just("+")), min_size=0, max_size=6), st.sampled_from([(), ("#",)])).map(
    lambda parts: "/".join((*parts[0], *parts[1]))
)


def matches(name: str, topic_filter: str) -> bool:
    """Section 4.7, level by level."""
    names, wanted = name.split("/"), topic_filter.split("/")
    if name.startswith("$") and wanted[0] in ("+", "#"):
        return False
    if wanted[-1] == "#":
        wanted.pop()
        if len(names) < len(wanted):
            return False
        names = names[: len(wanted)]
    return len(names) == len(wanted) and all(want in ("+", have) for want, have in zip(wanted, names, strict=True))


@pytest.mark.clause("MQTT-4.7.2-1")
@pytest.mark.parametrize(
    ("topic_filter", "expected"),
    [
        ("sport/#", ["sport", "sport/", "sport/a/b"]),
        ("sport", ["sport"]),
        ("sport/+", ["sport/"]),
        ("+", ["sport"]),
        ("+/+", ["/finance", "sport/"]),
        ("/+", ["/finance"]),
        ("#", ["/finance", "sport", "sport/", "sport/a/b"]),
        ("$SYS/#", ["$SYS/a", "$SYS/b/c"]),
        ("$SYS/+", ["$SYS/a"]),
        ("+/a", []),
        ("sport/+/b", ["sport/a/b"]),
        ("sport/a/b/c", []),
    ],
)
def test_the_examples_of_the_standard(topic_filter: str, expected: list[str]) -> None:
    names = NameTrie()
    for name in ("sport/a/b", "$SYS/b/c", "sport", "/finance", "$SYS/a", "sport/"):
        assert names.add(name)
    assert names.match(topic_filter) == expected


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.booleans(), NAME), max_size=40), st.lists(FILTER.filter(bool), min_size=1, max_size=8))
def test_any_names_and_filters(steps: list[tuple[bool, str]], filters: list[str]) -> None:
    names = NameTrie()
    there: set[str] = set()
    for adding, name in steps:
        if adding:
            assert names.add(name) is (name not in there)
            there.add(name)
        else:
            assert names.remove(name) is (name in there)
            there.discard(name)
        assert len(names) == len(there)
    for topic_filter in filters:
        assert names.match(topic_filter) == sorted(name for name in there if matches(name, topic_filter))
    assert count_nodes(names) < max(1, len(there))
    for name in sorted(there):
        assert names.remove(name)
    assert len(names) == 0
    assert not names._root.children  # nothing of them is left


def count_nodes(names: NameTrie) -> int:
    """Nodes below the root; each must be a place where names part."""
    waiting: list[_Node | str] = list(names._root.children.values())
    count = 0
    while waiting:
        node = waiting.pop()
        if isinstance(node, _Node):
            count += 1
            assert len(node.children) + (node.name is not None) > 1
            waiting.extend(node.children.values())
    return count


def test_names_of_very_many_levels_cost_neither_nodes_nor_the_stack() -> None:
    deep = "/" * 65_000
    names = NameTrie()
    assert names.add(deep)
    assert names.add(deep + "a")
    assert names.add(deep[:40_000])
    assert names.match("#") == sorted([deep, deep + "a", deep[:40_000]])
    assert names.match("/" * 65_000 + "+") == [deep, deep + "a"]
    assert count_nodes(names) == 2
    assert names.remove(deep)
    assert count_nodes(names) == 1
    assert names.match("/#") == sorted([deep + "a", deep[:40_000]])


def test_a_look_up_among_a_hundred_thousand_names_does_not_look_at_all_of_them() -> None:
    names = NameTrie()
    every = [f"site/{site}/machine/{machine}/{what}" for site in range(100) for machine in range(500)
             for what in ("temperature", "state")]  # fmt: skip
    for name in every:
        names.add(name)
    gc.collect()
    started = time.thread_time()
    for _ in range(100):
        assert names.match("site/17/machine/3/+") == ["site/17/machine/3/state", "site/17/machine/3/temperature"]
        assert len(names.match("site/+/machine/499/state")) == 100
    few = (time.thread_time() - started) / 100
    started = time.thread_time()
    assert sum(matches(name, "site/+/machine/499/state") for name in every) == 100
    assert few < (time.thread_time() - started) / 10
