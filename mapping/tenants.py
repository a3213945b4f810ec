"""Tenants: what a client names lies below its tenant's prefix, in Kafka and in MQTT (ADR 0079).

    names = tenancy.names("acme")
    names.topic("sensors")              # "acme.sensors", the Kafka topic; groups likewise
    names.mqtt("sensors/kitchen")       # "$tenants/acme/sensors/kitchen", the name inside of the gateway
    names.own("acme.sensors")           # "sensors", as the client calls it

A whole name is one of Kafka's, or an MQTT name below its mount point; everything behind the edge of a protocol has
whole names. A tenant's name has no dot, so that the first dot ends it and no two prefixes overlap; and no underscore,
since Kafka takes `a.b_c` and `a_b.c` for one name. What no tenant has is the names without a tenant: clients of none
have these and no others.

A record's headers hold a client's own names (`mqtt.topic`, `reply-to`): whose they are, its topic says.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from mapping.record import INTERNAL_TOPIC_PREFIX, Headers, Received, is_topic_name
from mapping.rules import Destination, RuleError, Rules, RuleText
from protocols.mqtt.topics import SHARE, parse_share

SEPARATOR: Final = "."
MOUNT: Final = "$tenants/"
"""What the whole MQTT names and client ids of tenants begin with. Wildcards at the first level do not match it
[MQTT-4.7.2-1], and nobody else may use it."""
TENANT_LIMIT: Final = 64  # characters

_TENANT: Final = re.compile(rf"[A-Za-z0-9-]{{1,{TENANT_LIMIT}}}")
_WHOLE: Final = re.compile(rf"([A-Za-z0-9-]{{1,{TENANT_LIMIT}}})\.")
_MOUNTED: Final = re.compile(rf"\$tenants/([A-Za-z0-9-]{{1,{TENANT_LIMIT}}})/")


def is_tenant(name: str) -> bool:
    """Whether a tenant may have this name."""
    return _TENANT.fullmatch(name) is not None


def tenant_of(whole: str) -> str | None:
    """The tenant of a Kafka topic or a group; None: it is no tenant's."""
    found = _WHOLE.match(whole)
    return None if found is None else found[1]


class Names(msgspec.Struct, frozen=True):
    """What one client calls things, and what they are called behind the edge of its protocol."""

    tenant: str | None = None
    prefix: str = ""  # of Kafka topics and groups
    mount: str = ""  # of MQTT names and client ids
    outside: bool = False  # there are tenants, and the client is of none

    def topic(self, name: str) -> str:
        """The Kafka topic that the client calls so."""
        return self.prefix + name

    def group(self, name: str) -> str:
        """The consumer group that the client calls so."""
        return self.prefix + name

    def own(self, whole: str) -> str:
        """What the client calls a topic or group that it has."""
        return whole.removeprefix(self.prefix)

    def has(self, whole: str) -> bool:
        """Whether the client can have a name for a Kafka topic or a group."""
        if self.outside:
            return tenant_of(whole) is None
        return whole.startswith(self.prefix)

    def text(self, text: str) -> str:
        """A text for people, in which whole names of topics and groups may stand, as the client calls them."""
        if not self.prefix or self.prefix not in text:
            return text
        return re.sub(rf"(?<![A-Za-z0-9._-]){re.escape(self.prefix)}", "", text)

    def mqtt(self, name: str) -> str:
        """The whole name of an MQTT topic, an unshared filter or a client id."""
        return self.mount + name

    def filter(self, text: str) -> str:
        """The whole filter of a subscription; one of `$share` that is not valid stays as it is."""
        if not self.mount:
            return text
        if not text.startswith(SHARE):
            return self.mount + text
        shared = parse_share(text)
        if shared is None:
            return text
        return f"{SHARE}{self.prefix}{shared.group}/{self.mount}{shared.topic_filter}"

    def own_mqtt(self, whole: str) -> str:
        """What the client calls an MQTT topic that it has."""
        return whole.removeprefix(self.mount)

    def has_mqtt(self, whole: str) -> bool:
        """Whether the client can have a name for an MQTT topic, a filter or a client id."""
        return not whole.startswith(MOUNT) if self.outside else whole.startswith(self.mount)

    def shown(self, record: Received) -> Received:
        """A record that the client may read, as it is shown to it."""
        if not self.prefix:
            return record
        return msgspec.structs.replace(record, topic=sys.intern(self.own(record.topic)))

    def shown_all(self, records: Sequence[Received]) -> Sequence[Received]:
        """As `shown`, of each."""
        return [self.shown(record) for record in records] if self.prefix else records


EVERYTHING: Final = Names()
OUTSIDE: Final = Names(outside=True)


class Tenancy:
    """Whether there are tenants, and the names of each."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._of_none = OUTSIDE if enabled else EVERYTHING

    def names(self, tenant: str | None) -> Names:
        """The names of a tenant's clients; None: of clients without one. ValueError: no tenant can be called so."""
        if tenant is None or not self.enabled:
            return self._of_none
        if not is_tenant(tenant):
            raise ValueError(f"{tenant!r} is no name of a tenant")
        return Names(tenant, tenant + SEPARATOR, f"{MOUNT}{tenant}/")

    def of(self, whole: str) -> Names:
        """The names of those who have a Kafka topic or a group."""
        return self.names(tenant_of(whole)) if self.enabled else self._of_none


NO_TENANTS: Final = Tenancy(False)


class TenantRules(Rules):
    """Mapping rules where there are tenants: MQTT names are whole ones, and the rules see a client's own.

    A tenant's MQTT topics lead to its Kafka topics and to no others, those of clients without a tenant to topics that
    are no tenant's; and what lies in a topic comes back below its tenant's mount point, whatever key and headers say.
    """

    def __init__(
        self, rules: Iterable[RuleText] = (), *, catch_all: str = "mqtt", dotted: Iterable[str] | None = None
    ) -> None:
        """As `Rules`. RuleError also for a catch-all topic that would be a tenant's."""
        if tenant_of(catch_all) is not None:
            raise RuleError(f"mapping.catch_all_topic: {catch_all!r} is a topic of tenant {tenant_of(catch_all)!r}")
        rules, dotted = tuple(rules), None if dotted is None else tuple(dotted)
        super().__init__(rules, catch_all=catch_all, dotted=dotted)
        self._own = Rules(rules, catch_all=catch_all, dotted=dotted)
        self._other = catch_all

    def _find(self, mqtt_topic: str) -> Destination:
        prefix, own = _unmount(mqtt_topic)
        found = self._own.destination(own)
        whole = prefix + found.topic
        if is_topic_name(whole) if prefix else tenant_of(whole) is None:
            return Destination(whole, found.key)
        return Destination(prefix + self._other, own.encode())

    def mqtt_topic(self, topic: str, key: bytes | None, headers: Headers = ()) -> str | None:
        """The whole MQTT topic name of a record; None when it has none."""
        if topic.startswith(INTERNAL_TOPIC_PREFIX):  # the gateway's own: a retained message under its whole name
            return self._own.mqtt_topic(topic, key, headers)
        tenant = tenant_of(topic)
        if tenant is None:
            found = self._own.mqtt_topic(topic, key, headers)
            return None if found is None or found.startswith(MOUNT) else found
        found = self._own.mqtt_topic(topic[len(tenant) + 1 :], key, headers)
        # A wildcard at a tenant's first level would match what begins with $ [MQTT-4.7.2-1].
        return None if not found or found.startswith("$") else f"{MOUNT}{tenant}/{found}"

    def kafka_topics(self, mqtt_filter: str, known: Iterable[str]) -> set[str]:
        """Those of `known` Kafka topics that may hold records for the whole MQTT filter."""
        prefix, own = _unmount(mqtt_filter)
        if not prefix:
            return self._own.kafka_topics(own, [topic for topic in known if tenant_of(topic) is None])
        start = len(prefix)
        found = self._own.kafka_topics(own, [topic[start:] for topic in known if topic.startswith(prefix)])
        return {prefix + topic for topic in found}

    def may_make(self, topic: str) -> bool:
        """Whether a client may make a Kafka topic of this name."""
        tenant = tenant_of(topic)
        return self._own.may_make(topic if tenant is None else topic[len(tenant) + 1 :])

    def kafka_filter(self, mqtt_filter: str) -> list[str] | None:
        """See `Rules.kafka_filter`: over Kafka's whole names."""
        prefix, own = _unmount(mqtt_filter)
        found = self._own.kafka_filter(own)
        if found is None:
            return None
        if not prefix and tenant_of(found[0]) is not None:
            return [self._other, *found]
        return [prefix + found[0], *found[1:]]

    def literal_topics(self, mqtt_filter: str) -> set[str]:
        """The Kafka topics of a filter that do not depend on what exists."""
        prefix, own = _unmount(mqtt_filter)
        found = self._own.literal_topics(own)
        if prefix:
            return {prefix + topic for topic in found}
        return {topic if tenant_of(topic) is None else self._other for topic in found}

    def own_name(self, whole: str) -> str:
        """An MQTT topic or client id as its client calls it."""
        found = _MOUNTED.match(whole)
        return whole if found is None else whole[found.end() :]

    def whole_client(self, client_id: str, mqtt_topic: str) -> str:
        """The client that published to a whole MQTT topic."""
        found = _MOUNTED.match(mqtt_topic)
        return client_id if found is None else found[0] + client_id


def _unmount(whole: str) -> tuple[str, str]:
    """The prefix of the Kafka topics of a whole MQTT name, and the name without its mount point."""
    found = _MOUNTED.match(whole)
    return ("", whole) if found is None else (found[1] + SEPARATOR, whole[found.end() :])
