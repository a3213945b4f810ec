"""HTTP consumers whose gateway was killed."""

from __future__ import annotations

import time
from typing import Any

import aiohttp

from tests.gateway.rest.conftest import CONTROL, JSON_RECORDS, ask
from tests.support.gateway import GatewayProcess

ACCEPT = {"Accept": "application/vnd.kafka.json.v2+json"}
SESSION_S = 6  # the least that a broker allows by default


async def join(http: aiohttp.ClientSession, group: str, name: str, topic: str) -> None:
    settings = {"name": name, "format": "json", "auto.offset.reset": "earliest"}
    assert (await ask(http, "POST", f"/consumers/{group}", settings, headers=CONTROL))[0] == 200
    subscription = f"/consumers/{group}/instances/{name}/subscription"
    assert (await ask(http, "POST", subscription, {"topics": [topic]}, headers=CONTROL))[0] == 204


async def test_its_partitions_go_to_others_after_the_session_timeout(
    new_gateway: Any, bootstrap: str, new_topic: Any
) -> None:
    topic = await new_topic(partitions=1)
    group = f"killed-{topic}"
    config = f"[http.consumer]\nsession_timeout_s = {SESSION_S}\n"
    first: GatewayProcess = await new_gateway(bootstrap, config=config, name="first").start()
    second: GatewayProcess = await new_gateway(bootstrap, config=config, name="second").start()
    base = "http://{}:{}".format(*second.address("http"))
    async with (
        aiohttp.ClientSession("http://{}:{}".format(*first.address("http"))) as dying,
        aiohttp.ClientSession(base) as http,
    ):
        await join(dying, group, "dies", topic)
        await ask(http, "POST", f"/topics/{topic}", {"records": [{"value": 1}]}, headers=JSON_RECORDS)
        path = f"/consumers/{group}/instances/dies/records?timeout=10000"
        assert [record["value"] for record in (await ask(dying, "GET", path, headers=ACCEPT))[1]] == [1]
        await first.kill()
        began = time.monotonic()
        await join(http, group, "lives", topic)
        page: list[Any] = []
        while not page:
            path = f"/consumers/{group}/instances/lives/records?timeout=2000"
            _, page = await ask(http, "GET", path, headers=ACCEPT)
        assert time.monotonic() - began < 5 * SESSION_S  # it was 45 s
