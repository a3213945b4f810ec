"""Write the clause list of MQTT into docs/conformance-mqtt.md: every statement and the tests that cover it.

The statements are in `tests/conformance/clauses_*.toml`. The coverage is read from the tests: from
`pytest.mark.clause("MQTT-2.2.1-3")` on a test or one of its parameters, and from `clauses` in the vectors. Called as
`python -m tools.clauses` (`make clauses`); tests/conformance/test_clauses.py fails if the page is out of date.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "conformance-mqtt.md"
BEGIN: Final = "<!-- clauses: written by `make clauses` from the marks in the tests -->\n"
END: Final = "<!-- end of clauses -->\n"
CATALOGUES: Final = {"MQTT 5.0": "clauses_5_0.toml", "MQTT 3.1.1": "clauses_3_1_1.toml"}
VECTORS: Final = {"packets.toml": "test_packet", "faults.toml": "test_fault"}
"""Vector files, and the test in tests/protocols/mqtt/test_vectors.py that runs each."""
MENTION: Final = re.compile(r"\bMQTT(?:311)?-\d[\w.]*-\d[\w.]*")


class Clause(NamedTuple):
    """One numbered statement.

    Attributes:
        binds: server, client or both.
        says: the requirement.
        reason: why no test covers it; empty if a test must.
    """

    binds: str
    says: str
    reason: str = ""


class Mark(NamedTuple):
    """One place that claims to cover a clause."""

    clause: str
    file: str
    test: str


def load(name: str) -> dict[str, Clause]:
    """Read one catalogue, in its order."""
    rows = tomllib.loads((ROOT / "tests" / "conformance" / name).read_text(encoding="utf-8"))
    return {clause: Clause(**row) for clause, row in rows.items()}


def collect(tests: Path = ROOT / "tests") -> list[Mark]:
    """Return every mark of an MQTT clause below `tests`, in order of files and lines."""
    marks: list[Mark] = []
    for path in sorted(tests.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if ".clause(" in text:  # most files have none, and parsing is slow
            marks += (Mark(clause, path.name, test) for test, clause in _marks(ast.parse(text)))
    for name, test in VECTORS.items():
        cases = tomllib.loads((tests / "vectors" / "mqtt" / name).read_text(encoding="utf-8"))["case"]
        marks += (
            Mark(clause, "test_vectors.py", f"{test}[{case['name']}]")
            for case in cases
            for clause in case.get("clauses", ())
        )
    return [mark for mark in dict.fromkeys(marks) if mark.clause.startswith("MQTT")]


def mentions() -> Iterator[tuple[str, str]]:
    """Yield each clause that the product's code and documents mention, with the file."""
    for folder in ("gateway", "mapping", "protocols", "flowcontrol", "loadtest", "docs"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md") and path != PAGE:
                for clause in MENTION.findall(path.read_text(encoding="utf-8")):
                    yield clause, str(path.relative_to(ROOT))


def render() -> str:
    """Return the text of the section."""
    covering: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for mark in collect():
        covering[mark.clause][mark.file].append(mark.test)
    parts = ["\n"]
    for title, name in CATALOGUES.items():
        clauses = load(name)
        covered = sum(clause in covering for clause in clauses)
        parts.append(
            f"### {title}: {len(clauses)} statements, {covered} with tests, {len(clauses) - covered} with a reason\n\n"
            "| statement | binds | what it asks for | tests |\n|---|---|---|---|\n"
        )
        for number, clause in clauses.items():
            tests = "; ".join(
                f"`{file}`: " + ", ".join(f"`{test}`" for test in names) for file, names in covering[number].items()
            )
            what = tests or (f"none: {clause.reason}" if clause.reason else "**none**")
            parts.append(f"| {number} | {clause.binds} | {clause.says} | {what} |\n")
        parts.append("\n")
    return "".join(parts)


def update(page: str, section: str) -> str:
    """Return the page with the section between its markers replaced.

    Raises:
        ValueError: a marker is missing.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError("the page has no place for the clauses")
    return head + begin + section + end + tail


def main() -> None:
    """Write the page."""
    PAGE.write_text(update(PAGE.read_text(encoding="utf-8"), render()), encoding="utf-8")


def _marks(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (test, clause) of a module; the marks in a parameter table count for the tests whose decorators use it."""
    tables: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    tables[target.id] = list(_clauses(node.value))
        for inner in ast.walk(node) if isinstance(node, ast.ClassDef) else (node,):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name.startswith("test_"):
                for decorator in inner.decorator_list:
                    for clause in _clauses(decorator):
                        yield inner.name, clause
                    for part in ast.walk(decorator):
                        if isinstance(part, ast.Name):
                            for clause in tables.get(part.id, ()):
                                yield inner.name, clause


def _clauses(node: ast.AST) -> Iterator[str]:
    """Yield the arguments of every `pytest.mark.clause(...)` in a node."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "clause":
            for argument in call.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value


if __name__ == "__main__":
    main()
