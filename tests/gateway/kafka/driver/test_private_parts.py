"""aiokafka's private attributes: those in the table exist, and no others are used."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import kafka_records
from gateway.kafka import driver
from tests.gateway.kafka.driver.private_parts import PRIVATE_PARTS

ROOMS = (Path(driver.__path__[0]), Path(kafka_records.__path__[0]))


def names_of(cls: type) -> set[str]:
    """Return the attributes of a class's objects: its methods, and what its methods assign to `self`."""
    found = set(dir(cls))
    for one in cls.__mro__:
        if isinstance(inspect.getmodule(one), ModuleType) and one.__module__.startswith("aiokafka"):
            tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
            found |= {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            }
    return found


@pytest.mark.parametrize("path", PRIVATE_PARTS)
def test_each_private_name_still_exists(path: str) -> None:
    module, _, name = path.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    assert set(PRIVATE_PARTS[path]) - names_of(cls) == set()


def private_names(tree: ast.AST) -> Iterator[str]:
    """Return the private names that a module uses, also as strings (`getattr`), without those that it defines."""
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    own |= {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    overridden = {name for names in PRIVATE_PARTS.values() for name in names}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr not in own - overridden:
            yield node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in overridden:
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def test_the_table_is_whole() -> None:
    trees = [ast.parse(file.read_text()) for room in ROOMS for file in room.rglob("*.py")]
    touched = {name for tree in trees for name in private_names(tree) if name.startswith("_") and name[1:2] != "_"}
    # Slots of the driver's own classes.
    ours = {
        "_at",
        "_callback",
        "_connection",
        "_data",
        "_end",
        "_known",
        "_node",
        "_passed_on",
        "_size",
        "_source",
        "_timer",
        "_view",
        "_whole",
    }
    assert touched - ours == {name for names in PRIVATE_PARTS.values() for name in names}
