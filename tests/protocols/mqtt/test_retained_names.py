"""The trie of retained names, compared with a matcher that checks every name."""

from __future__ import annotations

import gc
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.mqtt.retained_names import STEP, NameTrie, _NameNode

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


def match(names: NameTrie, topic_filter: str) -> list[str]:
    """The names that a search finds, in order."""
    return sorted(name for piece in names.search(topic_filter) for name in piece)


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
    assert match(names, topic_filter) == expected


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
    for topic_filter in filters:
        assert match(names, topic_filter) == sorted(name for name in there if matches(name, topic_filter))
    assert count_nodes(names) < max(1, len(there))
    for name in sorted(there):
        assert names.remove(name)
    assert not names._root.children  # nothing of them is left


@settings(max_examples=400, deadline=None)
@given(
    st.sets(NAME, max_size=30),
    st.lists(st.tuples(st.booleans(), NAME), max_size=30),
    FILTER.filter(bool),
    st.integers(1, 5),
)
def test_names_that_come_and_go_do_not_disturb_a_search(
    begun_with: set[str], changes: list[tuple[bool, str]], topic_filter: str, step: int
) -> None:
    names = NameTrie()
    for name in begun_with:
        names.add(name)
    always, ever = set(begun_with), set(begun_with)
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("protocols.mqtt.retained_names.STEP", step)
        for piece in names.search(topic_filter):
            assert len(piece) <= step
            found += piece
            if changes:
                adding, name = changes.pop()
                if adding:
                    names.add(name)
                    ever.add(name)
                else:
                    names.remove(name)
                    always.discard(name)
    assert {name for name in always if matches(name, topic_filter)} <= set(found)
    assert set(found) <= {name for name in ever if matches(name, topic_filter)}
    assert len([name for name in found if name in always]) == len({name for name in found if name in always})


def count_nodes(names: NameTrie) -> int:
    """Count the nodes below the root; each must be a branching point."""
    waiting: list[_NameNode | str] = list(names._root.children.values())
    count = 0
    while waiting:
        node = waiting.pop()
        if isinstance(node, _NameNode):
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
    assert match(names, "#") == sorted([deep, deep + "a", deep[:40_000]])
    assert match(names, "/" * 65_000 + "+") == [deep, deep + "a"]
    assert count_nodes(names) == 2
    assert names.remove(deep)
    assert count_nodes(names) == 1
    assert match(names, "/#") == sorted([deep + "a", deep[:40_000]])


@pytest.mark.parametrize("topic_filter", ["+/+/+/nobody", "+/a/+/state", "#", "site/#"])
def test_a_search_of_everything_is_made_of_many_steps(topic_filter: str) -> None:
    names = NameTrie()
    count = 100 * STEP
    for number in range(count):
        names.add(f"site/{'ab'[number % 2]}/{number}/state")
    pieces = list(names.search(topic_filter))
    assert len(pieces) >= count // 2 // STEP
    assert all(len(piece) <= STEP for piece in pieces)


def test_a_look_up_among_a_hundred_thousand_names_does_not_look_at_all_of_them() -> None:
    names = NameTrie()
    every = [f"site/{site}/machine/{machine}/{what}" for site in range(100) for machine in range(500)
             for what in ("temperature", "state")]  # fmt: skip
    for name in every:
        names.add(name)
    gc.collect()
    started = time.thread_time()
    for _ in range(100):
        assert match(names, "site/17/machine/3/+") == ["site/17/machine/3/state", "site/17/machine/3/temperature"]
        assert len(match(names, "site/+/machine/499/state")) == 100
    few = (time.thread_time() - started) / 100
    started = time.thread_time()
    assert sum(matches(name, "site/+/machine/499/state") for name in every) == 100
    assert few < (time.thread_time() - started) / 10
