"""Which operation a method and path mean: one table, matched without regular expressions.

Segments of a path are percent-decoded after the path was split (RFC 3986 section 2.4), so that a group or a consumer
may have any name, also one with a slash in it.
"""

from __future__ import annotations

from typing import Final, NamedTuple
from urllib.parse import unquote

from protocols.rest.errors import method_not_allowed, not_found


class Route(NamedTuple):
    """One operation. `{name}` in the template stands for one segment; names are as in the contract."""

    method: str
    template: str
    operation: str


_INSTANCE = "/consumers/{groupid}/instances/{name}"

ROUTES: Final = (
    Route("GET", "/", "info"),
    Route("GET", "/topics", "listTopics"),
    Route("GET", "/topics/{topicname}", "getTopic"),
    Route("POST", "/topics/{topicname}", "send"),
    Route("GET", "/topics/{topicname}/partitions", "listPartitions"),
    Route("GET", "/topics/{topicname}/partitions/{partitionid}", "getPartition"),
    Route("POST", "/topics/{topicname}/partitions/{partitionid}", "sendToPartition"),
    Route("GET", "/topics/{topicname}/partitions/{partitionid}/offsets", "getOffsets"),
    Route("POST", "/consumers/{groupid}", "createConsumer"),
    Route("DELETE", _INSTANCE, "deleteConsumer"),
    Route("POST", _INSTANCE + "/subscription", "subscribe"),
    Route("GET", _INSTANCE + "/subscription", "listSubscriptions"),
    Route("DELETE", _INSTANCE + "/subscription", "unsubscribe"),
    Route("POST", _INSTANCE + "/assignments", "assign"),
    Route("GET", _INSTANCE + "/records", "poll"),
    Route("POST", _INSTANCE + "/offsets", "commit"),
    Route("POST", _INSTANCE + "/positions", "seek"),
    Route("POST", _INSTANCE + "/positions/beginning", "seekToBeginning"),
    Route("POST", _INSTANCE + "/positions/end", "seekToEnd"),
)


class Match(NamedTuple):
    """An operation and the values of its template's names, in order."""

    operation: str
    values: tuple[str, ...]


class _Node:
    """One level of the tree of templates."""

    __slots__ = ("any", "literal", "operations")

    def __init__(self) -> None:
        self.literal: dict[str, _Node] = {}
        self.any: _Node | None = None
        self.operations: dict[str, str] = {}


class Router:
    """The table as a tree: a path is matched in one walk over its segments."""

    def __init__(self, routes: tuple[Route, ...] = ROUTES) -> None:
        self._root = _Node()
        for route in routes:
            node = self._root
            for segment in route.template.strip("/").split("/"):
                if segment.startswith("{"):
                    node.any = node.any or _Node()
                    node = node.any
                else:
                    node = node.literal.setdefault(segment, _Node())
            node.operations[route.method] = route.operation

    def match(self, method: str, raw_path: str) -> Match:
        """The operation for a method and a path that is still percent-encoded, without the query.

        Raises:
            RestError: 404 for no such path, 405 with `Allow` for a path without this method.
        """
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
        operation = node.operations.get(method)
        if operation is None:
            if not node.operations:
                raise not_found()
            raise method_not_allowed(sorted(node.operations))
        return Match(operation, tuple(values))
