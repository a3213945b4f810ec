"""The access list: authorizes clients, with the same rules for the three protocols.

A rule's `topic` is an MQTT filter over the names that the client's protocol uses: MQTT topics for MQTT; for AMQP and
HTTP the Kafka topic, a slash and the record's key. Under the default mapping both are the same. A rule's `kafka` is
such a filter over Kafka's names for every protocol, including MQTT. A name of one level (`sensors`) includes everything
below it (`sensors/#`).

The first rule that matches the principal, the action and the name decides. Without any rules every authenticated client
may do everything; with rules, whatever no rule allows is denied.

Clients that read whole topics (AMQP receivers, consumer groups) need the right to the whole topic: of the rules that
overlap the topic, an allow rule that covers all of it must come before any deny rule. Two allow rules that cover the
topic only together do not suffice. `gateway.security.rights.permissions` decides about MQTT filters.

A rule's `group` is a consumer group's name, or a prefix followed by `*`. It decides which principals besides the owner
(`group_names`) may read in the group, delete it or inspect it. Again the first matching rule decides.

With tenants, `topic` and `group` apply to the client's own names, so one rule holds in every tenant; `kafka` applies to
Kafka's full names. No rule can give a client rights outside its tenant's namespace (`mapping.tenants`).

Rules may have variables (`gateway.security.variables`), which are replaced when a client logs in. Rules are indexed by
principal, so the rules of other principals cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, Protocol
from weakref import WeakSet

from gateway.runtime.recent import Recent
from gateway.runtime.turns import in_turns
from gateway.security.fair_queue import Unavailable
from gateway.security.identity import Identity
from gateway.security.rights.access_rules import ListedRules
from gateway.security.rights.permissions import (
    WILDCARD,
    ClientRules,
    GroupAction,
    MqttPermission,
    Operation,
    Permission,
    Rule,
)
from gateway.security.throttle import host_of
from gateway.settings.config import AccessRule
from mapping.rules import Rules
from mapping.tenants import NO_TENANTS, Names, Tenancy

CACHED_GRANTS: Final = 2048


class Grant:
    """The rights of one client, obtained once per connection. A cached `publish(topic, key)` is one or two look-ups."""

    __slots__ = (
        "__weakref__", "_rules", "admin", "host", "identity", "mqtt_publish", "mqtt_subscribe", "names",
        "publish", "subscribe",
    )  # fmt: skip

    def __init__(
        self,
        identity: Identity,
        names: Names,
        rules: ClientRules,
        mapping: Rules,
        *,
        everything: bool,
        partial: bool,
        host: str = "",
    ) -> None:
        self.identity = identity  # the client
        self.host = host  # the client's host, if rules depend on it
        self.names = names  # maps the client's names to full names, which the permissions use
        self._rules = rules
        self.publish = Permission(rules.publish, everything, names)  # publish, subscribe, admin take Kafka's names
        self.subscribe = Permission(rules.subscribe, everything, names)
        self.admin = Permission(rules.admin, everything, names)
        # mqtt_publish, mqtt_subscribe take MQTT's names
        self.mqtt_publish = MqttPermission(rules.publish, everything, mapping, names, partial=partial)
        self.mqtt_subscribe = MqttPermission(rules.subscribe, everything, mapping, names, partial=partial)

    def renew(self, rules: ClientRules) -> bool:
        """Replace the rules in place. Returns whether they differ from the previous ones."""
        if rules == self._rules:
            return False
        self._rules = rules
        self.publish.renew(rules.publish)
        self.subscribe.renew(rules.subscribe)
        self.admin.renew(rules.admin)
        self.mqtt_publish.renew(rules.publish)
        self.mqtt_subscribe.renew(rules.subscribe)
        return True

    def group(self, action: GroupAction, group: str) -> bool | None:
        """Return the decision of the first matching rule. None means no rule matches, so only the group's owner may."""
        if not self.names.has(group):
            return False
        own = self.names.own(group)
        for rule in self._rules.groups:
            if rule.action in (WILDCARD, action) and rule.applies_to(group if rule.kafka else own):
                return rule.allow
        return None

    def may_administer(self, operation: Operation, topic: str) -> bool:
        """Return whether the client may perform the operation on a Kafka topic."""
        operations = self._rules.operations
        if operations is None:
            return self.admin.whole_topic(topic)
        return self._only(operations[operation]).whole_topic(topic)

    def visible_topics(self, topics: Sequence[str]) -> list[str]:
        """Return those of the Kafka topics whose existence the client may see."""
        operations = self._rules.operations
        rights = (self.subscribe, self.publish) if operations is None else (self._only(operations["describe"]),)
        return [topic for topic in topics if any(right.some(topic) for right in rights)]

    def _only(self, rules: Sequence[Rule]) -> Permission:
        """Return an uncached permission, for rare checks."""
        return Permission(rules, names=self.names)

    def may_transact(self, name: str) -> bool:
        """Return whether the client may use transactions under this name (a transactional id)."""
        rules = self._rules.transactions
        return rules is None or next((rule.allow for rule in rules if rule.applies_to(name)), False)


class Rulebook(Protocol):
    """A source of rules."""

    everything: bool  # there are no topic rules, so every client may do everything
    by_client_id: bool  # rules depend on the client id
    by_certificate: bool  # rules depend on the client's certificate in addition to the identity

    def rules_for(self, identity: Identity, client_id: str | None, host: str) -> ClientRules:
        """Return the rules that apply to one client connecting from `host`."""
        ...

    def may_change_for(self, identity: Identity) -> bool:
        """Return whether the client's rules may differ from those of the previous rulebook."""
        ...


class AccessList:
    """The rights of identities, from the rules of `security.access` or from rules that change at run time (`use`)."""

    def __init__(
        self,
        rules: Sequence[AccessRule] | None = (),
        mapping: Rules | None = None,
        *,
        partial: bool = True,
        tenancy: Tenancy = NO_TENANTS,
    ) -> None:
        """Compile the rules. With None there are no rules, and therefore no grants, before `use`.

        `mapping` maps MQTT topics to Kafka; None is the default mapping. With `partial`, an MQTT filter that is
        partly denied is granted, and the denied messages are not delivered. `tenancy` gives each tenant's names. Raises
        ConfigError as `ListedRules` does.
        """
        self._mapping = mapping if mapping is not None else Rules()
        self._partial = partial
        self._tenancy = tenancy
        self._listed = None if rules is None else ListedRules(rules)
        self._book: Rulebook | None = self._listed
        self._grants: Recent[tuple[Identity, str], Grant] = Recent(CACHED_GRANTS)  # connections keep theirs
        self._given: WeakSet[Grant] = WeakSet()  # live grants under rules that can change
        self._changed: set[Grant] = set()
        self._renewing = False
        self._watchers: list[Callable[[AbstractSet[Grant]], None]] = []

    @property
    def is_known(self) -> bool:
        """Whether rules are loaded, so that `for_client` can answer."""
        return self._book is not None

    @property
    def rulebook(self) -> Rulebook | None:
        """The rules: another object after each change, None before the first are loaded."""
        return self._book

    @property
    def by_certificate(self) -> bool:
        """Whether a rule depends on the client's certificate in addition to the identity."""
        return self._book is not None and self._book.by_certificate

    def doubtful(self) -> list[str]:
        """Return warnings about `topic` rules that name a Kafka topic, which MQTT clients reach under another name."""
        return [] if self._listed is None else self._listed.doubtful(self._mapping)

    def for_client(self, identity: Identity, client_id: str | None = None, *, peer: str = "") -> Grant:
        """Return the rights of a client at `peer`; raises Unavailable while no rules are loaded.

        Its connections share them unless rules depend on the client id.
        """
        book = self._book
        if book is None:
            raise Unavailable("Kafka's ACLs have not been read yet")
        if client_id is not None and book.by_client_id:
            return self._grant(book, identity, client_id, "")  # not cached: the connection keeps it
        key = identity, "" if book is self._listed else host_of(peer)
        grant = self._grants.get(key)
        if grant is None:
            grant = self._grants[key] = self._grant(book, identity, None, key[1])
        return grant

    def _grant(self, book: Rulebook, identity: Identity, client_id: str | None, host: str) -> Grant:
        names, rules = self._tenancy.names(identity.tenant), book.rules_for(identity, client_id, host)
        grant = Grant(
            identity, names, rules, self._mapping, everything=book.everything, partial=self._partial, host=host
        )
        if book is not self._listed:
            self._given.add(grant)
        return grant

    # rules that change

    def watch(self, changed: Callable[[AbstractSet[Grant]], None]) -> None:
        """Call `changed` after each change of rules, with the grants whose rules have changed."""
        self._watchers.append(changed)

    def use(self, book: Rulebook) -> None:
        """Replace the rules. Grants that are in use are updated in slices over several turns of the event loop."""
        self._book = book
        self._grants.clear()
        everybody, self._renewing = self._renewing, True
        in_turns(self._renew(book, everybody=everybody))

    def _renew(self, book: Rulebook, *, everybody: bool) -> Iterator[None]:
        """Update the grants in use. `everybody`: the previous update did not finish, so every grant is checked."""
        for grant in tuple(self._given):
            if book is not self._book:
                return  # a newer update is running
            if (everybody or book.may_change_for(grant.identity)) and grant.renew(
                book.rules_for(grant.identity, None, grant.host)
            ):
                self._changed.add(grant)
            yield
        self._renewing = False
        changed, self._changed = self._changed, set()
        if changed:
            for watcher in self._watchers:
                watcher(changed)
