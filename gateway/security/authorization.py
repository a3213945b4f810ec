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

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, Protocol
from weakref import WeakSet

from gateway.config import AccessRule
from gateway.security.access_rules import ListedRules
from gateway.security.identity import Identity
from gateway.security.permissions import (
    ClientRules,
    GroupPermission,
    MqttPermission,
    Operation,
    Permission,
    Rule,
)
from gateway.security.throttle import host_of
from gateway.security.turns import Unavailable
from gateway.turns import in_turns
from mapping.rules import Rules
from mapping.tenants import NO_TENANTS, Names, Tenancy

CACHED_GRANTS: Final = 2048


class Grant:
    """What one client may do. Take one per connection: a known `publish(topic, key)` is a look-up or two."""

    __slots__ = (
        "__weakref__", "_rules", "admin", "group", "host", "identity", "mqtt_publish", "mqtt_subscribe", "names",
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
        self.identity = identity  # whose
        self.host = host  # where it comes from, where that matters
        self.names = names  # from what the client calls things to whole names, which all of these are about
        self._rules = rules
        self.group = GroupPermission(rules.groups, names)
        self.publish = Permission(rules.publish, everything, names)  # publish, subscribe, admin: in Kafka's names
        self.subscribe = Permission(rules.subscribe, everything, names)
        self.admin = Permission(rules.admin, everything, names)
        # mqtt_publish, mqtt_subscribe: in those of MQTT
        self.mqtt_publish = MqttPermission(rules.publish, everything, mapping, names, partial=partial)
        self.mqtt_subscribe = MqttPermission(rules.subscribe, everything, mapping, names, partial=partial)

    def renew(self, rules: ClientRules) -> bool:
        """Judge by these from now on; whether they are others than before."""
        if rules == self._rules:
            return False
        self._rules = rules
        self.group.renew(rules.groups)
        self.publish.renew(rules.publish)
        self.subscribe.renew(rules.subscribe)
        self.admin.renew(rules.admin)
        self.mqtt_publish.renew(rules.publish)
        self.mqtt_subscribe.renew(rules.subscribe)
        return True

    def administers(self, operation: Operation, topic: str) -> bool:
        """Whether the client may do this with a topic of Kafka."""
        operations = self._rules.operations
        if operations is None:
            return self.admin.whole_topic(topic)
        return self._only(operations[operation]).whole_topic(topic)

    def sees(self, topics: Sequence[str]) -> list[str]:
        """Those of Kafka's topics that the client may know to be there."""
        operations = self._rules.operations
        rights = (self.subscribe, self.publish) if operations is None else (self._only(operations["describe"]),)
        return [topic for topic in topics if any(right.some(topic) for right in rights)]

    def _only(self, rules: Sequence[Rule]) -> Permission:
        """For what is asked too seldom to be remembered."""
        return Permission(rules, names=self.names)

    def transacts(self, name: str) -> bool:
        """Whether the client may use transactions, as the client of this name."""
        rules = self._rules.transactions
        return rules is None or next((rule.allow for rule in rules if rule.speaks_of(name)), False)


class Rulebook(Protocol):
    """Where rules come from.

    Attributes:
        everything: everybody may do everything: no rule is about topics.
        by_client_id: what a rule is depends on the client id.
        by_certificate: it asks for the client's certificate, beside the identity.
    """

    everything: bool
    by_client_id: bool
    by_certificate: bool

    def rules_for(self, identity: Identity, client_id: str | None, host: str) -> ClientRules:
        """Those about one client, which comes from `host`."""
        ...

    def is_news_for(self, identity: Identity) -> bool:
        """Whether they may be others than by the book that was in force before."""
        ...


class AccessList:
    """The rights of identities: by the rules of `security.access`, or by rules that come and change (`use`)."""

    def __init__(
        self,
        rules: Sequence[AccessRule] | None = (),
        mapping: Rules | None = None,
        *,
        partial: bool = True,
        tenancy: Tenancy = NO_TENANTS,
    ) -> None:
        """Compile the rules; None: there are none before `use`, and nobody has a grant.

        `mapping` leads from MQTT topics to Kafka (None: the default one). With `partial` an MQTT filter is granted of
        which a part is denied, and that part is not delivered. `tenancy`: the names of each tenant's clients.

        Raises:
            ConfigError: a rule that cannot be meant; names `security.access[i]`.
        """
        self._mapping = mapping if mapping is not None else Rules()
        self._partial = partial
        self._tenancy = tenancy
        self._listed = None if rules is None else ListedRules(rules)
        self._book: Rulebook | None = self._listed
        self._grants: dict[tuple[Identity, str], Grant] = {}
        self._given: WeakSet[Grant] = WeakSet()  # by rules that change: those that somebody still has
        self._changed: set[Grant] = set()
        self._renewing = False
        self._watchers: list[Callable[[AbstractSet[Grant]], None]] = []

    @property
    def is_known(self) -> bool:
        """Whether there are rules, so that `for_client` has an answer."""
        return self._book is not None

    @property
    def by_certificate(self) -> bool:
        """Whether a rule asks for the client's certificate, beside the identity."""
        return self._book is not None and self._book.by_certificate

    def doubtful(self) -> list[str]:
        """What to warn of: rules about a topic that seem to mean Kafka's, which for MQTT clients has another name."""
        return [] if self._listed is None else self._listed.doubtful(self._mapping)

    def for_client(self, identity: Identity, client_id: str | None = None, *, peer: str = "") -> Grant:
        """The rights of a client at `peer`; those that its client id does not change are shared by its connections.

        Raises:
            Unavailable: there are no rules yet.
        """
        book = self._book
        if book is None:
            raise Unavailable("what Kafka allows is not known yet")
        if client_id is not None and book.by_client_id:
            return self._grant(book, identity, client_id, "")  # the connection keeps it
        key = identity, "" if book is self._listed else host_of(peer)
        grant = self._grants.get(key)
        if grant is None:
            if len(self._grants) >= CACHED_GRANTS:
                self._grants.clear()  # connections keep theirs
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
        """Call `changed` with grants that allow something else than before, after each such change."""
        self._watchers.append(changed)

    def use(self, book: Rulebook) -> None:
        """Judge by other rules from now on; grants that clients have follow in turns of the event loop."""
        self._book = book
        self._grants.clear()
        everybody, self._renewing = self._renewing, True
        in_turns(self._renew(book, everybody=everybody))

    def _renew(self, book: Rulebook, *, everybody: bool) -> Iterator[None]:
        """`everybody`: what was in force before has not come to all of them."""
        for grant in tuple(self._given):
            if book is not self._book:
                return  # newer ones are on their way to all
            if (everybody or book.is_news_for(grant.identity)) and grant.renew(
                book.rules_for(grant.identity, None, grant.host)
            ):
                self._changed.add(grant)
            yield
        self._renewing = False
        changed, self._changed = self._changed, set()
        if changed:
            for watcher in self._watchers:
                watcher(changed)
