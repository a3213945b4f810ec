"""Mapping rules with tenants (ADR 0079); an optional part."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from mapping.record import INTERNAL_TOPIC_PREFIX, Headers, is_topic_name
from mapping.rules import Destination, RuleError, Rules, RuleText
from mapping.tenants import MOUNT, SEPARATOR, TENANT_LIMIT, tenant_of

_MOUNTED: Final = re.compile(rf"\$tenants/([A-Za-z0-9-]{{1,{TENANT_LIMIT}}})/")


class TenantRules(Rules):
    """Mapping rules with tenants: MQTT names here are whole ones, and the rules are applied to the client's own names.

    A tenant's MQTT topics map only to its own Kafka topics, those of clients without a tenant only to topics that are
    no tenant's. On the way back a record's MQTT topic is below its tenant's mount point, whatever key and headers are.
    """

    def __init__(
        self, rules: Iterable[RuleText] = (), *, catch_all: str = "mqtt", dotted: Iterable[str] | None = None
    ) -> None:
        """As `Rules`; RuleError also for a catch-all topic that would be a tenant's."""
        if tenant_of(catch_all) is not None:
            raise RuleError(f"mapping.catch_all_topic: {catch_all!r} is a topic of tenant {tenant_of(catch_all)!r}")
        rules, dotted = tuple(rules), None if dotted is None else tuple(dotted)
        super().__init__(rules, catch_all=catch_all, dotted=dotted)
        self._own = Rules(rules, catch_all=catch_all, dotted=dotted)

    def _find(self, mqtt_topic: str) -> Destination:
        prefix, own = _unmount(mqtt_topic)
        destination = self._own.destination(own)
        whole = prefix + destination.topic
        if is_topic_name(whole) if prefix else tenant_of(whole) is None:
            return Destination(whole, destination.key)
        return Destination(prefix + self._catch_all, own.encode())

    def mqtt_topic(self, topic: str, key: bytes | None, headers: Headers = ()) -> str | None:
        """Return the whole MQTT topic name of a record; None if it has none."""
        if topic.startswith(INTERNAL_TOPIC_PREFIX):  # the gateway's own, such as a retained message by its whole name
            return self._own.mqtt_topic(topic, key, headers)
        tenant = tenant_of(topic)
        if tenant is None:
            name = self._own.mqtt_topic(topic, key, headers)
            return None if name is None or name.startswith(MOUNT) else name
        name = self._own.mqtt_topic(topic[len(tenant) + 1 :], key, headers)
        # A wildcard at a tenant's first level would match a name that starts with $ [MQTT-4.7.2-1].
        return None if not name or name.startswith("$") else f"{MOUNT}{tenant}/{name}"

    def kafka_topics(self, mqtt_filter: str, known: Iterable[str]) -> set[str]:
        """Return those of the `known` Kafka topics that may hold records for the whole MQTT filter."""
        prefix, own = _unmount(mqtt_filter)
        if not prefix:
            return self._own.kafka_topics(own, [topic for topic in known if tenant_of(topic) is None])
        start = len(prefix)
        names = self._own.kafka_topics(own, [topic[start:] for topic in known if topic.startswith(prefix)])
        return {prefix + topic for topic in names}

    def may_create(self, topic: str) -> bool:
        """Whether a client may create a Kafka topic of this name."""
        tenant = tenant_of(topic)
        return self._own.may_create(topic if tenant is None else topic[len(tenant) + 1 :])

    def kafka_filter(self, mqtt_filter: str) -> list[str] | None:
        """Return the whole Kafka names, or patterns, that an MQTT filter can match; None if it can match any."""
        prefix, own = _unmount(mqtt_filter)
        names = self._own.kafka_filter(own)
        if names is None:
            return None
        if not prefix and tenant_of(names[0]) is not None:
            return [self._catch_all, *names]
        return [prefix + names[0], *names[1:]]

    def literal_topics(self, mqtt_filter: str) -> tuple[str, ...]:
        """Return the whole Kafka names of the topics that an MQTT filter names."""
        prefix, own = _unmount(mqtt_filter)
        names = self._own.literal_topics(own)
        if prefix:
            return tuple(prefix + topic for topic in names)
        return tuple(dict.fromkeys(topic if tenant_of(topic) is None else self._catch_all for topic in names))

    def own_name(self, whole: str) -> str:
        """Return an MQTT topic or client id without its tenant's mount point."""
        match = _MOUNTED.match(whole)
        return whole if match is None else whole[match.end() :]

    def whole_client(self, client_id: str, mqtt_topic: str) -> str:
        """Return the client id with the mount point of the tenant that `mqtt_topic` belongs to."""
        match = _MOUNTED.match(mqtt_topic)
        return client_id if match is None else match[0] + client_id


def _unmount(whole: str) -> tuple[str, str]:
    """Return the prefix of Kafka topics for a whole MQTT name, and the name without its mount point."""
    match = _MOUNTED.match(whole)
    return ("", whole) if match is None else (match[1] + SEPARATOR, whole[match.end() :])
