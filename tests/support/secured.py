"""A broker that requires authentication, with the ACLs that the gateway needs, and an endpoint that issues tokens."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from urllib.parse import unquote_plus

import pytest
from aiohttp import web

from gateway.kafka.cluster.rights import NEEDS, Resource
from gateway.kafka.driver.acl_requests import CLUSTER, GROUP, TOPIC, TRANSACTIONAL_ID, Acl, all_acls, read_acls
from gateway.kafka.driver.admin_client import AdminClient
from gateway.kafka.driver.wire import EncodedRequest
from tests.support import hung
from tests.support.waiting import wait_until
from tools.cluster import Cluster, new_cluster
from tools.secured import USER, Secured

REAUTHENTICATE_MS = 4000
"""How long a SCRAM-SHA-256 login lasts on the tests' broker; the other password logins do not expire."""

PLACES = {
    Resource.OWN_TOPICS: (TOPIC, "__trivium_", True),
    Resource.CLIENT_TOPICS: (TOPIC, "*", False),
    Resource.CLUSTER: (CLUSTER, "kafka-cluster", False),
    Resource.GROUPS: (GROUP, "*", False),
    Resource.TRANSACTIONS: (TRANSACTIONAL_ID, "trivium-", True),
}
"""Kafka's resource type, the resource's name, and whether the name is a prefix."""


class _CreateAcls(EncodedRequest):
    API_KEY = 30
    API_VERSION = 1


class _DeleteAcls(EncodedRequest):
    API_KEY = 31
    API_VERSION = 1


def _text(value: str) -> bytes:
    return struct.pack(">h", len(value.encode())) + value.encode()


class Acls:
    """Creates and deletes ACLs over the plain listener, and waits until the broker applies them."""

    def __init__(self, bootstrap: str) -> None:
        self._admin = AdminClient(bootstrap_servers=bootstrap)

    async def __aenter__(self) -> Acls:
        await self._admin.start()
        self._node = next(iter(self._admin._client.cluster.brokers())).nodeId
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._admin.close()

    async def create(self, *acls: Acl) -> None:
        await self._change(_CreateAcls, acls)
        await wait_until(lambda: self._has(set(acls), all))

    async def delete(self, *acls: Acl) -> None:
        await self._change(_DeleteAcls, acls)
        await wait_until(lambda: self._has(set(acls), none))

    async def _change(self, request: type[EncodedRequest], acls: Sequence[Acl]) -> None:
        parts = [struct.pack(">i", len(acls))]
        for acl in acls:
            kind, pattern = struct.pack(">b", acl.kind), struct.pack(">b", 4 if acl.prefixed else 3)
            place = kind + _text(acl.name) + pattern + _text(acl.principal) + _text(acl.host)
            parts.append(place + struct.pack(">bb", acl.operation, 3 if acl.allow else 2))
        answer = await self._admin.request(request(b"".join(parts)), self._node)
        assert not struct.unpack_from(">h", answer, 8)[0], answer

    async def _has(self, acls: set[Acl], count: Callable[[Iterator[bool]], bool]) -> bool:
        there = set(await self.all())
        return count(acl in there for acl in acls)

    async def all(self) -> list[Acl]:
        """Return all ACLs that the broker applies."""
        return read_acls(await self._admin.request(all_acls(), self._node))


def none(found: Iterator[bool]) -> bool:
    return not any(found)


async def allow_gateway(bootstrap: str) -> None:
    """Grant only the ACLs in `NEEDS`, over the plain listener."""
    needed = [
        Acl(*PLACES[need.resource], f"User:{USER}", "*", int(operation), True)
        for need in NEEDS
        for operation in need.operations
    ]
    async with Acls(bootstrap) as acls:
        await acls.create(*needed)


@pytest.fixture(scope="session")
def secured_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start one broker with all listeners."""
    lifetime = {"listener.name.sasl.scram-sha-256.connections.max.reauth.ms": str(REAUTHENTICATE_MS)}
    cluster = new_cluster(tmp_path_factory.mktemp("secured"), settings=lifetime, nodes=(1,), secured=True)
    with asyncio.Runner(loop_factory=hung.Loop) as runner:
        runner.run(cluster.start())
        runner.run(allow_gateway(cluster.bootstrap_servers))
        yield cluster
        runner.run(cluster.stop())


def secured_of(cluster: Cluster) -> Secured:
    """Return the cluster's keys and passwords."""
    assert cluster.secured is not None
    return cluster.secured


class TokenEndpoint:
    """Issues tokens to client `a:b` with the secret `s s+s`, or gives the answer in `answer` if that is set."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[dict[str, str]] = []
        self.token = "opaque"
        self.expires_in: object = 3600
        self.answer: web.Response | None = None
        self.secured: Secured | None = None  # signs, if set
        self.held: asyncio.Event | None = None

    async def issue(self, request: web.Request) -> web.Response:
        form = {name: str(value) for name, value in (await request.post()).items()}
        self.asked.append(form)
        if self.held is not None:
            await self.held.wait()
        if self.answer is not None:
            return web.Response(status=self.answer.status, body=self.answer.body)
        user, _, secret = (
            base64.b64decode(request.headers["Authorization"].removeprefix("Basic ")).decode().partition(":")
        )
        if (unquote_plus(user), unquote_plus(secret)) != ("a:b", "s s+s"):
            return web.json_response({"error": "invalid_client", "error_description": "no such client"}, status=401)
        token = self.token
        if self.secured is not None:
            assert isinstance(self.expires_in, int)
            token = self.secured.token(self.expires_in)
        return web.json_response({"access_token": token, "token_type": "Bearer", "expires_in": self.expires_in})


@pytest.fixture
async def endpoint() -> AsyncIterator[TokenEndpoint]:
    endpoint = TokenEndpoint()
    app = web.Application()
    app.router.add_post("/token", endpoint.issue)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    endpoint.url = f"{site.name}/token"
    yield endpoint
    if endpoint.held is not None:
        endpoint.held.set()
    await runner.cleanup()
