"""What the log says of a connection."""

from __future__ import annotations

import uuid

from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.waiting import wait_until


async def test_a_failed_connection_is_logged_with_its_address(gateway: GatewayProcess) -> None:
    client = await RawClient.connect(gateway.address("mqtt"), f"fails-{uuid.uuid4().hex[:8]}")
    host, port = client.local
    client.send_bytes(b"\x00\x00")
    await client.expect_end()
    client.drop()

    def logged() -> bool:
        lines = gateway.log.read_text().splitlines()
        return any("connection failed" in line and f"{host}:{port}" in line for line in lines)

    await wait_until(logged)
