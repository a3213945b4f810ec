"""Topic names and topic filters (section 4.7), shared subscriptions (4.8.2), and the trie that matches them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, Final, Generic, NamedTuple, TypeVar

MAX_BYTES: Final = 65_535
SHARE: Final = "$share/"

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def is_valid_name(topic: str) -> bool:
    """Whether `topic` is a valid topic name.

    It is not empty [MQTT-4.7.3-1], has no wildcard [MQTT-3.3.2-2], no U+0000 [MQTT-4.7.3-2], and is not too long
    [MQTT-4.7.3-3].
    """
    return topic != "" and "+" not in topic and "#" not in topic and "\0" not in topic and _fits(topic)


def is_valid_filter(topic_filter: str, shared: bool = True) -> bool:
    """Whether `topic_filter` is a valid topic filter.

    With `shared` (not in 3.1.1) a `$share` filter is checked by its parts [MQTT-4.8.2-1].
    """
    if shared and topic_filter.startswith(SHARE):
        return parse_share(topic_filter) is not None and _fits(topic_filter)
    if topic_filter == "" or "\0" in topic_filter or not _fits(topic_filter):
        return False
    return _has_valid_wildcards(topic_filter)


def has_wildcard(topic_filter: str) -> bool:
    """Whether a valid filter has a wildcard."""
    return "+" in topic_filter or "#" in topic_filter


def is_shared(topic_filter: str) -> bool:
    """Whether the filter is one of a shared subscription."""
    return topic_filter.startswith(SHARE)


class Shared(NamedTuple):
    """The parts of `$share/{group}/{topic_filter}`."""

    group: str
    topic_filter: str


def parse_share(topic_filter: str) -> Shared | None:
    """Split a `$share` filter into its parts.

    Returns:
        None if it is invalid: the share name is empty or has a wildcard [MQTT-4.8.2-1], [MQTT-4.8.2-2], or the rest is
        not a topic filter.
    """
    if not topic_filter.startswith(SHARE):
        return None
    group, slash, rest = topic_filter[len(SHARE) :].partition("/")
    if not group or not slash or not rest or "+" in group or "#" in group or "\0" in topic_filter:
        return None
    return Shared(group, rest) if _has_valid_wildcards(rest) else None


def _has_valid_wildcards(topic_filter: str) -> bool:
    """Whether each `+` is a whole level [MQTT-4.7.1-2], and `#` a whole last level [MQTT-4.7.1-1]."""
    if "+" not in topic_filter and "#" not in topic_filter:
        return True
    levels = topic_filter.split("/")
    last = len(levels) - 1
    for number, level in enumerate(levels):
        if len(level) > 1 and ("+" in level or "#" in level):
            return False
        if level == "#" and number != last:
            return False
    return True


def _fits(topic: str) -> bool:
    return len(topic) <= MAX_BYTES // 4 or len(topic.encode("utf-8", "surrogatepass")) <= MAX_BYTES


def _levels(topic_filter: str) -> tuple[list[str], bool]:
    """Return the levels of a filter without a final `#`, and whether there was one."""
    levels = topic_filter.split("/")
    hashed = levels[-1] == "#"
    if hashed:
        levels.pop()
    return levels, hashed


_NOTHING: Final[dict[Any, Any]] = {}
"""Shared by all empty dictionaries of nodes, and never written to: most nodes use only one of their three."""


class _FilterNode(Generic[K, V]):
    """One level of the filters that share the levels above it."""

    __slots__ = ("children", "ended", "hashed")

    def __init__(self) -> None:
        self.children: dict[str, _FilterNode[K, V]] = _NOTHING  # including `+`
        self.ended: dict[K, V] = _NOTHING  # filters that end here
        self.hashed: dict[K, V] = _NOTHING  # filters that end with `#` below this level

    def is_empty(self) -> bool:
        return not (self.children or self.ended or self.hashed)

    def child(self, level: str) -> _FilterNode[K, V]:
        """Return the node of a level; create it if it is missing."""
        node = self.children.get(level)
        if node is None:
            if self.children is _NOTHING:
                self.children = {}
            node = self.children[level] = _FilterNode()
        return node

    def entries(self, hashed: bool) -> dict[K, V]:
        """Return a writable dictionary of the subscriptions that end here, or with `#` below."""
        if hashed:
            if self.hashed is _NOTHING:
                self.hashed = {}
            return self.hashed
        if self.ended is _NOTHING:
            self.ended = {}
        return self.ended


class SubscriptionTrie(Generic[K, V]):
    """Maps topic filters to subscribers and their subscriptions, and finds those that match a topic.

    A subscriber has at most one subscription to a filter: the last one counts [MQTT-3.8.4-3]. Shared subscriptions are
    added under the filter without `$share` and group; the trie does not choose among their members.
    """

    __slots__ = ("_root", "_size")

    def __init__(self) -> None:
        self._root: _FilterNode[K, V] = _FilterNode()
        self._size = 0

    def __len__(self) -> int:
        """Return the number of subscriptions."""
        return self._size

    def add(self, topic_filter: str, subscriber: K, subscription: V) -> bool:
        """Add or replace a subscription; return whether it is new."""
        node = self._root
        levels, hashed = _levels(topic_filter)
        for level in levels:
            node = node.child(level)
        entries = node.entries(hashed)
        new = subscriber not in entries
        entries[subscriber] = subscription
        self._size += new
        return new

    def remove(self, topic_filter: str, subscriber: K) -> bool:
        """Remove a subscription and the levels that no other one uses; return whether it existed."""
        path: list[tuple[_FilterNode[K, V], str]] = []
        node = self._root
        levels, hashed = _levels(topic_filter)
        for level in levels:
            child = node.children.get(level)
            if child is None:
                return False
            path.append((node, level))
            node = child
        entries = node.hashed if hashed else node.ended
        if subscriber not in entries:
            return False
        del entries[subscriber]
        self._size -= 1
        while path and node.is_empty():
            node, level = path.pop()
            del node.children[level]
        return True

    def match(self, topic: str) -> list[tuple[K, V]]:
        """Return the subscriptions that match `topic`; a subscriber is listed once for each of its matches."""
        matches: list[tuple[K, V]] = []
        levels = topic.split("/")
        nodes = [self._root]
        reserved = topic.startswith("$")  # not matched by a wildcard at the first level [MQTT-4.7.2-1]
        for number, level in enumerate(levels):
            below = []
            wild = number > 0 or not reserved
            for node in nodes:
                if wild:
                    if node.hashed:
                        matches.extend(node.hashed.items())
                    child = node.children.get("+")
                    if child is not None:
                        below.append(child)
                child = node.children.get(level)
                if child is not None:
                    below.append(child)
            nodes = below
            if not nodes:
                return matches
        for node in nodes:
            if node.ended:
                matches.extend(node.ended.items())
            if node.hashed:  # `sport/#` also matches `sport` (section 4.7.1.2)
                matches.extend(node.hashed.items())
        return matches

    def __iter__(self) -> Iterator[tuple[str, K, V]]:
        """Iterate over all subscriptions, as filter, subscriber, subscription."""
        waiting: list[tuple[str, _FilterNode[K, V]]] = [("", self._root)]
        while waiting:
            prefix, node = waiting.pop()
            for subscriber, subscription in node.ended.items():
                yield prefix[:-1], subscriber, subscription
            for subscriber, subscription in node.hashed.items():
                yield prefix + "#", subscriber, subscription
            waiting.extend((f"{prefix}{level}/", child) for level, child in node.children.items())
