"""Maps MQTT topics to Kafka topics and keys, and back: `[[mapping.rules]]` (the first match wins) and a default.

A rule's `mqtt` pattern has MQTT wildcards and named levels (`factory/{site}/{machine}/#`), never regular expressions.
In its `topic` and `key`, `{name}` is replaced by the level of that name. Rules are compiled and checked once; a rule
that can never make a legal Kafka name is refused with its number.

By default the first level is the Kafka topic and the rest is the key. If the first level is not a legal Kafka name, or
not one that may be used (`TopicNames`), the record goes to the catch-all topic with the whole MQTT topic as its key.
The way back needs no header. Filters for a name with a dot are read in both places, since a change of
`mapping.dotted_topics`, or of its default, moves the name from one to the other (ADR 0109).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from mapping.record import MQTT_TOPIC, Headers, is_topic_name, text_of

MANY: Final = "*"  # in a pattern of dotted names: any characters
PLACEHOLDER: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


class RuleError(ValueError):
    """A mapping rule or name that cannot be used; the text names it."""


class TopicNames:
    """The Kafka names that MQTT topics may map to, and that clients may create. They depend on the configuration only.

    Kafka's metrics write `.` as `_`, so Kafka refuses to create a topic whose name differs from another only in that.
    A configured name or a rule's template settles this beforehand: it is chosen, and no name that collides with it may
    be used. Names that only match a pattern may be used like those without dots: Kafka refuses the second of two.
    """

    def __init__(self, dotted: Iterable[str] | None, templates: Sequence[str] = ()) -> None:
        """Take the names and patterns of names with dots; in a pattern `*` stands for any characters.

        None allows every legal name: no topics are created. `templates` are topics of rules, with placeholders `{name}`
        for levels. A template with a dot is chosen for all names that it can make from levels without dots; if two
        templates can make a name, the first is.
        """
        self._every = dotted is None
        self._exact: dict[str, str] = {}
        self._allowed: list[re.Pattern[str]] = []
        for name in dotted or ():
            if MANY in name:
                self._allowed.append(re.compile(".*".join(map(re.escape, name.split(MANY)))))
                continue
            other = self._exact.setdefault(_folded(name), name)
            if other != name:
                raise RuleError(f"mapping.dotted_topics: {name!r} and {other!r} collide in Kafka")
        # with what matches the names that the template makes, when dots are replaced by underscores
        self._templates = [(text, _pattern(_folded(text), "[A-Za-z0-9_-]*")) for text in templates if "." in text]

    def fits(self, name: str) -> bool:
        """Whether `name` is a legal Kafka name that may be used."""
        if not is_topic_name(name):
            return False
        if self._every:
            return True
        folded = _folded(name)
        chosen = self._exact.get(folded)
        if chosen is None:
            if "." in name and any(pattern.fullmatch(name) for pattern in self._allowed):
                return True
            made = ((text, back.fullmatch(folded)) for text, back in self._templates)
            chosen = next((text.format_map(match.groupdict()) for text, match in made if match is not None), folded)
        return chosen == name

    def may_have_moved(self, name: str) -> bool:
        """Whether a name that fits did not under another configuration, so that records may be in the catch-all."""
        return "." in name and not self._every


def _pattern(template: str, level: str = "[^/]*?", bound: Mapping[str, str] = MappingProxyType({})) -> re.Pattern[str]:
    """Compile what matches the texts that a template makes from levels, which are groups of the match.

    `level` matches a level; those of `bound` have one value.
    """
    parts: list[str] = []
    seen: set[str] = set()
    for index, part in enumerate(PLACEHOLDER.split(template)):  # literals, with the placeholders' names between them
        if not index % 2:
            parts.append(re.escape(part))
        elif part in bound:
            parts.append(re.escape(bound[part]))
        else:
            parts.append(f"(?P={part})" if part in seen else f"(?P<{part}>{level})")
            seen.add(part)
    return re.compile("".join(parts))


def _folded(name: str) -> str:
    return name.replace(".", "_")


_CACHE_LIMIT: Final = 16 * 1024 * 1024  # characters of cached topic names, with `_ENTRY` for each
_ENTRY: Final = 256  # so there are at most 65,536 of them
_MQTT_TOPIC_LIMIT: Final = 65_535  # bytes [MQTT-4.7.3-3]
MULTI: Final = "#"
SINGLE: Final = "+"


class Destination(NamedTuple):
    """The Kafka topic and key of an MQTT topic. None is the null key."""

    topic: str
    key: bytes | None


class RuleText(NamedTuple):
    """A rule as written."""

    mqtt: str
    topic: str
    key: str | None = None


class _Rule:
    """One compiled rule."""

    __slots__ = ("_key", "_key_back", "_levels", "_multi", "_named", "_reversible", "_topic_back", "number", "topic")

    def __init__(self, number: int, text: RuleText) -> None:
        self.number = number
        levels = text.mqtt.split("/")
        self._multi = levels[-1] == MULTI
        if self._multi:
            levels.pop()
        self._levels: list[str | None] = []  # a literal, or None for any one level
        self._named: dict[str, int] = {}
        self._reversible = True
        for index, level in enumerate(levels):
            name = PLACEHOLDER.fullmatch(level)
            if name:
                if name[1] in self._named:
                    raise self._error(f"level {{{name[1]}}} appears twice in {text.mqtt!r}")
                self._named[name[1]] = index
                self._levels.append(None)
            elif level == SINGLE:
                self._reversible = False
                self._levels.append(None)
            elif SINGLE in level or MULTI in level or "{" in level or "}" in level:
                raise self._error(f"{level!r} in {text.mqtt!r} is neither a level, nor +, a final #, nor {{name}}")
            else:
                self._levels.append(level)
        if not levels:
            raise self._error("a pattern that matches every topic needs no rule: set mapping.catch_all_topic")
        self._check_names(text.topic, "topic")
        if text.key is not None:
            self._check_names(text.key, "key")
        if not is_topic_name(PLACEHOLDER.sub("x", text.topic)):
            raise self._error(f"{text.topic!r} can never be a legal Kafka topic name")
        self.topic = text.topic
        self._key = text.key
        self._topic_back = _pattern(text.topic)
        self._key_back = None if text.key is None else _pattern(text.key)
        restored = set(PLACEHOLDER.findall(text.topic)) | set(PLACEHOLDER.findall(text.key or ""))
        if not self._named.keys() <= restored:
            self._reversible = False

    def forward(self, levels: Sequence[str], topic: str, names: TopicNames) -> Destination | None:
        """Return the destination of an MQTT topic; None if the rule does not match or makes an unusable name."""
        count = len(self._levels)
        if len(levels) < count or (len(levels) > count and not self._multi):
            return None
        for want, level in zip(self._levels, levels, strict=False):
            if want is not None and want != level:
                return None
        kafka = self._fill(self.topic, levels)
        if not names.fits(kafka):
            return None
        key = topic if self._key is None else self._fill(self._key, levels)
        return Destination(kafka, key.encode())

    def backward(self, topic: str, key: bytes | None, names: TopicNames) -> str | None:
        """Return the MQTT topic of a record without our header, or None if the rule cannot be reversed for it."""
        match = self._topic_back.fullmatch(topic)
        if match is None or key is None or len(key) > _MQTT_TOPIC_LIMIT:
            return None
        text = text_of(key)
        if text is None:
            return None
        if self._key_back is None:  # the key is the whole MQTT topic
            destination = self.forward(text.split("/"), text, names)
            return text if destination is not None and destination.topic == topic else None
        if not self._reversible:
            return None
        from_key = self._key_back.fullmatch(text)
        if from_key is None:
            return None
        values = match.groupdict()
        for name, value in from_key.groupdict().items():
            if values.setdefault(name, value) != value:
                return None
        by_index = {index: values[name] for name, index in self._named.items()}
        return "/".join(by_index[index] if level is None else level for index, level in enumerate(self._levels))

    def may_fill(self, topic: str) -> bool:
        """Whether the rule maps some MQTT topic to this Kafka topic."""
        return self._topic_back.fullmatch(topic) is not None

    def candidates(self, levels: Sequence[str]) -> re.Pattern[str] | None:
        """Return a pattern of the Kafka topics that the rule maps matches of an MQTT filter to, or None."""
        bound: dict[str, str] = {}
        names = {index: name for name, index in self._named.items()}
        for index, want in enumerate(self._levels):
            if index >= len(levels):
                return None
            have = levels[index]
            if have == MULTI:
                break
            if have == SINGLE:
                continue
            if want is not None and want != have:
                return None
            if index in names:
                bound[names[index]] = have
        else:
            rest = levels[len(self._levels) :]
            if rest and not self._multi and rest != [MULTI]:
                return None
        return _pattern(self.topic, bound=bound)

    def _fill(self, template: str, levels: Sequence[str]) -> str:
        return PLACEHOLDER.sub(lambda name: levels[self._named[name[1]]], template)

    def _check_names(self, template: str, what: str) -> None:
        for name in PLACEHOLDER.findall(template):
            if name not in self._named:
                raise self._error(f"{what} {template!r} uses {{{name}}}, which is not a level of the mqtt pattern")
        if "{" in PLACEHOLDER.sub("", template) or "}" in PLACEHOLDER.sub("", template):
            raise self._error(f"{what} {template!r} has an unmatched brace")

    def _error(self, why: str) -> RuleError:
        return RuleError(f"mapping.rules[{self.number}]: {why}")


class Rules:
    """The compiled rules. Pure: the same topic always has the same destination."""

    def __init__(
        self, rules: Iterable[RuleText] = (), *, catch_all: str = "mqtt", dotted: Iterable[str] | None = None
    ) -> None:
        """Compile and check; `catch_all` is the Kafka topic of MQTT topics without one of their own.

        `dotted` are the names with dots, and patterns of them, that may be Kafka topics (see `TopicNames`).

        Raises:
            RuleError: Names the first rule that cannot be used.
        """
        if not is_topic_name(catch_all):
            raise RuleError(f"mapping.catch_all_topic: {catch_all!r} is not a legal Kafka topic name")
        self._rules = [_Rule(number, text) for number, text in enumerate(rules, 1)]
        self._catch_all = catch_all
        dotted = None if dotted is None else tuple(dotted)
        for name in dotted or ():
            if not is_topic_name(name.replace(MANY, "x")):
                raise RuleError(f"mapping.dotted_topics: {name!r} is no legal Kafka topic name, nor a pattern of some")
        chosen = None if dotted is None else (catch_all, *dotted)
        self._names = TopicNames(chosen, [rule.topic for rule in self._rules])
        self._forward: dict[str, Destination] = {}
        self._forward_size = 0

    def destination(self, mqtt_topic: str) -> Destination:
        """Return the destination of a valid MQTT topic name without wildcards."""
        destination = self._forward.get(mqtt_topic)
        if destination is None:
            self._forward_size += len(mqtt_topic) + _ENTRY
            if self._forward_size > _CACHE_LIMIT:
                self._forward.clear()
                self._forward_size = len(mqtt_topic) + _ENTRY
            destination = self._forward[mqtt_topic] = self._find(mqtt_topic)
        return destination

    def mqtt_topic(self, topic: str, key: bytes | None, headers: Headers = ()) -> str | None:
        """Return the MQTT topic name of a record; None if it has none (its key is not UTF-8 or has a wildcard)."""
        for name, value in headers:
            if name == MQTT_TOPIC and value:
                return _topic_name(value)
        for rule in self._rules:
            topic_name = rule.backward(topic, key, self._names)
            if topic_name is not None:
                return topic_name if _is_plain(topic_name) and len(topic_name.encode()) <= _MQTT_TOPIC_LIMIT else None
        if key is None:
            return topic
        text = _topic_name(key)
        if topic == self._catch_all:
            return text or None
        if (text is None and key) or len(topic) + 1 + len(key) > _MQTT_TOPIC_LIMIT:
            return None
        return f"{topic}/{text or ''}"

    def kafka_topics(self, mqtt_filter: str, known: Iterable[str]) -> set[str]:
        """Return those of the `known` Kafka topics that may hold records for the MQTT filter.

        The result may have too many topics but never too few: each record is still matched by its own MQTT topic.
        """
        levels = mqtt_filter.split("/")
        patterns = [pattern for rule in self._rules if (pattern := rule.candidates(levels)) is not None]
        first = levels[0]
        anything = first in (SINGLE, MULTI)
        literal = () if anything else self._default_topics(first)
        return {
            topic
            for topic in known
            if anything or topic in literal or any(pattern.fullmatch(topic) for pattern in patterns)
        }

    def may_create(self, topic: str) -> bool:
        """Whether a client may create a Kafka topic of this name, in any protocol."""
        return self._names.fits(topic)

    def own_name(self, whole: str) -> str:
        """Return an MQTT topic or client id without its tenant's mount point; see `mapping.tenants`."""
        return whole

    def whole_client(self, client_id: str, mqtt_topic: str) -> str:
        """Return the client id with the mount point of the tenant that `mqtt_topic` belongs to."""
        return client_id

    def is_target(self, topic: str) -> bool:
        """Whether a Kafka topic may hold MQTT topics whose first level is another one."""
        return topic == self._catch_all or any(rule.may_fill(topic) for rule in self._rules)

    def kafka_filter(self, mqtt_filter: str) -> list[str] | None:
        """Return the levels of the filter over `topic/key` that selects the same Kafka records as an MQTT filter.

        None if no single filter does: the first level is a wildcard, or a topic that MQTT does not write to though
        other clients may, or a rule may map its topics elsewhere.
        """
        levels = mqtt_filter.split("/")
        if levels[0] in (SINGLE, MULTI) or any(rule.candidates(levels) is not None for rule in self._rules):
            return None
        first, *other = self._default_topics(levels[0])
        if first != self._catch_all:
            return levels  # what lies in the catch-all since before is checked message by message
        return None if other else [first, *levels]

    def literal_topics(self, mqtt_filter: str) -> tuple[str, ...]:
        """Return the Kafka topics of a filter that do not depend on the existing topics; none if they do.

        The first is that to which MQTT publishes.
        """
        levels = mqtt_filter.split("/")
        if SINGLE not in levels and MULTI not in levels:
            first, (default, *others) = self.destination(mqtt_filter).topic, self._default_topics(levels[0])
            return tuple(dict.fromkeys((first, *((default, *others) if others else ()))))
        if levels[0] in (SINGLE, MULTI) or self._rules:
            return ()
        return self._default_topics(levels[0])

    def fixed_topics(self, mqtt_filter: str) -> set[str] | None:
        """Return all Kafka topics that may hold records for the MQTT filter; None if they depend on existing topics."""
        return None if self._rules else set(self.literal_topics(mqtt_filter)) or None

    def _find(self, mqtt_topic: str) -> Destination:
        levels = mqtt_topic.split("/")
        for rule in self._rules:
            destination = rule.forward(levels, mqtt_topic, self._names)
            if destination is not None:
                return destination
        if self._is_own_topic(levels[0]):
            rest = "/".join(levels[1:])
            return Destination(levels[0], rest.encode() if len(levels) > 1 else None)
        return Destination(self._catch_all, mqtt_topic.encode())

    def _is_own_topic(self, level: str) -> bool:
        # A first level with the catch-all's name must go to the catch-all, or the way back would be ambiguous.
        return level != self._catch_all and self._names.fits(level)

    def _default_topics(self, level: str) -> tuple[str, ...]:
        """Return the Kafka topics for a first level without rules, first that to which MQTT publishes.

        Others may write to a name to which MQTT does not, and MQTT may have written elsewhere before.
        """
        if self._is_own_topic(level):
            return (level, self._catch_all) if self._names.may_have_moved(level) else (level,)
        return (self._catch_all, level) if level != self._catch_all and is_topic_name(level) else (self._catch_all,)


def _is_plain(text: str) -> bool:
    return bool(text) and MULTI not in text and SINGLE not in text and "\0" not in text


def _topic_name(raw: bytes) -> str | None:
    """Decode an MQTT topic name [MQTT-4.7.3-1, MQTT-3.3.2-2]; None if it is not valid."""
    text = text_of(raw)
    return text if text is not None and _is_plain(text) and len(raw) <= _MQTT_TOPIC_LIMIT else None
