"""DescribeAcls: all ACLs of a cluster, decoded in one pass; aiokafka would make an object of every field."""

from __future__ import annotations

from struct import Struct as Layout
from typing import Final, NamedTuple

from gateway.kafka.driver.wire import EncodedRequest, read_text

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
_ANYTHING: Final = b"\x01\xff\xff\x01\xff\xff\xff\xff\x01\x01"
"""A filter for any kind, name, pattern, principal, host, operation and permission."""
_NO_RIGHT: Final = 31
_NO_AUTHORIZER: Final = 54
_INT16: Final = Layout(">h")
_INT32: Final = Layout(">i")


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
    return _DescribeAcls(_ANYTHING)


def read_acls(data: bytes) -> list[Acl]:
    """Decode the answer to `all_acls`, leaving out other patterns than literal and prefixed. Raises AclsUnknown."""
    (error,) = _INT16.unpack_from(data, 4)
    message, at = read_text(data, 6)
    if error == _NO_RIGHT:
        raise AclsUnknown("the gateway needs Describe on the cluster to read Kafka's ACLs")
    if error == _NO_AUTHORIZER:
        raise AclsUnknown("this Kafka has no ACLs: no authorizer.class.name is set there")
    if error:
        raise AclsUnknown(f"Kafka does not return its ACLs: {message or f'error {error}'}")
    (resources,) = _INT32.unpack_from(data, at)
    at += 4
    found: list[Acl] = []
    for _ in range(resources):
        kind = data[at]
        name, at = read_text(data, at + 1)
        pattern = data[at]
        (acls,) = _INT32.unpack_from(data, at + 1)
        at += 5
        for _ in range(acls):
            principal, at = read_text(data, at)
            host, at = read_text(data, at)
            operation, permission = data[at], data[at + 1]
            at += 2
            if pattern in {_LITERAL, _PREFIXED}:
                found.append(
                    Acl(
                        kind,
                        name or "",
                        pattern == _PREFIXED,
                        principal or "",
                        host or "",
                        operation,
                        permission == _ALLOW,
                    )
                )
    return found
