"""Objects that a failed test left open are closed with it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import weakref

import pytest

from tests.support.hung import Loop
from tests.support.leftovers import forget


async def fails(opened: list[weakref.ref[asyncio.StreamWriter]], address: tuple[str, int]) -> None:
    _, writer = await asyncio.open_connection(*address)
    opened.append(weakref.ref(writer))
    raise AssertionError("as a test does")


async def fails_in_a_group(opened: list[weakref.ref[asyncio.StreamWriter]], address: tuple[str, int]) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(fails(opened, address))


@pytest.mark.parametrize("work", [fails, fails_in_a_group])
async def test_a_failed_tests_open_objects_are_closed_without_a_warning(work) -> None:
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        ended.set()

    opened: list[weakref.ref[asyncio.StreamWriter]] = []
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        with pytest.raises((AssertionError, BaseExceptionGroup)) as caught:
            await work(opened, server.sockets[0].getsockname()[:2])
        assert opened[0]() is not None, "the traceback keeps it"
        forget(caught.value)
        assert opened[0]() is None
        await asyncio.wait_for(ended.wait(), 60)


@pytest.mark.parametrize("failed", [False, True])
def test_an_open_transport_fails_the_last_test_unless_another_has_failed(
    failed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Loop, "failed", failed)
    loop = Loop()
    ours, theirs = socket.socketpair()
    with theirs:
        loop.run_until_complete(loop.create_connection(asyncio.Protocol, sock=ours))
        with contextlib.nullcontext() if failed else pytest.raises(ResourceWarning, match="unclosed"):
            loop.close()
    assert ("unclosed" in capsys.readouterr().err) == failed
