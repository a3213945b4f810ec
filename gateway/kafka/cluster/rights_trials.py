"""Tries rights that Kafka does not report: on topics that do not exist yet, on groups and on transactional ids.

Each trial is a request that Kafka refuses for lack of a right before anything else. Otherwise it has no effect: it
names a topic, a member or a transaction that does not exist, or asks only for validation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from aiokafka import errors
from aiokafka.admin.config_resource import ConfigResourceType
from aiokafka.protocol.admin import CreateTopicsRequest, DescribeConfigsRequest
from aiokafka.protocol.coordination import FindCoordinatorRequest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.group import HeartbeatRequest
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import EndTxnRequest

from gateway.kafka.cluster.rights import CREATE, DESCRIBE, READ, WRITE, AclOperation, Resource
from gateway.kafka.cluster.topic_queries import TopicQueries
from gateway.kafka.driver import wire
from mapping.record import INTERNAL_TOPIC_PREFIX

OWN_TOPIC: Final = f"{INTERNAL_TOPIC_PREFIX}trivium_sessions"
"""A topic that each gateway needs before it is ready, and creates if it is missing."""
GROUP: Final = "trivium-doctor"
TRANSACTION: Final = "trivium-doctor"
DENIED: Final = frozenset(
    error.errno
    for error in (
        errors.TopicAuthorizationFailedError,
        errors.GroupAuthorizationFailedError,
        errors.ClusterAuthorizationFailedError,
        errors.TransactionalIdAuthorizationFailed,
    )
)


class Trial(NamedTuple):
    """One right, and the request that tries it."""

    resource: Resource
    name: str
    operation: AclOperation
    request: Any
    error_of: Callable[[Any], int]  # returns the error code in the answer


def trials(*, own_topics: bool) -> Iterator[Trial]:
    """Yield the trials; with `own_topics` also those for the gateway's own topics, which Kafka has none of yet."""
    if own_topics:
        topics = [(OWN_TOPIC, [(0, 0, 1)])]
        own = Resource.OWN_TOPICS
        yield Trial(own, OWN_TOPIC, DESCRIBE, wire.rights_request([OWN_TOPIC]), lambda got: got.topics[OWN_TOPIC].error)
        yield Trial(own, OWN_TOPIC, READ, FetchRequest(0, 0, 1, 0, topics), _of_partition)
        yield Trial(own, OWN_TOPIC, WRITE, ProduceRequest(None, -1, 1000, [(OWN_TOPIC, [(0, b"")])]), _of_partition)
        yield Trial(
            own,
            OWN_TOPIC,
            CREATE,
            CreateTopicsRequest([(OWN_TOPIC, 1, 1, [], [])], 1000, True),
            lambda got: int(got.topic_errors[0][1]),
        )
        yield Trial(
            own,
            OWN_TOPIC,
            AclOperation.DESCRIBE_CONFIGS,
            DescribeConfigsRequest([(ConfigResourceType.TOPIC, OWN_TOPIC, None)]),
            lambda got: int(got.resources[0][0]),
        )
    yield Trial(Resource.GROUPS, GROUP, DESCRIBE, FindCoordinatorRequest(GROUP, 0), _of_answer)
    yield Trial(Resource.GROUPS, GROUP, READ, HeartbeatRequest(GROUP, 0, "doctor"), _of_answer)
    transactions = Resource.TRANSACTIONS
    yield Trial(transactions, TRANSACTION, DESCRIBE, FindCoordinatorRequest(TRANSACTION, 1), _of_answer)
    yield Trial(transactions, TRANSACTION, WRITE, EndTxnRequest(TRANSACTION, 0, 0, False), _of_answer)


async def denied(queries: TopicQueries, *, own_topics: bool) -> dict[tuple[Resource, str], set[AclOperation]]:
    """Try all rights; return the denied operations on each resource and name. Raises Refused if Kafka is silent."""
    operations: dict[tuple[Resource, str], set[AclOperation]] = {}
    for trial in trials(own_topics=own_topics):
        missing = operations.setdefault((trial.resource, trial.name), set())
        if trial.error_of(await queries.request(trial.request)) in DENIED:
            missing.add(trial.operation)
    return operations


def _of_answer(answer: Any) -> int:
    return int(answer.error_code)


def _of_partition(answer: Any) -> int:
    [(_, [(_, error, *_)])] = answer.topics
    return int(error)
