"""Finds the operation for a method and path: the contract's paths as a tree, matched without regular expressions.

Segments are percent-decoded after the path was split (RFC 3986 section 2.4), so that the name of a group or a consumer
may contain a slash.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple
from urllib.parse import unquote

import msgspec

from protocols.rest.contract import Operation
from protocols.rest.errors import RestError

PREFIX: Final = "v2"  # the first segment of the Confluent dialect's paths, with any `http.dialect`


class Dialect(enum.Enum):
    """Decides which operations serve the paths that both dialects have, such as `/topics/T`."""

    STRIMZI = "strimzi"
    CONFLUENT = "confluent"


class RouteMatch(NamedTuple):
    """An operation and the texts of its path parameters, in order."""

    operation: Operation
    values: tuple[str, ...]


class _RouteNode(msgspec.Struct, eq=False):
    """One level of the tree of templates."""

    literal: dict[str, _RouteNode] = {}
    any: _RouteNode | None = None
    operations: dict[str, Operation] = {}


def _methods(declared: Collection[str]) -> list[str]:
    """Return the methods sorted, with HEAD if there is GET."""
    return sorted({*declared, "HEAD"} if "GET" in declared else declared)


class Routes:
    """The paths as a tree; a path is matched in one walk. A literal segment takes precedence over a parameter.

    Below `PREFIX` a slash at the end is ignored.
    """

    def __init__(self, operations: Iterable[Operation], *, dialect: Dialect = Dialect.STRIMZI) -> None:
        """Serve `operations`; `dialect` decides for paths that both dialects have."""
        self._confluent = dialect is Dialect.CONFLUENT
        self._root = _RouteNode()
        self._methods: set[str] = set()
        for operation in operations:
            self._methods.add(operation.method)
            node = self._root
            for segment in operation.template.strip("/").split("/"):
                if segment.startswith("{"):
                    node.any = node.any or _RouteNode()
                    node = node.any
                else:
                    node = node.literal.setdefault(segment, _RouteNode())
            node.operations[operation.method] = operation

    def methods(self, raw_path: str | None = None) -> list[str]:
        """Return the methods of a path, or of all paths, sorted; RestError 404 for an unknown path."""
        return _methods(self._methods if raw_path is None else self._find(raw_path)[0].operations)

    def match(self, method: str, raw_path: str) -> RouteMatch:
        """Return the operation for a method and a path that is still percent-encoded, without the query.

        Raises:
            RestError: 404 for an unknown path, 405 with `Allow` for a path without this method.
        """
        if method == "HEAD":  # served wherever GET is (RFC 9110 section 9.3.2)
            method = "GET"
        node, values = self._find(raw_path, method)
        operation = node.operations.get(method)
        if operation is None:
            allowed = ", ".join(_methods(node.operations))
            raise RestError(405, f"Method Not Allowed: the path has {allowed}", headers=(("Allow", allowed),))
        return RouteMatch(operation, tuple(values))

    def _find(self, raw_path: str, method: str | None = None) -> tuple[_RouteNode, list[str]]:
        """Return the path's node and parameters; if two dialects have the path, the node that has the method."""
        if not raw_path.startswith("/"):
            raise _unknown()
        segments = raw_path[1:].split("/")
        preferred = None
        if self._confluent:
            preferred = self._walk([PREFIX, *segments] if segments[-1] else [PREFIX, *segments[:-1]])
            if preferred is not None and (method is None or method in preferred[0].operations):
                return preferred
        route = self._walk(segments[:-1] if segments[0] == PREFIX and not segments[-1] else segments)
        if route is None or (preferred is not None and method not in route[0].operations):
            route = preferred
        if route is None:
            raise _unknown()
        return route

    def _walk(self, segments: Sequence[str]) -> tuple[_RouteNode, list[str]] | None:
        node = self._root
        values = []
        for segment in segments:
            following = node.literal.get(segment)
            if following is None:
                following = node.any
                if following is None or not segment:
                    return None
                values.append(unquote(segment) if "%" in segment else segment)
            node = following
        return (node, values) if node.operations else None


def _unknown() -> RestError:
    """Return the error for an unknown path. Strimzi's text stays; the contract is named in a field (RFC 8631)."""
    return RestError(404, "Not Found", headers=(("Link", '</openapi>; rel="service-desc"'),))
