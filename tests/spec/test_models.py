"""The models in docs/spec hold, and what is written about their mutations is true as far as a test can see."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.spec.model_checker import NAMES, SPECS, check, mutations

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("spec", NAMES)
def test_the_model_holds(spec: str) -> None:
    """With the small bounds; `make spec` has the larger ones."""
    found = check(f"{spec}.small")
    assert not found.violated, found.output
    assert found.complete


def test_a_mistake_is_found() -> None:
    """One of them: TLC does look."""
    mutation = next(one for one in mutations() if one.breaks == "AcknowledgedIsStored")
    assert check(f"{mutation.spec}.small", mutation).violated == "AcknowledgedIsStored"


def test_mutations_fit_and_their_tests_are_there() -> None:
    """Each has its place in the specification, and is found by a test of the code that exists."""
    for mutation in mutations():
        mutation.apply((SPECS / f"{mutation.spec}.tla").read_text())
        assert mutation.code
        assert mutation.tests
        for test in mutation.tests:
            path, _, name = test.partition("::")
            assert f"def {name.rpartition('::')[2].partition('[')[0]}(" in (ROOT / path).read_text(), test


def test_every_safety_property_has_a_mutation() -> None:
    for spec in NAMES:
        found = re.search(r"^INVARIANTS (.*)$", (SPECS / f"{spec}.cfg").read_text(), re.MULTILINE)
        assert found
        broken = {mutation.breaks for mutation in mutations() if mutation.spec == spec}
        assert set(found[1].split()) - broken <= {"TypeOK", "ConnectedIsOwner"}
