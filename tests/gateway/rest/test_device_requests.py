"""Requests to devices whose client's rights change while they are being sent."""

import asyncio
from typing import Any

from gateway.settings.config import AccessRule
from tests.gateway.rest.conftest import running_gateway
from tests.support.waiting import wait_until


async def test_a_request_is_not_sent_without_the_right_that_its_client_had_before_the_body(
    bootstrap: str, new_topic: Any
) -> None:
    topic = await new_topic(partitions=1)
    async with running_gateway(bootstrap) as gateway:
        gateway.use_rules(AccessRule(action="publish"))
        host, _, port = gateway.listener.bound.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /requests/{topic}%2Fa?timeout=3000 HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
        writer.write(head.encode() + b"a")
        await wait_until(lambda: gateway.counts("devices").requests_total == 1)
        changed = asyncio.Event()
        gateway.access_list.watch(lambda _: changed.set())
        gateway.use_rules(AccessRule(action="subscribe"))
        async with asyncio.timeout(60):
            await changed.wait()
            writer.write(b"b")
            assert (await reader.readline()).split()[1] == b"403"
        writer.close()
