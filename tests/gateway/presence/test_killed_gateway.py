"""The clients of a gateway that is killed are offline in the end, and one that comes back elsewhere is online."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable
from typing import Any

from aiokafka import AIOKafkaConsumer

from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.waiting import wait_until


async def test_the_clients_of_a_killed_gateway(bootstrap: str, new_gateway: Callable[..., GatewayProcess]) -> None:
    run = uuid.uuid4().hex[:8]
    config = f'[presence]\ntopic = "presence-{run}"\n'
    killed, other = [await new_gateway(bootstrap, config=config).start() for _ in range(2)]
    states: dict[str, str] = {}

    async def follow() -> None:
        async with AIOKafkaConsumer(
            f"presence-{run}", bootstrap_servers=bootstrap, auto_offset_reset="earliest"
        ) as log:
            async for record in log:
                state: dict[str, Any] = json.loads(record.value or b"{}")
                states[record.key.decode()] = state.get("state", "offline")

    following = asyncio.create_task(follow())
    try:
        clients = [await RawClient.connect(killed.address("mqtt"), f"{run}-{who}") for who in ("gone", "back")]
        await wait_until(lambda: list(states.values()) == ["online"] * 2)
        await killed.kill()
        clients.append(await RawClient.connect(other.address("mqtt"), f"{run}-back"))
        await wait_until(lambda: states == {f"mqtt/{run}-gone": "offline", f"mqtt/{run}-back": "online"}, 90)
        for client in clients:
            client.drop()
        await wait_until(lambda: states[f"mqtt/{run}-back"] == "offline")
    finally:
        following.cancel()
