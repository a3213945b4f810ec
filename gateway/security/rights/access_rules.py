"""The rules of `security.access`, compiled: indexed by principal and instantiated for each client."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from gateway.runtime.recent import Recent
from gateway.security.identity import GROUP_PREFIX, Identity
from gateway.security.rights.filters import ANY, ONE
from gateway.security.rights.permissions import WILDCARD, ClientRules, GroupRule, Rule
from gateway.security.variables import CLIENT, COMMON_NAME, VariableSlot, parse, split, without
from gateway.settings.config import AccessRule, ConfigError
from mapping.record import INTERNAL_TOPIC_PREFIX, is_topic_name
from mapping.rules import Rules
from protocols.mqtt.topics import is_valid_filter

ACTIONS: Final = ("read", "delete", "admin", "*")
MADE_OF_A_RULE: Final = 1024  # rules that one template makes for a client with several groups or claim values
CACHED_RULES: Final = 2048


class _GroupTemplate(msgspec.Struct, frozen=True):
    """A validated group rule that may contain a variable."""

    action: str
    name: str | VariableSlot
    beginning: bool
    allow: bool

    @property
    def variables(self) -> list[str]:
        """The variables in the rule."""
        return [self.name.variable] if isinstance(self.name, VariableSlot) else []

    def rules_for(self, identity: Identity, client_id: str | None) -> Iterator[GroupRule]:
        """Yield the rules that this template makes for one client."""
        if isinstance(self.name, str):
            yield GroupRule(self.action, self.name, self.beginning, self.allow)
            return
        # If a value contained the separator, one client's prefix would match another client's names.
        names, complete = self.name.values(identity, client_id, self.name.after[:1] if self.beginning else "")
        for name in names:
            yield GroupRule(self.action, name, self.beginning, self.allow)
        if not complete and not self.allow:
            yield GroupRule(self.action, self.name.before, True, False)


class _TopicTemplate(msgspec.Struct, frozen=True):
    """A validated topic rule that may contain variables."""

    text: str
    action: str
    levels: tuple[str | VariableSlot, ...]
    allow: bool
    kafka: bool

    @property
    def variables(self) -> list[str]:
        """The variables in the rule."""
        return [level.variable for level in self.levels if isinstance(level, VariableSlot)]

    def rules_for(self, identity: Identity, client_id: str | None) -> Iterator[Rule]:
        """Yield the rules that this template makes for one client."""
        choices: list[list[str]] = []
        for level in self.levels:
            if isinstance(level, str):
                choices.append([level])
                continue
            values, complete = level.values(identity, client_id)
            if not self.allow and not complete:
                values = [ONE]
            choices.append(values)
        if math.prod(map(len, choices)) > MADE_OF_A_RULE:
            if self.allow:
                return
            choices = [values if len(values) == 1 else [ONE] for values in choices]
        for levels in itertools.product(*choices):
            yield Rule(self.action, levels, self.allow, self.kafka)


Template = _TopicTemplate | _GroupTemplate


class ListedRules:
    """The rules of `security.access` as an `authorization.Rulebook`."""

    def __init__(self, rules: Sequence[AccessRule]) -> None:
        """Compile the rules; raises ConfigError, which names `security.access[i]` (from 1), if one is not valid."""
        self._by_principal: dict[str, list[tuple[int, Template]]] = {}
        self.everything = all(rule.group is not None for rule in rules)  # there are no topic rules
        self.by_client_id = False
        self.by_certificate = False
        for number, rule in enumerate(rules):
            where = f"security.access[{number + 1}]"
            if rule.principal in ("", GROUP_PREFIX):
                raise ConfigError(f"{where}.principal: must not be empty; * means everyone")
            compiled = _topic_template(rule, where) if rule.group is None else _group_template(rule, where)
            self._by_principal.setdefault(rule.principal, []).append((number, compiled))
            self.by_client_id |= CLIENT in compiled.variables
            self.by_certificate |= COMMON_NAME in compiled.variables
        # rules without variables, shared by clients
        self._fixed: Recent[frozenset[str], ClientRules] = Recent(CACHED_RULES)

    def doubtful(self, mapping: Rules) -> list[str]:
        """Return warnings about `topic` rules that name a Kafka topic, which MQTT clients reach under another name."""
        return [
            f'security.access: topic = "{rule.text}" applies to MQTT topics for MQTT clients; the mapping'
            f" sends other topics to Kafka topic {rule.levels[0]}: use kafka = ... to mean that topic"
            for rules in self._by_principal.values()
            for _, rule in rules
            if isinstance(rule, _TopicTemplate) and not rule.kafka and _is_target(rule.levels[0], mapping)
        ]

    def may_change_for(self, identity: Identity) -> bool:
        """Return False: configured rules never change."""
        return False

    def rules_for(self, identity: Identity, client_id: str | None, host: str) -> ClientRules:
        """Return the rules that apply to one client; `host` is ignored."""
        named = frozenset(name for name in identity.principals if name in self._by_principal)
        known = self._fixed.get(named)
        if known is not None:
            return known
        numbered = sorted(itertools.chain.from_iterable(self._by_principal[name] for name in named))
        topics: list[Rule] = []
        groups: list[GroupRule] = []
        for _, template in numbered:
            if isinstance(template, _TopicTemplate):
                topics += template.rules_for(identity, client_id)
            else:
                groups += template.rules_for(identity, client_id)
        rules = ClientRules(
            publish=tuple(rule for rule in topics if rule.has_action("publish")),
            subscribe=tuple(rule for rule in topics if rule.has_action("subscribe")),
            admin=tuple(rule for rule in topics if rule.has_action("admin")),
            groups=tuple(groups),
        )
        if not any(template.variables for _, template in numbered):
            self._fixed[named] = rules
        return rules


def _is_target(level: str | VariableSlot, mapping: Rules) -> bool:
    return isinstance(level, str) and level not in (ANY, ONE) and mapping.is_target(level)


def _group_template(rule: AccessRule, where: str) -> _GroupTemplate:
    group = rule.group
    if not group:
        raise ConfigError(f"{where}.group: must not be empty; * means every group")
    if rule.action not in ACTIONS:
        raise ConfigError(f"{where}.action: {rule.action} is for topics, not for groups")
    if rule.topic != "#":
        raise ConfigError(f"{where}: a rule applies either to topics or to a group")
    text = group.removesuffix(WILDCARD)
    beginning = text != group
    if WILDCARD in text:
        raise ConfigError(f"{where}.group: {group!r} has a * that is not at its end")
    name = parse(text, f"{where}.group")
    if beginning and isinstance(name, VariableSlot) and not name.after:
        raise ConfigError(f"{where}.group: {group!r} needs a separator before the *: names may be prefixes of others")
    return _GroupTemplate(rule.action, name, beginning, rule.allow)


def _topic_template(rule: AccessRule, where: str) -> _TopicTemplate:
    if rule.action in ("read", "delete"):
        raise ConfigError(f"{where}.action: {rule.action} is for consumer groups: the rule needs a group")
    if rule.kafka is not None and rule.topic != "#":
        raise ConfigError(f"{where}: a rule has a topic or a kafka, not both")
    key, text = ("topic", rule.topic) if rule.kafka is None else ("kafka", rule.kafka)
    levels = [parse(level, f"{where}.{key}") for level in split(text)]
    if not is_valid_filter(without(text), shared=False):
        raise ConfigError(f"{where}.{key}: {text!r} is neither a name nor an MQTT filter")
    first = levels[0]
    wild = first in (ANY, ONE)
    if rule.kafka is not None and not wild:
        name = without(text).split("/")[0]
        if not is_topic_name(name.removeprefix(INTERNAL_TOPIC_PREFIX)):
            raise ConfigError(f"{where}.kafka: {text!r} can match nothing: {name!r} is not a Kafka topic name")
    if len(levels) == 1 and not wild:
        levels.append(ANY)
    return _TopicTemplate(text, rule.action, tuple(levels), rule.allow, rule.kafka is not None)
