"""The pump: any sans-io connection over a real socket; order, pauses, closes and time."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import trustme

from gateway.net.listener import ListenError
from gateway.net.pump import Pump
from gateway.net.reading import LITTLE_S, PIECE
from gateway.net.writes import WRITES_PER_TURN, Writes
from gateway.settings.config import Address
from gateway.views.pauses import PROCESS_BUDGET
from tests.support.lines import EchoServer
from tests.support.listeners import listening
from tests.support.waiting import wait_until


class Server:
    def __init__(self, group: asyncio.TaskGroup, patience: float | None, tls: ssl.SSLContext | None) -> None:
        self.listener = EchoServer(group.create_task, patience)
        self.sessions = self.listener.sessions
        listening(self.listener, tls=tls)

    async def connect(self, tls: ssl.SSLContext | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.listener.bound.rpartition(":")
        return await asyncio.open_connection(host, int(port), ssl=tls)

    async def greeted(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Pump]:
        """Connect the first peer, which has got an answer."""
        reader, writer = await self.connect()
        writer.write(b"a\n")
        assert await reader.readline() == b"a!\n"
        pump = self.sessions[0].pump
        assert pump is not None
        return reader, writer, pump


@contextlib.asynccontextmanager
async def serving(patience: float | None = None, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    async with asyncio.TaskGroup() as group:
        server = Server(group, patience, tls)
        await server.listener.start()
        try:
            yield server
        finally:
            server.listener.stop_accepting()
            await server.listener.pumps.close(2)


async def test_a_waiting_handler_holds_later_events() -> None:
    async with serving() as server:
        reader, writer = await server.connect()
        writer.write(b"a\nwait\nb\n")
        assert await reader.readline() == b"a!\n"
        writer.write(b"c\n")
        await wait_until(lambda: server.sessions[0].pump is not None and not server.sessions[0].pump.reading)
        assert server.sessions[0].seen == [b"a", b"wait"]
        server.sessions[0].go.set()
        assert [await reader.readline(), await reader.readline()] == [b"b!\n", b"c!\n"]
        writer.close()


async def test_the_close_is_readable_although_the_peer_continues_to_send() -> None:
    async with serving() as server:
        reader, writer = await server.connect()
        writer.write(b"bye\n" + b"more\n" * 20_000)
        assert await reader.read() == b"bye!\n"
        writer.close()
        await wait_until(lambda: server.sessions[0].gone)
        assert b"more" not in server.sessions[0].seen


@pytest.mark.parametrize("way", ["plain", "TLS"])
async def test_what_a_client_sent_before_its_close_is_handled_although_the_session_waits(way: str) -> None:
    authority = trustme.CA()
    theirs, ours = ssl.create_default_context(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.configure_trust(theirs)
    authority.issue_cert("127.0.0.1").configure_cert(ours)
    async with serving(tls=ours if way == "TLS" else None) as server:
        reader, writer = await server.connect(theirs if way == "TLS" else None)
        writer.write(b"a\nwait\nb\n")
        assert await reader.readline() == b"a!\n"
        session = server.sessions[0]
        assert session.pump is not None
        session.pump.read_ahead()
        writer.write(b"c\n")
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        await wait_until(lambda: session.pump is not None and session.pump._eof)
        assert session.seen == [b"a", b"wait"]
        session.go.set()
        await wait_until(lambda: len(session.gone) == 1 and not server.listener.pumps)
        assert session.seen[:4] == [b"a", b"wait", b"b", b"c"]


async def test_a_closed_peer_that_reads_nothing_does_not_keep_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.net.pump.LINGER_S", 0.05)
    monkeypatch.setattr("gateway.net.pump.UNREAD_S", 0.1)
    async with serving() as server:
        _, writer, pump = await server.greeted()
        assert pump.transport is not None
        writer.transport.pause_reading()
        pump.transport.write(bytes(32 * 1024 * 1024))
        pump.close()
        await wait_until(lambda: bool(server.sessions[0].gone) and not server.listener.pumps)
        writer.transport.abort()


async def test_a_pause_stops_reading_until_every_reason_is_removed() -> None:
    async with serving() as server:
        reader, writer, pump = await server.greeted()
        pump.pause_reading("one")
        pump.pause_reading("two")
        writer.write(b"b\n")
        pump.resume_reading("one")
        assert not pump.reading
        assert server.sessions[0].seen == [b"a"]
        pump.resume_reading("two")
        assert await reader.readline() == b"b!\n"
        writer.close()


@pytest.mark.parametrize("end", ["goes on", "has left"])
async def test_bytes_that_were_already_read_wait_for_the_end_of_a_pause(end: str) -> None:
    lines = [b"full", *(b"%05d" % number for number in range(20_000)), b"last"]
    async with serving() as server:
        _, writer = await server.connect()
        writer.write(b"".join(line + b"\n" for line in lines))
        await wait_until(lambda: server.sessions[0].pump is not None and server.sessions[0].pump.is_held_back)
        session, pump = server.sessions[0], server.sessions[0].pump
        assert pump is not None
        assert len(session.seen) < PIECE
        if end == "has left":
            pump.eof_received()
            seen = [event for event in session.seen if isinstance(event, bytes)]
            assert len(seen) > PIECE
            assert seen == lines[: len(seen)]
        else:
            pump.resume_reading(PROCESS_BUDGET)
            await wait_until(lambda: len(session.seen) == len(lines))
            assert session.seen == lines
            assert pump.reading
        writer.close()


async def test_deadlines_pass_without_traffic_and_traffic_moves_them() -> None:
    async with serving(patience=1.5) as server:
        loop = asyncio.get_running_loop()
        reader, writer = await server.connect()
        started = loop.time()
        await wait_until(lambda: loop.time() - started > 0.5)
        writer.write(b"a\n")
        assert await reader.readline() == b"a!\n"
        assert await reader.readline() == b"too quiet\n"
        assert round(loop.time() - started, 2) >= 2
        assert await reader.read() == b""
        writer.close()


async def test_a_failing_session_costs_its_own_connection_only() -> None:
    async with serving() as server:
        reader, writer = await server.connect()
        other_reader, other = await server.connect()
        writer.write(b"boom\n")
        assert await reader.read() == b"our fault\n"
        writer.close()
        other.write(b"fine\n")
        assert await other_reader.readline() == b"fine!\n"
        await wait_until(lambda: len(server.listener.pumps) == 1)
        other.close()


async def test_an_address_in_use_is_named_with_its_key() -> None:
    async with serving() as server:
        twice = EchoServer(asyncio.create_task)
        listening(twice, Address(server.listener.bound), key="amqp.address")
        with pytest.raises(ListenError) as caught:
            await twice.start()
        assert str(caught.value) == f"amqp.address: {server.listener.bound} is in use by another program"


async def test_many_things_of_one_read_are_done_a_few_in_each_turn() -> None:
    async with serving() as server:
        reader, writer = await server.connect()
        writer.write(b"first\n")
        assert await reader.readline() == b"first!\n"
        session = server.sessions[0]
        handle, together = session.handle, []

        def work(events: list[Any]) -> Any:
            together.append(len(events))
            until = time.thread_time() + 2 * LITTLE_S
            while time.thread_time() < until:
                pass  # the read is much work, however small the pieces are
            return handle(events)

        session.handle = work  # type: ignore[method-assign]
        writer.write(b"x\n" * 40_000)
        await reader.readexactly(40_000 * len(b"x!\n"))
        assert max(together) <= PIECE // 2
        writer.close()


async def test_a_thousand_that_are_to_write_do_so_in_turns_and_each_once(logged: list[Any]) -> None:
    loop = asyncio.get_running_loop()
    turn = 0
    written: dict[int, list[int]] = collections.defaultdict(list)

    class Waiting:
        def __init__(self, number: int) -> None:
            self.number = number

        def flush_now(self) -> None:
            written[self.number].append(turn)
            if self.number == 5:
                raise RuntimeError("our bug, in one of them")

    def count() -> None:
        nonlocal turn
        turn += 1
        if turn < 20:
            loop.call_soon(count)

    writes = Writes()
    for number in range(1000):
        writes.add(cast("Pump", Waiting(number)))
    count()
    await wait_until(lambda: turn == 20)
    assert [len(turns) for turns in written.values()] == [1] * 1000
    assert list(written) == list(range(1000))
    busiest = collections.Counter(turns[0] for turns in written.values()).most_common(1)[0][1]
    assert busiest <= WRITES_PER_TURN
    assert [str(line["exc_info"]) for line in logged] == ["our bug, in one of them"]


async def test_written_waits_for_earlier_writes_only() -> None:
    turns: list[int] = []
    writes = Writes()
    asking = True

    class Again:
        """Has more to write after each write."""

        def flush_now(self) -> None:
            turns.append(len(turns))
            if asking:
                writes.add(cast("Pump", self))

    many = 3 * WRITES_PER_TURN
    for _ in range(many):
        writes.add(cast("Pump", Again()))
    written = writes.written()
    await asyncio.sleep(0)
    assert len(turns) == WRITES_PER_TURN  # the loop runs others before the next
    assert not written.done()
    await written
    assert many <= len(turns) < many + 2 * WRITES_PER_TURN
    asking = False  # all tests share the loop
    await writes.written()
    assert len(turns) < 2 * many + 2 * WRITES_PER_TURN
    await Writes().written()  # nothing waits
