"""Retained messages, set and seen by every foreign client."""

from __future__ import annotations

import pytest

from tests.interop.mqtt.clients import EVERY, VERSION_5, Kind, each
from tests.interop.mqtt.conftest import NewClient


@pytest.mark.parametrize("kind", **each(EVERY))
async def test_retained_messages_are_set_replaced_and_cleared(new_client: NewClient, branch: str, kind: Kind) -> None:
    publisher = await new_client(kind)
    watcher = await new_client(kind)
    await watcher.subscribe(f"{branch}/#")
    for payload in (b"old", b"new"):
        assert await publisher.publish(f"{branch}/a", payload, 1, retain=True) == 0
        assert await publisher.publish(f"{branch}/a/b", payload, 2, retain=True) == 0
    assert await publisher.publish(f"{branch}/c", b"not kept", 1) == 0
    assert not any(one.retain for one in await watcher.received(5)), "who was there sees it as news"

    for other in EVERY:
        subscriber = await new_client(other)
        await subscriber.subscribe(f"{branch}/#")
        await subscriber.subscribe(f"{branch}/a")
        seen = await subscriber.received(3)
        assert sorted(one[:4] for one in seen) == [
            (f"{branch}/a", b"new", 1, True),
            (f"{branch}/a", b"new", 1, True),
            (f"{branch}/a/b", b"new", 2, True),
        ], subscriber

    assert await publisher.publish(f"{branch}/a", b"", 1, retain=True) == 0
    late = await new_client(kind)
    await late.subscribe(f"{branch}/a/#")
    assert await publisher.publish(f"{branch}/a/end", b"live", 1) == 0
    # The order of two topics is open: retained messages are read while new ones arrive.
    assert {one.topic for one in await late.received(2)} == {f"{branch}/a/b", f"{branch}/a/end"}
    assert await publisher.publish(f"{branch}/a/b", b"", 2, retain=True) == 0


@pytest.mark.parametrize("kind", **each(VERSION_5))
async def test_retain_handling_and_retain_as_published(new_client: NewClient, branch: str, kind: Kind) -> None:
    client = await new_client(kind)
    assert await client.publish(f"{branch}/a", b"kept", retain=True) == 0
    await client.subscribe(f"{branch}/a", retain_handling=2, retain_as_published=True)
    await client.subscribe(f"{branch}/a", retain_handling=1, retain_as_published=True)
    assert await client.publish(f"{branch}/a", b"1", retain=True) == 0
    assert [one[1:4] for one in await client.received(1)] == [(b"1", 1, True)], "neither sent what was kept"

    await client.unsubscribe(f"{branch}/a")
    await client.subscribe(f"{branch}/a", retain_handling=1)
    await client.received(2)
    await client.subscribe(f"{branch}/a", retain_handling=0)
    await client.received(3)
    assert await client.publish(f"{branch}/a", b"2", retain=True) == 0
    expected = [(b"1", True), (b"1", True), (b"1", True), (b"2", False)]
    assert [(one.payload, one.retain) for one in await client.received(4)] == expected
    assert await client.publish(f"{branch}/a", b"", retain=True) == 0
