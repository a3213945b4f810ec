"""A trie of topic names that is searched by topic filter (sections 3.3.1.3 and 4.7), for retained messages.

Its edges are topic levels, and it is compressed: a name that is alone below an edge is stored there as a string, and
levels that a whole branch shares are the `skip` of its node. So there are fewer nodes than names, for any number of
levels.

A search stays valid while names are added and removed: a replaced node is not changed, and shares its children with its
replacement.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

STEP: Final = 256  # edges that a search follows before it yields

_MULTI = "#"
_SINGLE = "+"
_MISMATCH = -1


class _NameNode(msgspec.Struct, eq=False):
    """A branching point: at least two names are below it."""

    skip: tuple[str, ...] = ()  # levels between the edge to this node and the node, shared by all names below
    # next level -> the only name that continues with it, or the node of several
    children: dict[str, _NameNode | str] = {}
    name: str | None = None  # the name that ends here

    def with_skip(self, skip: tuple[str, ...]) -> _NameNode:
        """Return a replacement for this node with another `skip`; a running search may still use this one."""
        node = _NameNode(skip)
        node.children, node.name = self.children, self.name
        return node

    def attach(self, levels: Sequence[str], depth: int, name: str) -> None:
        """Add a name whose first `depth` levels lead here and whose next level no other name has."""
        if depth == len(levels):
            self.name = name
        else:
            self.children[sys.intern(levels[depth])] = name


class NameTrie:
    """A set of topic names."""

    __slots__ = ("_root",)

    def __init__(self) -> None:
        self._root = _NameNode()

    def search(self, topic_filter: str) -> Iterator[list[str]]:
        """Find the names that match a valid topic filter, in unordered pieces.

        A piece has the names found by following `STEP` edges, and may be empty. Names may be added and removed between
        pieces; a name that exists during the whole search is found exactly once.

        Wildcards at the first level match no name that starts with `$` [MQTT-4.7.2-1]. `sport/#` also matches `sport`
        (section 4.7.1.2).
        """
        levels = topic_filter.split("/")
        names: list[str] = []
        looked = 0
        # Edges to follow, and the index of the filter's level behind them; None: everything below matches.
        waiting: list[tuple[Iterator[_NameNode | str], int | None]] = [(iter((self._root,)), 0)]
        while waiting:
            branches, depth = waiting[-1]
            child = next(branches, None)
            if child is None:
                waiting.pop()
                continue
            looked += 1
            if looked > STEP:
                yield names
                names, looked = [], 1
            if isinstance(child, str):
                if depth is None or _matches_rest(child.split("/"), levels, depth):
                    names.append(child)
                continue
            reached = None if depth is None else _match_skip(child, levels, depth)
            if reached == _MISMATCH:
                continue
            level = _MULTI if reached is None else levels[reached] if reached < len(levels) else None
            if level in {_MULTI, None} and child.name is not None:
                names.append(child.name)
            if level == _MULTI:
                waiting.append((_branches(child, reached), None))
            elif level is not None and reached is not None:
                if level == _SINGLE:
                    waiting.append((_branches(child, reached), reached + 1))
                elif level in child.children:
                    waiting.append((iter((child.children[level],)), reached + 1))
        yield names

    def add(self, name: str) -> bool:
        """Add a name; return False if it exists already."""
        levels = name.split("/")
        node, depth = self._root, 0
        while depth < len(levels):
            level = levels[depth]
            child = node.children.get(level)
            if child is None:
                node.attach(levels, depth, name)
                return True
            if isinstance(child, str):
                if child == name:
                    return False
                node.children[level] = _branch(child, name, depth + 1)
                return True
            shared = _common(child.skip, levels, depth + 1)
            depth += 1 + shared
            if shared < len(child.skip):
                above = node.children[level] = _NameNode(child.skip[:shared])
                above.children[child.skip[shared]] = child.with_skip(child.skip[shared + 1 :])
                above.attach(levels, depth, name)
                return True
            node = child
        if node.name is not None:
            return False
        node.name = name
        return True

    def remove(self, name: str) -> bool:
        """Remove a name; return False if it does not exist."""
        levels = name.split("/")
        node, depth = self._root, 0
        edge: tuple[_NameNode, str] | None = None  # parent node, and the level that leads from it to `node`
        while depth < len(levels):
            level = levels[depth]
            child = node.children.get(level)
            if child is None:
                return False
            if isinstance(child, str):
                if child != name:
                    return False
                del node.children[level]
                break
            if _common(child.skip, levels, depth + 1) < len(child.skip):
                return False
            depth += 1 + len(child.skip)
            edge, node = (node, level), child
        else:
            if node.name is None:
                return False
            node.name = None
        if edge is not None:
            _collapse(node, *edge)
        return True


def _branch(one: str, other: str, depth: int) -> _NameNode:
    """Create the node where two different names branch that share their first `depth` levels."""
    levels, others = one.split("/"), other.split("/")
    shared = _common(levels[depth:], others, depth)
    node = _NameNode(tuple(sys.intern(level) for level in levels[depth : depth + shared]))
    node.attach(levels, depth + shared, one)
    node.attach(others, depth + shared, other)
    return node


def _collapse(node: _NameNode, above: _NameNode, level: str) -> None:
    """Replace `node`, after a name was removed, by its only name or child if it no longer branches."""
    if len(node.children) + (node.name is not None) > 1:
        return
    if node.name is not None:
        above.children[level] = node.name
        return
    ((key, child),) = node.children.items()
    above.children[level] = child.with_skip((*node.skip, key, *child.skip)) if isinstance(child, _NameNode) else child


def _common(skip: Sequence[str], levels: Sequence[str], start: int) -> int:
    """Return how many levels at the start of `skip` equal those of `levels` from `start` on."""
    count, limit = 0, min(len(skip), len(levels) - start)
    while count < limit and skip[count] == levels[start + count]:
        count += 1
    return count


def _matches_rest(levels: Sequence[str], wanted: Sequence[str], start: int) -> bool:
    """Whether a name matches a filter from level `start` on."""
    for number in range(start, len(wanted)):
        want = wanted[number]
        if want == _MULTI:
            return True
        if number >= len(levels) or (want != _SINGLE and want != levels[number]):
            return False
    return len(levels) == len(wanted)


def _match_skip(node: _NameNode, wanted: Sequence[str], depth: int) -> int | None:
    """Match a node's `skip` from level `depth` of a filter on.

    Returns:
        The filter's next level; `_MISMATCH` if it does not match; None if everything below matches.
    """
    for level in node.skip:
        if depth == len(wanted):
            return _MISMATCH
        want = wanted[depth]
        if want == _MULTI:
            return None
        if want not in (_SINGLE, level):
            return _MISMATCH
        depth += 1
    return depth


def _branches(node: _NameNode, depth: int | None) -> Iterator[_NameNode | str]:
    """Return a snapshot of the edges below `node`; at the first level (`depth` 0) without names that start with `$`."""
    children = list(node.children.values())
    if depth != 0:
        return iter(children)
    keys = list(node.children)
    return (child for key, child in zip(keys, children, strict=True) if not key.startswith("$"))
