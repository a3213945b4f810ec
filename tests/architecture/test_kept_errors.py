"""No exception is kept: its traceback holds the frames that it came through, and what these hold (ADR 0030).

A frame that holds its exception is a reference cycle, which only the collector frees. A million bad lines made ten
million objects for it in that way.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ("flowcontrol", "gateway", "kafka_records", "mapping", "protocols")
KEEPS = {"add", "append", "appendleft", "put_nowait", "set_exception", "setdefault"}
CLEARED = {"gateway/kafka/driver/lifecycle.py: failed = error"}
"""Dropped where it is raised again."""


def kept(tree: ast.AST) -> Iterator[str]:
    """Yield where an exception outlives the block that caught it, or the frame that raises it holds it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.name is not None:
            for inner in ast.walk(ast.Module(node.body, [])):
                if _keeps(inner, node.name):
                    yield ast.unparse(inner)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _raised_from_a_variable(node)


def _keeps(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Assign(value=value) | ast.AnnAssign(value=value) | ast.NamedExpr(value=value):
            return _holds(value, name)
        case ast.Return(value=value) | ast.Yield(value=value):
            return _holds(value, name)
        case ast.Call(func=ast.Attribute(attr=attribute), args=values) if attribute in KEEPS:
            return any(_holds(value, name) for value in values)
    return False


def _holds(value: ast.AST | None, name: str) -> bool:
    match value:
        case ast.Name(id=found):
            return found == name
        case ast.Tuple(elts=values) | ast.List(elts=values) | ast.Set(elts=values) | ast.Dict(values=values):
            return any(_holds(one, name) for one in values)
    return False


def _raised_from_a_variable(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    nodes = list(ast.walk(function))
    caught = {node.name for node in nodes if isinstance(node, ast.ExceptHandler)}
    dropped = {ast.unparse(one) for node in nodes if isinstance(node, ast.Try) for end in node.finalbody
               for one in _dropped(end)}  # fmt: skip
    for node in nodes:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name | ast.Attribute):
            name = ast.unparse(node.exc)
            if name.rpartition(".")[2].islower() and name not in caught | dropped:
                yield f"raise {name}"


def _dropped(statement: ast.stmt) -> list[ast.expr]:
    match statement:
        case ast.Delete(targets=targets) | ast.Assign(targets=targets, value=ast.Constant(value=None)):
            return targets
    return []


def test_no_exception_is_kept_with_its_traceback() -> None:
    modules = sorted(path for part in PARTS for path in (ROOT / part).rglob("*.py"))
    assert modules
    found = {
        f"{path.relative_to(ROOT)}: {what}" for path in modules for what in kept(ast.parse(path.read_text("utf-8")))
    }
    assert found - CLEARED == set()


def test_what_is_found() -> None:
    source = """
def collect(work):
    found = []
    for one in work:
        try:
            one()
        except ValueError as error:
            found.append(error)
        except KeyError as error:
            self.last = str(error)
        except OSError as error:
            return None, error
    if self.fault:
        raise self.fault
    failure = found[0]
    raise failure
"""
    assert sorted(kept(ast.parse(source))) == [
        "found.append(error)",
        "raise failure",
        "raise self.fault",
        "return (None, error)",
    ]
