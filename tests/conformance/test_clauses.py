"""The clause list is complete and correct: every statement has a test or a reason, and every number exists."""

from __future__ import annotations

import ast

import pytest

from tools import clauses


@pytest.fixture(scope="module")
def catalogue() -> dict[str, clauses.Clause]:
    return {number: one for name in clauses.CATALOGUES.values() for number, one in clauses.load(name).items()}


@pytest.fixture(scope="module")
def marks() -> list[clauses.Mark]:
    return clauses.collect()


@pytest.mark.parametrize(("name", "size"), [("clauses_5_0.toml", 251), ("clauses_3_1_1.toml", 141)])
def test_the_catalogue_has_every_statement(name: str, size: int) -> None:
    rows = clauses.load(name)
    assert len(rows) == size
    assert {one.binds for one in rows.values()} == {"server", "client", "both"}
    assert all(clauses.MENTION.fullmatch(number) for number in rows if number != "MQTT-4.2-1")
    assert all("|" not in one.says + one.reason for one in rows.values())  # they become cells of a table
    following: dict[str, list[int]] = {}
    for number in rows:
        section, _, last = number.rpartition("-")
        following.setdefault(section, []).append(int(last))
    assert following.pop("MQTT-2.2.1", [2, 3, 4, 5, 6]) == [2, 3, 4, 5, 6]  # the standard has no 2.2.1-1
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in following.values())


def test_marks_name_statements_that_exist(catalogue: dict[str, clauses.Clause], marks: list[clauses.Mark]) -> None:
    assert [mark for mark in marks if mark.clause not in catalogue] == []


def test_code_and_pages_name_statements_that_exist(catalogue: dict[str, clauses.Clause]) -> None:
    found = list(clauses.mentions())
    assert len(found) > 80
    assert [one for one in found if one[0] not in catalogue] == []


def test_every_statement_is_covered_or_has_its_reason(
    catalogue: dict[str, clauses.Clause], marks: list[clauses.Mark]
) -> None:
    covered = {mark.clause for mark in marks}
    assert [number for number, one in catalogue.items() if number not in covered and not one.reason] == []
    assert [number for number, one in catalogue.items() if number in covered and one.reason] == []


def test_the_page_is_up_to_date() -> None:
    page = clauses.PAGE.read_text(encoding="utf-8")
    assert clauses.update(page, clauses.render()) == page, "run `make clauses`"


def test_marks_of_every_form_are_read() -> None:
    module = """
CASES = [pytest.param(1, marks=pytest.mark.clause("MQTT-1-1"))]

@pytest.mark.clause("MQTT-1-2", "MQTT-1-3")
@pytest.mark.parametrize("a", [pytest.param(1, marks=[pytest.mark.clause("MQTT-1-4")])])
def test_one(): ...

@pytest.mark.parametrize("a", CASES)
async def test_two(): ...

class TestThree:
    @pytest.mark.clause("MQTT-1-5")
    def test_four(self): ...

@pytest.mark.clause("MQTT-1-6")
def helper(): ...
"""
    assert list(clauses._marks(ast.parse(module))) == [
        ("test_one", "MQTT-1-2"),
        ("test_one", "MQTT-1-3"),
        ("test_one", "MQTT-1-4"),
        ("test_two", "MQTT-1-1"),
        ("test_four", "MQTT-1-5"),
    ]


def test_a_page_without_its_place_is_not_written() -> None:
    with pytest.raises(ValueError, match="no place"):
        clauses.update("# MQTT\n", "")
    page = f"# MQTT\n{clauses.BEGIN}old{clauses.END}tail\n"
    assert clauses.update(page, "new\n") == f"# MQTT\n{clauses.BEGIN}new\n{clauses.END}tail\n"
