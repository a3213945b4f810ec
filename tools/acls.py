"""Creates and deletes Kafka's ACLs, for the secured test cluster and for tests."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from gateway.kafka.cluster.rights import ACL_PLACES, AclOperation, AclResource, Resource, needed
from gateway.kafka.driver.acl_requests import CLUSTER, GROUP, TOPIC, TRANSACTIONAL_ID, Acl, all_acls, read_acls
from gateway.kafka.driver.admin_client import AdminClient
from gateway.kafka.driver.wire import EncodedRequest

KINDS: Final = {"topic": TOPIC, "cluster": CLUSTER, "group": GROUP, "transactional-id": TRANSACTIONAL_ID}
APPLIED_S: Final = 30.0
POLL_S: Final = 0.05
LITERAL, PREFIXED, DENY, ALLOW = 3, 4, 2, 3  # Kafka's codes


class _CreateAcls(EncodedRequest):
    API_KEY = 30
    API_VERSION = 1


class _DeleteAcls(EncodedRequest):
    API_KEY = 31
    API_VERSION = 1


class Acls:
    """Changes ACLs over a listener whose clients are administrators, and waits until the broker applies them."""

    def __init__(self, bootstrap: str) -> None:
        self._admin = AdminClient(bootstrap_servers=bootstrap)

    async def __aenter__(self) -> Acls:
        await self._admin.start()
        self._node = next(iter(self._admin._client.cluster.brokers())).nodeId
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._admin.close()

    async def create(self, *acls: Acl) -> None:
        """Create ACLs; raises TimeoutError if the broker does not apply them."""
        await self._change(_CreateAcls, acls)
        await self._until(set(acls), all)

    async def delete(self, *acls: Acl) -> None:
        """Delete ACLs; raises TimeoutError if the broker still applies them."""
        await self._change(_DeleteAcls, acls)
        await self._until(set(acls), _none)

    async def all(self) -> list[Acl]:
        """Return all ACLs that the broker applies."""
        return read_acls(await self._admin.request(all_acls(), self._node))

    async def _change(self, request: type[EncodedRequest], acls: Sequence[Acl]) -> None:
        if not acls:
            return
        parts = [struct.pack(">i", len(acls))]
        for acl in acls:
            kind, pattern = struct.pack(">b", acl.kind), struct.pack(">b", PREFIXED if acl.prefixed else LITERAL)
            place = kind + _text(acl.name) + pattern + _text(acl.principal) + _text(acl.host)
            parts.append(place + struct.pack(">bb", acl.operation, ALLOW if acl.allow else DENY))
        answer: Any = await self._admin.request(request(b"".join(parts)), self._node)
        (error,) = struct.unpack_from(">h", answer, 8)
        if error:
            raise RuntimeError(f"Kafka refuses the ACLs: {answer!r}")

    async def _until(self, acls: set[Acl], count: Callable[[Iterator[bool]], bool]) -> None:
        async with asyncio.timeout(APPLIED_S):
            while True:
                there = set(await self.all())
                if count(acl in there for acl in acls):
                    return
                await asyncio.sleep(POLL_S)


def right(
    resource: Resource, operation: AclOperation, user: str, places: Mapping[Resource, AclResource] = ACL_PLACES
) -> Acl:
    """Return the ACL that gives the user a right that the gateway needs."""
    kind, name, prefixed = places[resource]
    return Acl(KINDS[kind], name, prefixed, f"User:{user}", "*", int(operation), True)


async def allow_gateway(bootstrap: str, user: str, places: Mapping[Resource, AclResource] = ACL_PLACES) -> None:
    """Grant only the rights in `NEEDS`, over a listener whose clients are administrators."""
    async with Acls(bootstrap) as acls:
        rights = [
            right(resource, operation, user, places) for resource, allowed in needed().items() for operation in allowed
        ]
        await acls.create(*rights)


def _none(changes: Iterator[bool]) -> bool:
    return not any(changes)


def _text(value: str) -> bytes:
    return struct.pack(">h", len(value.encode())) + value.encode()
