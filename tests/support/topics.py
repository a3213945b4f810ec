"""Topics that can be used when they are there."""

from __future__ import annotations

import asyncio
import contextlib

from aiokafka.admin import AIOKafkaAdminClient


async def until_led(admin: AIOKafkaAdminClient, name: str) -> None:
    """A new topic needs a moment until the broker that is asked knows it and its leaders."""
    pause = asyncio.Event()
    async with asyncio.timeout(20):
        while True:
            (topic,) = await admin.describe_topics([name])
            if topic["error_code"] == 0 and all(partition["leader"] >= 0 for partition in topic["partitions"]):
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(pause.wait(), 0.01)
