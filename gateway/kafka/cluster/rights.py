"""The Kafka ACLs that the gateway needs: the list for `trivium doctor` and for administrators."""

from __future__ import annotations

import enum
from typing import Final, Literal, NamedTuple

from gateway.kafka.driver.wire import NOT_REPORTED
from mapping.record import INTERNAL_TOPIC_PREFIX


class AclOperation(enum.IntEnum):
    """Kafka's operations, by their codes."""

    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11

    def __str__(self) -> str:
        return "".join(part.capitalize() for part in self.name.split("_"))


class Resource(enum.Enum):
    """Resources that the gateway needs operations on."""

    OWN_TOPICS = f"topics {INTERNAL_TOPIC_PREFIX}trivium_*"
    CLIENT_TOPICS = "topics of clients"
    CLUSTER = "cluster"
    GROUPS = "groups of clients"
    TRANSACTIONS = "transactional ids trivium-*"


class AclResource(NamedTuple):
    """A resource as Kafka's ACLs name it."""

    kind: Literal["topic", "cluster", "group", "transactional-id"]
    name: str
    prefixed: bool = False  # the name is a prefix


ACL_PLACES: Final = {
    Resource.OWN_TOPICS: AclResource("topic", f"{INTERNAL_TOPIC_PREFIX}trivium_", prefixed=True),
    Resource.CLIENT_TOPICS: AclResource("topic", "*"),
    Resource.CLUSTER: AclResource("cluster", "kafka-cluster"),
    Resource.GROUPS: AclResource("group", "*"),
    Resource.TRANSACTIONS: AclResource("transactional-id", "trivium-", prefixed=True),
}
"""What to grant rights on where clients may use any topic and group."""


class Need(NamedTuple):
    """Operations on a resource that the gateway needs."""

    resource: Resource
    operations: tuple[AclOperation, ...]
    without: str  # what fails without them
    always: bool = True  # the gateway cannot serve clients without them; False: only one of its functions fails


READ, WRITE, CREATE, DESCRIBE = AclOperation.READ, AclOperation.WRITE, AclOperation.CREATE, AclOperation.DESCRIBE
NEEDS: Final = (
    Need(Resource.OWN_TOPICS, (DESCRIBE, READ, WRITE), "sessions cannot be stored, and the gateway is never ready"),
    Need(
        Resource.OWN_TOPICS,
        (AclOperation.DESCRIBE_CONFIGS,),
        "the gateway cannot check that they are compacted and safe",
        False,
    ),
    Need(Resource.CLIENT_TOPICS, (DESCRIBE, READ, WRITE), "clients are refused: 0x87, unauthorized-access, 403"),
    Need(
        Resource.CLIENT_TOPICS,
        (AclOperation.DESCRIBE_CONFIGS,),
        "Kafka's default limits are assumed, and the gateway cannot check that they are safe",
        False,
    ),
    Need(Resource.CLUSTER, (CREATE,), "no topic is created, unless Create is allowed on its name", False),
    Need(
        Resource.CLUSTER,
        (DESCRIBE,),
        'HTTP lists only groups that may be described, and security.access_source = "kafka" refuses all clients',
        False,
    ),
    Need(Resource.GROUPS, (DESCRIBE, READ), "consumers, shared subscriptions and T/group.id/G are refused"),
    Need(Resource.TRANSACTIONS, (DESCRIBE, WRITE), "AMQP transactions are refused"),
)
"""Kafka reports the authorized operations of topics and the cluster; `rights_trials` tries the others."""


def needed() -> dict[Resource, list[AclOperation]]:
    """Return all operations that the gateway needs on each resource."""
    operations: dict[Resource, list[AclOperation]] = {}
    for need in NEEDS:
        operations.setdefault(need.resource, []).extend(need.operations)
    return operations


def lacking(need: Need, operations: int) -> tuple[AclOperation, ...]:
    """Return the operations of a need that are missing in `operations`, Kafka's bit field with a bit for each code."""
    if operations == NOT_REPORTED:
        return ()
    return tuple(operation for operation in need.operations if not operations >> operation & 1)
