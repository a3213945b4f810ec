"""Who may do what: the access list, one for the three protocols.

A rule's `topic` is an MQTT filter over names in the words of the protocol that asks: MQTT topics for MQTT, and for AMQP
and HTTP the Kafka topic, with the record's key behind a slash. Under the default mapping both are the same. A rule's
`kafka` is such a filter over Kafka's names for every protocol, MQTT too. A name of one level (`sensors`) stands for
all that is below it (`sensors/#`).

The first rule that fits the principal, the action and the name decides. Without any rule everything is allowed to
everyone who came in; as soon as there is one, what no rule allows is denied.

Who reads whole topics (AMQP receivers, consumer groups) is granted them only as a whole: the first rule that has any
name in common with the topic must be an allow rule that covers all of it, or be followed by one that does, with no deny
rule that overlaps before it. Two allow rules that cover it only together do not grant it. Filters of MQTT are judged by
`gateway.security.permissions`.

A rule's `group` is a consumer group's name, or the beginning of names and a final `*`; it says who else than the
owner (`gateway.security.group_names`) may read in the group, delete it, or look at it. Again the first that fits
decides.

Where there are tenants, a `topic` and a `group` are about the client's own names: one rule holds in each tenant. A
`kafka` is about Kafka's whole names. Whatever the rules say, nobody has a right on what its names cannot mean
(`mapping.tenants`).

Both kinds may have variables (`gateway.security.variables`): what a rule is for one client is made when it comes in.
Rules are found by the principals that they are about, so that the others cost it nothing.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Final, Literal

import msgspec

from gateway.config import AccessRule, ConfigError
from gateway.security.filters import ANY, ONE
from gateway.security.identity import GROUP_PREFIX, Identity
from gateway.security.permissions import MqttPermission, Permission, Rule
from gateway.security.variables import CLIENT, COMMON_NAME, Slot, parse, split, without
from mapping.record import INTERNAL_TOPIC_PREFIX, is_topic_name
from mapping.rules import Rules
from mapping.tenants import NO_TENANTS, Names, Tenancy
from protocols.mqtt.topics import is_valid_filter

GroupAction = Literal["read", "delete", "admin"]
"""To be a member of it and commit for it; to end it; to look at it as an administrator."""

ACTIONS: Final = ("read", "delete", "admin", "*")
WILDCARD: Final = "*"
CACHED_GRANTS: Final = 2048
MADE_OF_A_RULE: Final = 1024  # rules for one client, where it has several groups or a claim is a list


class GroupRule(msgspec.Struct, frozen=True):
    """A rule about groups as it is for one client; `beginning`: `name` is only how names begin."""

    action: str
    name: str
    beginning: bool
    allow: bool

    def speaks_of(self, group: str) -> bool:
        """Whether the rule is about this group."""
        return group.startswith(self.name) if self.beginning else group == self.name


class GroupPermission:
    """What the rules say about one identity."""

    __slots__ = ("_names", "_rules")

    def __init__(self, rules: Sequence[GroupRule], names: Names) -> None:
        self._rules = rules
        self._names = names

    def __call__(self, action: GroupAction, group: str) -> bool | None:
        """The verdict of the first rule that fits; None: there is none, so that the group's owner alone may."""
        if not self._names.has(group):
            return False
        own = self._names.own(group)
        for rule in self._rules:
            if rule.action in (WILDCARD, action) and rule.speaks_of(own):
                return rule.allow
        return None


class _GroupTemplate(msgspec.Struct, frozen=True):
    """A rule about groups as written, checked."""

    action: str
    name: str | Slot
    beginning: bool
    allow: bool

    @property
    def variables(self) -> list[str]:
        """Those in it."""
        return [self.name.variable] if isinstance(self.name, Slot) else []

    def rules_for(self, identity: Identity, client_id: str | None) -> Iterator[GroupRule]:
        """What it is for one client."""
        if isinstance(self.name, str):
            yield GroupRule(self.action, self.name, self.beginning, self.allow)
            return
        # With the separator in a value, the beginning of one client's names would be that of another's.
        names, complete = self.name.values(identity, client_id, self.name.after[:1] if self.beginning else "")
        for name in names:
            yield GroupRule(self.action, name, self.beginning, self.allow)
        if not complete and not self.allow:
            yield GroupRule(self.action, self.name.before, True, False)


class _TopicTemplate(msgspec.Struct, frozen=True):
    """A rule about topics as written, checked."""

    text: str
    action: str
    levels: tuple[str | Slot, ...]
    allow: bool
    kafka: bool

    @property
    def variables(self) -> list[str]:
        """Those in it."""
        return [level.variable for level in self.levels if isinstance(level, Slot)]

    def rules_for(self, identity: Identity, client_id: str | None) -> Iterator[Rule]:
        """What it is for one client."""
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


class _ClientRules(msgspec.Struct, frozen=True):
    """The rules for one client, by what they are about."""

    publish: Sequence[Rule]
    subscribe: Sequence[Rule]
    admin: Sequence[Rule]
    groups: Sequence[GroupRule]


class Grant:
    """What one client may do. Take one per connection: a known `publish(topic, key)` is a look-up or two."""

    __slots__ = ("admin", "group", "identity", "mqtt_publish", "mqtt_subscribe", "names", "publish", "subscribe")

    def __init__(
        self, identity: Identity, names: Names, rules: _ClientRules, mapping: Rules, *, everything: bool, partial: bool
    ) -> None:
        self.identity = identity  # whose
        self.names = names  # from what the client calls things to whole names, which all of these are about
        self.group = GroupPermission(rules.groups, names)
        self.publish = Permission(rules.publish, everything, names)  # publish, subscribe, admin: in Kafka's names
        self.subscribe = Permission(rules.subscribe, everything, names)
        self.admin = Permission(rules.admin, everything, names)
        # mqtt_publish, mqtt_subscribe: in those of MQTT
        self.mqtt_publish = MqttPermission(rules.publish, everything, mapping, names, partial=partial)
        self.mqtt_subscribe = MqttPermission(rules.subscribe, everything, mapping, names, partial=partial)


class AccessList:
    """The rules of `security.access`, compiled and checked."""

    def __init__(
        self,
        rules: Sequence[AccessRule] = (),
        mapping: Rules | None = None,
        *,
        partial: bool = True,
        tenancy: Tenancy = NO_TENANTS,
    ) -> None:
        """Compile the rules.

        `mapping` leads from MQTT topics to Kafka (None: the default one). With `partial` an MQTT filter is granted of
        which a part is denied, and that part is not delivered. `tenancy`: the names of each tenant's clients.

        Raises:
            ConfigError: a rule that cannot be meant; names `security.access[i]`.
        """
        self._mapping = mapping if mapping is not None else Rules()
        self._partial = partial
        self._tenancy = tenancy
        self._by_principal: dict[str, list[tuple[int, Template]]] = {}
        self._everything = all(rule.group is not None for rule in rules)  # no rule is about topics
        self._by_client_id = False
        self.by_certificate = False  # a rule asks for the client's certificate, beside the identity
        for number, rule in enumerate(rules):
            compiled = _topic_template(rule, number) if rule.group is None else _group_template(rule, number)
            self._by_principal.setdefault(rule.principal, []).append((number, compiled))
            self._by_client_id |= CLIENT in compiled.variables
            self.by_certificate |= COMMON_NAME in compiled.variables
        self._grants: dict[Identity, Grant] = {}
        self._fixed: dict[frozenset[str], _ClientRules] = {}  # of rules without variables: clients share them

    def doubtful(self) -> list[str]:
        """What to warn of: rules about a topic that seem to mean Kafka's, which for MQTT clients has another name."""
        return [
            f'security.access: topic = "{rule.text}" is about MQTT topics for MQTT clients; the mapping'
            f" leads others to Kafka topic {rule.levels[0]}: write kafka = ... if you mean that"
            for rules in self._by_principal.values()
            for _, rule in rules
            if isinstance(rule, _TopicTemplate) and not rule.kafka and self._is_target(rule.levels[0])
        ]

    def _is_target(self, level: str | Slot) -> bool:
        return isinstance(level, str) and level not in (ANY, ONE) and self._mapping.is_target(level)

    def for_client(self, identity: Identity, client_id: str | None = None) -> Grant:
        """The rights of a client; those that its client id does not change are shared by all its connections."""
        if client_id is not None and self._by_client_id:
            return self._grant(identity, client_id)  # the connection keeps it
        grant = self._grants.get(identity)
        if grant is None:
            if len(self._grants) >= CACHED_GRANTS:
                self._grants.clear()  # connections keep theirs
            grant = self._grants[identity] = self._grant(identity, None)
        return grant

    def _grant(self, identity: Identity, client_id: str | None) -> Grant:
        rules = self._rules_for(identity, client_id)
        names = self._tenancy.names(identity.tenant)
        return Grant(identity, names, rules, self._mapping, everything=self._everything, partial=self._partial)

    def _rules_for(self, identity: Identity, client_id: str | None) -> _ClientRules:
        named = frozenset(name for name in identity.principals if name in self._by_principal)
        known = self._fixed.get(named)
        if known is not None:
            return known
        found = sorted(itertools.chain.from_iterable(self._by_principal[name] for name in named), key=_number)
        topics: list[Rule] = []
        groups: list[GroupRule] = []
        for _, template in found:
            if isinstance(template, _TopicTemplate):
                topics += template.rules_for(identity, client_id)
            else:
                groups += template.rules_for(identity, client_id)
        rules = _ClientRules(
            publish=tuple(rule for rule in topics if rule.concerns("publish")),
            subscribe=tuple(rule for rule in topics if rule.concerns("subscribe")),
            admin=tuple(rule for rule in topics if rule.concerns("admin")),
            groups=tuple(groups),
        )
        if not any(template.variables for _, template in found):
            if len(self._fixed) >= CACHED_GRANTS:
                self._fixed.clear()
            self._fixed[named] = rules
        return rules


_number = operator.itemgetter(0)


def _group_template(rule: AccessRule, number: int) -> _GroupTemplate:
    where = f"security.access[{number}]"
    group = rule.group
    if not group:
        raise ConfigError(f"{where}.group: must not be empty; * is every group")
    _check_principal(rule, where)
    if rule.action not in ACTIONS:
        raise ConfigError(f"{where}.action: {rule.action} is for topics, not for groups")
    if rule.topic != "#":
        raise ConfigError(f"{where}: a rule is about topics or about a group, not about both")
    text = group.removesuffix(WILDCARD)
    beginning = text != group
    if WILDCARD in text:
        raise ConfigError(f"{where}.group: {group!r} has a * that is not at its end")
    name = parse(text, f"{where}.group")
    if beginning and isinstance(name, Slot) and not name.after:
        raise ConfigError(f"{where}.group: {group!r} needs a separator before the *: one name begins like another")
    return _GroupTemplate(rule.action, name, beginning, rule.allow)


def _topic_template(rule: AccessRule, number: int) -> _TopicTemplate:
    where = f"security.access[{number}]"
    _check_principal(rule, where)
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
            raise ConfigError(f"{where}.kafka: {text!r} can match nothing: {name!r} is no Kafka topic")
    if len(levels) == 1 and not wild:
        levels.append(ANY)
    return _TopicTemplate(text, rule.action, tuple(levels), rule.allow, rule.kafka is not None)


def _check_principal(rule: AccessRule, where: str) -> None:
    if rule.principal in ("", GROUP_PREFIX):
        raise ConfigError(f"{where}.principal: must not be empty; * is everyone")
