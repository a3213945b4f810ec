"""DescribeAcls: all ACLs of a cluster."""

from __future__ import annotations

from typing import Final, NamedTuple

from aiokafka.protocol.admin import DescribeAclsRequest_v1, DescribeAclsResponse_v1

from gateway.kafka.driver.wire import EncodedRequest

TOPIC: Final = 2
GROUP: Final = 3
CLUSTER: Final = 4
TRANSACTIONAL_ID: Final = 5
"""Kinds of resources."""

ALL: Final = 2
"""The operation ALL; the others are in `gateway.kafka.cluster.rights.Operation`."""
_ALLOW: Final = 3
_LITERAL: Final = 3
_PREFIXED: Final = 4
_ANY: Final = 1
_NO_RIGHT: Final = 31
_NO_AUTHORIZER: Final = 54


class Acl(NamedTuple):
    """One of Kafka's ACLs; its name, principal and host may be `*`."""

    kind: int
    name: str
    prefixed: bool
    principal: str
    host: str
    operation: int
    allow: bool


class AclsUnknown(Exception):  # noqa: N818 - an answer of Kafka's
    """Kafka does not return its ACLs; the text says why, and what to do."""


class _DescribeAcls(EncodedRequest):
    """Version 1 (Kafka 2.0), the first with prefixed resource names."""

    API_KEY = 29
    API_VERSION = 1


def all_acls() -> EncodedRequest:
    """Request every ACL, from any broker. Decode the answer with `read_acls`; equal answers mean equal ACLs."""
    return _DescribeAcls(DescribeAclsRequest_v1(_ANY, None, _ANY, None, None, _ANY, _ANY).encode())


def read_acls(data: bytes) -> list[Acl]:
    """Decode the answer to `all_acls`, leaving out other patterns than literal and prefixed. Raises AclsUnknown.

    A hundred thousand ACLs take 0.2 s.
    """
    answer = DescribeAclsResponse_v1.decode(data)
    if answer.error_code == _NO_RIGHT:
        raise AclsUnknown("the gateway needs Describe on the cluster to read Kafka's ACLs")
    if answer.error_code == _NO_AUTHORIZER:
        raise AclsUnknown("this Kafka has no ACLs: no authorizer.class.name is set there")
    if answer.error_code:
        raise AclsUnknown(f"Kafka does not return its ACLs: {answer.error_message or f'error {answer.error_code}'}")
    return [
        Acl(kind, name or "", pattern == _PREFIXED, principal or "", host or "", operation, permission == _ALLOW)
        for kind, name, pattern, acls in answer.resources
        if pattern in {_LITERAL, _PREFIXED}
        for principal, host, operation, permission in acls
    ]
