"""Recognises a topic that was deleted and made again under its name, by its id (KIP-516)."""

from __future__ import annotations


class TopicIdentity:
    """The id of a topic as of the last metadata that told one. Offsets count only in the topic that they are of."""

    __slots__ = ("_former", "current")

    def __init__(self, found: bytes) -> None:
        """`found`: see `Lookup.identity`."""
        self.current = found
        self._former = b""

    def becomes(self, found: bytes) -> bool:
        """Whether the topic was made again since the last look; remembers the id.

        Nothing is told by b"", nor by the id before this one: a broker may be behind the others.
        """
        if not found or found in {self.current, self._former}:
            return False
        self._former, self.current = self.current, found
        return bool(self._former)
