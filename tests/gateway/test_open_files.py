"""When open files are used up, listeners pause and management answers; all recover when some are closed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections.abc import Callable
from pathlib import Path

import aiohttp

from gateway.net.descriptors import RESERVE
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import PahoClient
from tests.support.waiting import wait_until

SPARE = 24


def open_files(gateway: GatewayProcess) -> list[int]:
    return [int(entry.name) for entry in Path(f"/proc/{gateway.pid}/fd").iterdir()]


async def ready(gateway: GatewayProcess) -> tuple[int, dict[str, object]]:
    """Query readiness on a new connection, as probes do."""
    async with (
        aiohttp.ClientSession(f"http://{gateway.addresses['management']}") as session,
        session.get("/healthy") as healthy,
    ):
        assert healthy.status == 200
        async with session.get("/ready") as response:
            return response.status, json.loads(await response.text())


async def is_ready(gateway: GatewayProcess, status: int) -> None:
    pause = asyncio.Event()
    async with asyncio.timeout(60):
        while (await ready(gateway))[0] != status:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(pause.wait(), 0.05)


async def test_management_answers_when_open_files_are_used_up(
    bootstrap: str, new_gateway: Callable[..., GatewayProcess]
) -> None:
    gateway = await new_gateway(bootstrap, config="[mqtt]\nconnect_timeout_s = 300\n").start()
    used = max(open_files(gateway))
    limit = used + SPARE + RESERVE
    resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (limit, limit))
    crowd = [await asyncio.open_connection(*gateway.address("mqtt")) for _ in range(limit)]

    await is_ready(gateway, 503)
    status, told = await ready(gateway)
    assert (status, told["open_files_used_up"]) == (503, True)
    assert told["listeners"] == {"mqtt": False, "amqp": False, "http": False}
    waiting = PahoClient(gateway.address("mqtt"))
    connecting = asyncio.create_task(waiting.connect())
    for _ in range(3):
        await ready(gateway)
    assert not connecting.done()
    async with (
        aiohttp.ClientSession(f"http://{gateway.addresses['management']}") as session,
        session.get("/metrics") as response,
    ):
        metrics = (await response.text()).splitlines()
    (total,) = [line for line in metrics if line.startswith("trivium_descriptors_pauses_total ")]
    assert float(total.split()[1]) >= 1

    for _, writer in crowd:
        writer.close()
    await asyncio.wait_for(connecting, 60)
    assert waiting.connack.value == 0
    await is_ready(gateway, 200)
    assert gateway.log.read_text().count("nearly all open files are in use") == 1
    assert "Too many open files" not in gateway.log.read_text()
    await waiting.close()
    await wait_until(lambda: len(open_files(gateway)) < used + SPARE)
    assert await gateway.stop() == 0
