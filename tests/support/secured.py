"""One broker that asks who everybody is, with the ACLs that the gateway needs; and an endpoint that issues tokens."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from urllib.parse import unquote_plus

import pytest
from aiohttp import web
from aiokafka.protocol.admin import CreateAclsRequest

from gateway.embedded.cluster import Cluster, new_cluster
from gateway.embedded.secured import USER, Secured
from gateway.kafka.cluster.rights import NEEDS, Resource
from gateway.kafka.driver.admin_client import AdminClient
from tests.support import hung

REAUTHENTICATE_MS = 4000
"""How long a login by SCRAM-SHA-256 lasts on the tests' broker; the other passwords' last for ever."""

PLACES = {
    Resource.OWN_TOPICS: (2, "__trivium_", 4),
    Resource.CLIENT_TOPICS: (2, "*", 3),
    Resource.CLUSTER: (4, "kafka-cluster", 3),
    Resource.GROUPS: (3, "*", 3),
    Resource.TRANSACTIONS: (5, "trivium-", 4),
}
"""Kafka's kind of resource, its name, and 3 for a name or 4 for the beginning of one."""


async def allow_gateway(bootstrap: str) -> None:
    """Grant what `NEEDS` lists and no more, over the plain listener."""
    admin = AdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    for need in NEEDS:
        kind, name, pattern = PLACES[need.resource]
        for operation in need.operations:
            request = CreateAclsRequest(kind, name, pattern, f"User:{USER}", "*", int(operation), 3)
            answer = await admin.request(request, next(iter(admin._client.cluster.brokers())).nodeId)
            assert answer.creation_responses[0][0] == 0, answer
    await admin.close()


@pytest.fixture(scope="session")
def secured_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One broker with all listeners."""
    lifetime = {"listener.name.sasl.scram-sha-256.connections.max.reauth.ms": str(REAUTHENTICATE_MS)}
    cluster = new_cluster(tmp_path_factory.mktemp("secured"), settings=lifetime, nodes=(1,), secured=True)
    with asyncio.Runner(loop_factory=hung.Loop) as runner:
        runner.run(cluster.start())
        runner.run(allow_gateway(cluster.bootstrap_servers))
        yield cluster
        runner.run(cluster.stop())


def secured_of(cluster: Cluster) -> Secured:
    """Its keys and passwords."""
    assert cluster.secured is not None
    return cluster.secured


class TokenEndpoint:
    """Issues tokens to client `a:b` with the secret `s s+s`; does as `answer` says, if that is set."""

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
