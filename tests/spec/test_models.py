"""The properties of the models in docs/spec hold, and the list of their mutations is consistent with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.spec.model_checker import NAMES, SPECS, check, mutations

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("spec", NAMES)
def test_the_model_holds(spec: str) -> None:
    """Check with the small bounds; `make spec` uses the larger ones."""
    found = check(f"{spec}.small")
    assert not found.violated, found.output
    assert found.complete


def test_a_mistake_is_found() -> None:
    """One mutation shows that TLC does check."""
    mutation = next(one for one in mutations() if one.breaks == "AcknowledgedIsStored")
    assert check(f"{mutation.spec}.small", mutation).violated == "AcknowledgedIsStored"


def test_mutations_fit_and_their_tests_are_there() -> None:
    """Each mutation applies to its specification, and names existing tests of the code."""
    for mutation in mutations():
        mutation.apply((SPECS / f"{mutation.spec}.tla").read_text())
        assert mutation.code
        assert mutation.tests
        for test in mutation.tests:
            assert exists(test), test


def exists(test: str) -> bool:
    """Return whether a test with this node id exists."""
    path, _, name = test.partition("::")
    return f"def {name.partition('[')[0]}(" in (ROOT / path).read_text()


@pytest.mark.parametrize("spec", NAMES)
def test_every_action_has_a_test(spec: str) -> None:
    """For each action of a model there is a test of the code."""
    page = (SPECS / "README.md").read_text().partition(f"## {spec}")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([A-Z]\w+(?:, \w+)*) \|.*\| `(tests/.*)` \|$", page, re.MULTILINE)
    model = (SPECS / f"{spec}.tla").read_text()
    taken = re.search(r"^Next ==\n((?:    .*\n)+)", model, re.MULTILINE)
    assert taken
    actions = set(re.findall(r"\b([A-Z]\w+)\b(?= *\(|\s)", re.sub(r"\\E \w+ \\in \w+ :", "", taken[1])))
    assert actions == {action for names, _ in rows for action in names.split(", ")}
    assert all(exists(test) for _, test in rows)


def test_every_safety_property_has_a_mutation() -> None:
    for spec in NAMES:
        found = re.search(r"^INVARIANTS (.*)$", (SPECS / f"{spec}.cfg").read_text(), re.MULTILINE)
        assert found
        broken = {mutation.breaks for mutation in mutations() if mutation.spec == spec}
        assert set(found[1].split()) - broken <= {"TypeOK"}
