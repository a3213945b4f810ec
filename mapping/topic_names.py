"""Which Kafka names MQTT topics may lead to, so that no two of them collide.

Kafka's metrics write `.` as `_`: it takes names that differ in nothing else for one, and refuses to make the second. Of
such names one is chosen, by the configuration alone, so that the choice is the same whatever is there already.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from mapping.record import is_topic_name

PLACEHOLDER: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


class CollisionError(ValueError):
    """Two names of the configuration that collide."""


class TopicNames:
    """The chosen names."""

    def __init__(self, dotted: Iterable[str] | None, templates: Sequence[str] = ()) -> None:
        """Choose.

        Args:
            dotted: the names with dots that are chosen; None: every legal name is as good as any other, since none is
                made.
            templates: texts of rules, in which `{name}` stands for a level. One with a dot is chosen for all names
                that it can make of levels without dots, the first one for names that two can make.
        """
        self._every = dotted is None
        self._exact: dict[str, str] = {}
        for name in dotted or ():
            other = self._exact.setdefault(_folded(name), name)
            if other != name:
                raise CollisionError(f"{name!r} and {other!r} are one name to Kafka")
        self._templates = [] if self._every else [_Template(text) for text in templates if "." in text]

    def fits(self, name: str) -> bool:
        """Whether `name` is a legal Kafka name, and the chosen one of those that it collides with."""
        if not is_topic_name(name):
            return False
        if self._every:
            return True
        folded = _folded(name)
        chosen = self._exact.get(folded)
        if chosen is None:
            chosen = next((made for one in self._templates if (made := one.name(folded)) is not None), folded)
        return chosen == name


class _Template:
    """A rule's topic with dots."""

    __slots__ = ("_back", "_parts")

    def __init__(self, text: str) -> None:
        self._parts = PLACEHOLDER.split(text)  # literals, and between them the placeholders' names
        pattern: list[str] = []
        seen: dict[str, int] = {}
        for index, part in enumerate(self._parts):
            if not index % 2:
                pattern.append(re.escape(_folded(part)))
            elif part in seen:
                pattern.append(f"\\{seen[part]}")
            else:
                seen[part] = len(seen) + 1
                pattern.append("([A-Za-z0-9_-]*)")
        self._back = re.compile("".join(pattern))

    def name(self, folded: str) -> str | None:
        """The name that it makes, of those that are `folded` with underscores for dots."""
        found = self._back.fullmatch(folded)
        if found is None:
            return None
        values: dict[str, str] = {}
        groups = iter(found.groups())
        for part in self._parts[1::2]:
            if part not in values:
                values[part] = next(groups)
        return "".join(values[part] if index % 2 else part for index, part in enumerate(self._parts))


def _folded(name: str) -> str:
    return name.replace(".", "_")
