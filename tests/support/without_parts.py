"""A pytest plugin: runs the core's tests without the optional parts, as if those were not installed.

`make test-core` uses it. Tests of a part, by their place or an import, are not collected, those with the mark `part`
are not run, and every gateway of a test starts without the parts. Two parts stay in the tests' own process: the broker
comes from one, and tests of Spark's side are not the gateway's.
"""

from __future__ import annotations

import ast
import os
import runpy
from pathlib import Path

import pytest

from gateway.runtime.parts import PARTS, part_of

STAY = {"embedded kafka", "spark"}
FOLDER = Path(__file__).parent / "absent"
TESTS = Path(__file__).parents[1]


def hidden(*, stay: set[str]) -> list[str]:
    """The modules of all parts but those that stay."""
    parts = (part for name, part in PARTS.items() if name not in stay)
    return [module for part in parts for module in (*part.modules, part.command) if module]


def environment(*, stay: set[str]) -> dict[str, str]:
    """The variables with which a Python process runs without the parts."""
    path = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH", ""))))
    return {"TESTS_HIDDEN": " ".join(hidden(stay=stay)), "PYTHONPATH": path}


def pytest_configure() -> None:
    os.environ |= environment(stay=STAY)
    runpy.run_path(str(FOLDER / "sitecustomize.py"))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the files that stand where a part's tests do, and those that import a part."""
    if collection_path.suffix != ".py" or not collection_path.is_relative_to(TESTS):
        return None
    place = collection_path.relative_to(TESTS).with_name(collection_path.stem.removeprefix("test_"))
    imported = {".".join(place.parts)}
    for node in ast.walk(ast.parse(collection_path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            imported |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
    of_parts = {part_of(name) for name in imported} - {None, *STAY}
    return True if of_parts or "tools.tables" in imported else None  # that knows the metrics of all parts


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests with the mark `part`."""
    marked = [item for item in items if item.get_closest_marker("part")]
    config.hook.pytest_deselected(items=marked)
    items[:] = [item for item in items if item not in marked]
