"""Relations between filters, against all names over a small alphabet."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.security.rights.filters import covers, matches, overlap
from protocols.mqtt.topics import is_valid_filter

LETTERS = ("a", "b", "")
# Names of three levels decide exactly about filters of up to three levels; `c` is any word that no filter contains.
NAMES = [name for depth in (1, 2, 3, 4) for name in itertools.product((*LETTERS, "c"), repeat=depth)]

levels = st.lists(st.sampled_from((*LETTERS, "+")), min_size=1, max_size=3)
filters = st.builds(lambda head, rest: [*head, *rest], levels, st.sampled_from(([], ["#"]))) | st.just(["#"])


def names_of(levels: list[str]) -> set[tuple[str, ...]]:
    return {name for name in NAMES if matches(levels, name)}


@given(filters, filters)
def test_covers_is_inclusion(outer: list[str], inner: list[str]) -> None:
    assert covers(outer, inner) == (names_of(inner) <= names_of(outer))


@given(filters, filters)
def test_overlap_is_intersection(one: list[str], other: list[str]) -> None:
    assert overlap(one, other) == bool(names_of(one) & names_of(other))
    assert overlap(one, other) == overlap(other, one)


@pytest.mark.clause("MQTT-4.7.1-1")
@pytest.mark.clause("MQTT-4.7.1-2")
@pytest.mark.parametrize(
    ("text", "legal"),
    [
        ("#", True), ("+", True), ("a/#", True), ("a/+/b", True), ("/", True), ("a//b", True), ("+/+/#", True),
        ("", False), ("a#", False), ("#/a", False), ("a/#/b", False), ("a+", False), ("a/b+/c", False), ("a\0", False),
    ],
)  # fmt: skip
def test_legal_filters(text: str, legal: bool) -> None:
    assert is_valid_filter(text, shared=False) is legal


def test_a_hash_matches_its_parent() -> None:
    assert matches(["sensors", "#"], ["sensors"])
    assert covers(["sensors", "#"], ["sensors"])
    assert overlap(["sensors"], ["sensors", "#"])
    assert not overlap(["sensors"], ["sensors", "+"])
