"""A broker that requires authentication, with the ACLs that the gateway needs, and an endpoint that issues tokens."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from urllib.parse import unquote_plus

import pytest
from aiohttp import web

from gateway.settings.config import KafkaConfig
from tests.support import hung
from tools.acls import allow_gateway
from tools.cluster import Cluster, new_cluster
from tools.secured import USER, Secured

REAUTHENTICATE_MS = 4000
"""How long a SCRAM-SHA-256 login lasts on the tests' broker; the other password logins do not expire."""


@pytest.fixture(scope="session")
def secured_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start one broker with all listeners."""
    lifetime = {"listener.name.sasl.scram-sha-256.connections.max.reauth.ms": str(REAUTHENTICATE_MS)}
    cluster = new_cluster(tmp_path_factory.mktemp("secured"), settings=lifetime, nodes=(1,), secured=True)
    with asyncio.Runner(loop_factory=hung.Loop) as runner:
        runner.run(cluster.start())
        runner.run(allow_gateway(cluster.bootstrap_servers, USER))
        yield cluster
        runner.run(cluster.stop())


def secured_of(cluster: Cluster) -> Secured:
    """Return the cluster's keys and passwords."""
    assert cluster.secured is not None
    return cluster.secured


def kafka_of(cluster: Cluster, user: str) -> KafkaConfig:
    """Return the settings of a client that logs in as `user`."""
    secured = secured_of(cluster)
    return KafkaConfig.model_validate(
        {
            "bootstrap_servers": cluster.servers("SASL"), "security_protocol": "SASL_SSL", "ssl_cafile": secured.ca,
            "sasl_mechanism": "PLAIN", "sasl_username": user, "sasl_password": secured.password,
        }
    )  # fmt: skip


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
