"""Tenants: the names that a client uses get its tenant's prefix, in Kafka and in MQTT (ADR 0079).

    names = tenancy.names("acme")
    names.topic("sensors")              # "acme.sensors", the Kafka topic; the same for groups
    names.mqtt("sensors/kitchen")       # "$tenants/acme/sensors/kitchen", the name inside the gateway
    names.own("acme.sensors")           # "sensors", the client's own name

A whole name is a Kafka name with the prefix, or an MQTT name with the mount point. Behind the protocols' edge the
gateway uses whole names only. A tenant's name has no dot, so that the first dot ends it and no two prefixes overlap;
and no underscore, since Kafka treats `a.b_c` and `a_b.c` as one name. Clients without a tenant have all names that are
not a tenant's, and no others.

A record's headers (`mqtt.topic`, `reply-to`) hold the client's own names; the record's topic says which tenant's.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

from mapping.record import Received
from protocols.mqtt.topics import SHARE, parse_share

SEPARATOR: Final = "."
MOUNT: Final = "$tenants/"
"""The start of tenants' whole MQTT names and client ids. Wildcards at the first level do not match it [MQTT-4.7.2-1],
and other clients may not use it."""
TENANT_LIMIT: Final = 64  # characters

_TENANT: Final = re.compile(rf"[A-Za-z0-9-]{{1,{TENANT_LIMIT}}}")
_WHOLE: Final = re.compile(rf"([A-Za-z0-9-]{{1,{TENANT_LIMIT}}})\.")


def is_tenant(name: str) -> bool:
    """Whether a tenant may have this name."""
    return _TENANT.fullmatch(name) is not None


def tenant_of(whole: str) -> str | None:
    """Return the tenant of a Kafka topic or a group, or None."""
    match = _WHOLE.match(whole)
    return None if match is None else match[1]


class Names(msgspec.Struct, frozen=True):
    """Translates between a client's own names and the whole names that the gateway uses."""

    tenant: str | None = None
    prefix: str = ""  # of Kafka topics and groups
    mount: str = ""  # of MQTT names and client ids
    outside: bool = False  # tenants are enabled, and the client has none

    def topic(self, name: str) -> str:
        """Return the Kafka topic for a client's name."""
        return self.prefix + name

    def group(self, name: str) -> str:
        """Return the consumer group for a client's name."""
        return self.prefix + name

    def own(self, whole: str) -> str:
        """Return the client's name for one of its topics or groups."""
        return whole.removeprefix(self.prefix)

    def has(self, whole: str) -> bool:
        """Whether a Kafka topic or a group is within the client's names."""
        if self.outside:
            return tenant_of(whole) is None
        return whole.startswith(self.prefix)

    def text(self, text: str) -> str:
        """Replace whole names of topics and groups in a text for people by the client's own."""
        if not self.prefix or self.prefix not in text:
            return text
        return re.sub(rf"(?<![A-Za-z0-9._-]){re.escape(self.prefix)}", "", text)

    def mqtt(self, name: str) -> str:
        """Return the whole name of an MQTT topic, an unshared filter or a client id."""
        return self.mount + name

    def filter(self, text: str) -> str:
        """Return the whole filter of a subscription; an invalid `$share` filter is returned unchanged."""
        if not self.mount:
            return text
        if not text.startswith(SHARE):
            return self.mount + text
        shared = parse_share(text)
        if shared is None:
            return text
        return f"{SHARE}{self.prefix}{shared.group}/{self.mount}{shared.topic_filter}"

    def own_mqtt(self, whole: str) -> str:
        """Return the client's name for one of its MQTT topics."""
        return whole.removeprefix(self.mount)

    def has_mqtt(self, whole: str) -> bool:
        """Whether an MQTT topic, a filter or a client id is within the client's names."""
        return not whole.startswith(MOUNT) if self.outside else whole.startswith(self.mount)

    def shown(self, record: Received) -> Received:
        """Return a record that the client may read, with the client's name for its topic."""
        if not self.prefix:
            return record
        return msgspec.structs.replace(record, topic=sys.intern(self.own(record.topic)))

    def shown_all(self, records: Sequence[Received]) -> Sequence[Received]:
        """Like `shown`, for each record."""
        return [self.shown(record) for record in records] if self.prefix else records


EVERYTHING: Final = Names()
OUTSIDE: Final = Names(outside=True)


class Tenancy:
    """Whether tenants are enabled, and the names of each."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._of_none = OUTSIDE if enabled else EVERYTHING

    def names(self, tenant: str | None) -> Names:
        """Return the names of a tenant's clients; None means clients without one. ValueError for an illegal name."""
        if tenant is None or not self.enabled:
            return self._of_none
        if not is_tenant(tenant):
            raise ValueError(f"{tenant!r} is not a legal tenant name")
        return Names(tenant, tenant + SEPARATOR, f"{MOUNT}{tenant}/")

    def of(self, whole: str) -> Names:
        """Return the names of the tenant that a Kafka topic or a group belongs to."""
        return self.names(tenant_of(whole)) if self.enabled else self._of_none


NO_TENANTS: Final = Tenancy(False)
