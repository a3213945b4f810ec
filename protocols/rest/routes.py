"""Which operation a method and path mean: the contract's paths as a tree, matched without regular expressions.

Segments of a path are percent-decoded after the path was split (RFC 3986 section 2.4), so that a group or a consumer
may have any name, also one with a slash in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import unquote

from protocols.rest.contract import Operation
from protocols.rest.errors import method_not_allowed, not_found


class Match(NamedTuple):
    """An operation and the texts of its template's names, in order."""

    operation: Operation
    values: tuple[str, ...]


class _Node:
    """One level of the tree of templates."""

    __slots__ = ("any", "literal", "operations")

    def __init__(self) -> None:
        self.literal: dict[str, _Node] = {}
        self.any: _Node | None = None
        self.operations: dict[str, Operation] = {}


class Router:
    """The paths as a tree: one is matched in one walk over its segments. A literal segment goes before a name."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        self._root = _Node()
        for operation in operations:
            node = self._root
            for segment in operation.template.strip("/").split("/"):
                if segment.startswith("{"):
                    node.any = node.any or _Node()
                    node = node.any
                else:
                    node = node.literal.setdefault(segment, _Node())
            node.operations[operation.method] = operation

    def methods(self, raw_path: str) -> list[str]:
        """The methods of a path, sorted; RestError 404 for no such path."""
        return sorted(self._find(raw_path)[0].operations)

    def match(self, method: str, raw_path: str) -> Match:
        """The operation for a method and a path that is still percent-encoded, without the query.

        Raises:
            RestError: 404 for no such path, 405 with `Allow` for a path without this method.
        """
        node, values = self._find(raw_path)
        operation = node.operations.get(method)
        if operation is None:
            raise method_not_allowed(sorted(node.operations))
        return Match(operation, tuple(values))

    def _find(self, raw_path: str) -> tuple[_Node, list[str]]:
        if not raw_path.startswith("/"):
            raise not_found()
        node = self._root
        values = []
        for segment in raw_path[1:].split("/"):
            following = node.literal.get(segment)
            if following is None:
                following = node.any
                if following is None or not segment:
                    raise not_found()
                values.append(unquote(segment) if "%" in segment else segment)
            node = following
        if not node.operations:
            raise not_found()
        return node, values
