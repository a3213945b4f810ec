"""Hand-written frames against the gateway: what client libraries never send, and limits to the byte."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.amqp.attaches import MAX_ATTACHES
from gateway.amqp.server import AmqpServer
from gateway.kafka.publish.publisher import Publisher
from gateway.net.pump import Pump
from gateway.settings.config import BudgetConfig
from mapping.outcomes import Outcome
from protocols.amqp import outcomes
from tests.gateway.amqp.conftest import amqp_listener
from tests.support.amqp_frames import Frames, WireClient
from tests.support.assembled import assembled
from tests.support.topics import read_all
from tests.support.waiting import wait_until

TIMEOUT = 60
ATTACH, FLOW, TRANSFER, DISPOSITION, DETACH, CLOSE = 0x12, 0x13, 0x14, 0x15, 0x16, 0x18
ACCEPTED, REJECTED = b"\x00\x53\x24", b"\x00\x53\x25"
EMPTY = b"\x00\x00\x00\x08\x02\x00\x00\x00"
DATA_HEAD = b"\x00\x53\x75\xb0"


def message(size: int) -> bytes:
    """A message of one Data section, `size` bytes in all."""
    body = size - len(DATA_HEAD) - 4
    return DATA_HEAD + body.to_bytes(4, "big") + b"x" * body


def transfers(number: int, data: bytes, *, handle: int = 0, part: int = 60_000, last: bool = True) -> bytes:
    """One message in as many transfers as it needs; without `last` it stays incomplete."""
    parts = [data[at : at + part] for at in range(0, len(data), part)]
    return b"".join(
        Frames.transfer(number, one, handle=handle, more=not last or at < len(parts) - 1, first=at == 0)
        for at, one in enumerate(parts)
    )


@contextlib.asynccontextmanager
async def client_of(listener: AmqpServer, *attaches: bytes, opening: bytes = b"") -> AsyncIterator[WireClient]:
    """A client without SASL, with attached links and credit."""
    host, _, port = listener.bound.rpartition(":")
    client = await WireClient.connect((host, int(port)))
    try:
        async with asyncio.timeout(TIMEOUT):
            client.say(opening or Frames.begin())
            assert await client.header() == Frames.HEADER
            await client.until(0x11)
            for attach in attaches:
                client.say(attach)
                await attached(client)
            yield client
    finally:
        await client.close()


async def attached(client: WireClient) -> None:
    await client.until(ATTACH)
    while True:
        flow = await client.until(FLOW)
        if flow[5] > 4:  # fields: of the link, not only of the session
            return


async def test_a_connection_is_shown_to_operators_when_it_is_open(
    listener: AmqpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[int, int]] = []
    connection_made = Pump.connection_made

    def look() -> None:
        sockets = [client.socket for client in listener.clients()]
        shown.append((len(sockets), len([connection.subject for connection in listener.flowing()])))

    def look_around(pump: Pump, transport: Any) -> None:
        look()
        connection_made(pump, transport)
        look()

    monkeypatch.setattr(Pump, "connection_made", look_around)
    async with client_of(listener):
        assert shown == [(0, 0), (1, 1)]


@pytest.mark.clause("AMQP-5.3")
@pytest.mark.parametrize("step", [1, 100_000])
async def test_a_message_without_sasl(listener: AmqpServer, bootstrap: str, new_topic: Any, step: int) -> None:
    """Where anonymous clients are allowed; split anywhere."""
    topic = await new_topic(partitions=1)
    async with client_of(listener, Frames.attach(address=topic)) as client:
        said = Frames.transfer(0, DATA_HEAD + b"\x00\x00\x00\x03abc")
        for at in range(0, len(said), step):
            client.say(said[at : at + step])
        assert ACCEPTED in await client.until(DISPOSITION)
    assert [record.value for record in await read_all(bootstrap, topic)] == [b"abc"]


@pytest.mark.clause("AMQP-2.6.7")
async def test_a_transfer_beyond_the_credit(start_listener: Any, bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    listener = await start_listener(amqp={"link_credit": 3})
    async with client_of(listener, Frames.attach(address=topic)) as client:
        client.say(b"".join(transfers(number, message(100 + number)) for number in range(4)))
        assert outcomes.TRANSFER_LIMIT_EXCEEDED.encode() in await client.until(DETACH)
        client.say(Frames.frame(Frames.performative(DETACH, b"\x43", Frames.TRUE)))
        client.say(Frames.attach("again", 1, address=topic))
        await attached(client)
        client.say(transfers(4, message(200), handle=1))
        while ACCEPTED not in await client.until(DISPOSITION):
            pass  # of the detached link, without an outcome
    sizes = [len(record.value) for record in await read_all(bootstrap, topic)]
    assert sorted(sizes) == [92, 93, 94, 192], "messages within the credit are stored, though their link is detached"


async def test_messages_up_to_their_limit_and_above(start_listener: Any, bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    limit = 100_000
    listener = await start_listener(amqp={"max_message_bytes": limit})
    async with client_of(listener, Frames.attach(address=topic)) as client:
        client.say(transfers(0, message(limit)))
        assert ACCEPTED in await client.until(DISPOSITION)
        client.say(transfers(1, message(limit + 1)))
        refused = await client.until(DISPOSITION)
        assert REJECTED in refused
        assert outcomes.MESSAGE_SIZE_EXCEEDED.encode() in refused
        client.say(transfers(2, message(limit - 1)))
        assert ACCEPTED in await client.until(DISPOSITION)
        client.say(transfers(3, message(4 * limit + 1), last=False))
        assert outcomes.MESSAGE_SIZE_EXCEEDED.encode() in await client.until(DETACH)
        client.say(Frames.frame(Frames.performative(DETACH, b"\x43", Frames.TRUE)))
        client.say(Frames.attach("again", 1, address=topic))
        await attached(client)
    assert [len(record.value) for record in await read_all(bootstrap, topic)] == [limit - 8, limit - 9]


@pytest.mark.parametrize("ordered_by", ["connection", "link"])
async def test_messages_of_several_links_that_arrive_together(
    start_listener: Any, bootstrap: str, new_topic: Any, ordered_by: str
) -> None:
    """They are one partition in the order of arrival, or each link's are."""
    topic = await new_topic(partitions=3)
    listener = await start_listener(amqp={"ordered_by": ordered_by})
    count, links = 60, 3
    attaches = [Frames.attach(f"l{handle}", handle, address=topic) for handle in range(links)]
    async with client_of(listener, *attaches) as client:
        client.say(
            b"".join(
                Frames.transfer(number, b"\x00\x53\x75\xa0\x02%02d" % number, handle=number % links)
                for number in range(count)
            )
        )
        await wait_until(lambda: listener.statistics().incoming[Outcome.STORED] == count)
    found: dict[int, list[int]] = {}
    for record in await read_all(bootstrap, topic):
        found.setdefault(record.partition, []).append(int(record.value))
    parts = [list(range(count))] if ordered_by == "connection" else [list(range(n, count, links)) for n in range(links)]
    assert sorted(found.values()) == parts


@pytest.mark.clause("AMQP-2.7.5")
async def test_a_foreign_message_format_is_refused_by_name(
    listener: AmqpServer, bootstrap: str, new_topic: Any
) -> None:
    """As Azure's batches have, in one transfer or several; the messages around them are stored."""
    topic = await new_topic(partitions=1)

    def frame(number: int, data: bytes, format_: int, *, more: bool = False) -> bytes:
        tag, flags = Frames.binary(b"%d" % number), (Frames.FALSE, Frames.TRUE if more else Frames.FALSE)
        items = (b"\x43", Frames.uint(number), tag, Frames.uint(format_), *flags)
        return Frames.frame(Frames.performative(TRANSFER, *items) + data)

    sent = (
        frame(0, message(50), 0), frame(1, message(60), 0x80013700), frame(2, message(70), 0),
        frame(3, message(80)[:30], 1, more=True), Frames.transfer(3, message(80)[30:], first=False),
        frame(4, message(90), 0),
    )  # fmt: skip
    async with client_of(listener, Frames.attach(address=topic)) as client:
        client.say(b"".join(sent))
        refused = [await rejection(client) for _ in range(2)]
        assert [b"0x80013700" in refused[0], b"0x00000001" in refused[1]] == [True, True]
        assert all(outcomes.NOT_IMPLEMENTED.encode() in one for one in refused)
        await wait_until(lambda: listener.statistics().incoming[Outcome.STORED] == 3)
    assert [len(record.value) for record in await read_all(bootstrap, topic)] == [42, 62, 82]


async def rejection(client: WireClient) -> bytes:
    """The next disposition with an error."""
    while REJECTED not in (found := await client.until(DISPOSITION)):
        pass
    return found


@pytest.mark.clause("AMQP-2.6.14")
async def test_an_aborted_message_is_not_stored(listener: AmqpServer, bootstrap: str, new_topic: Any) -> None:
    topic = await new_topic(partitions=1)
    async with client_of(listener, Frames.attach(address=topic)) as client:
        client.say(transfers(0, message(500), last=False))
        client.say(Frames.transfer(0, b"", aborted=True, first=False))
        client.say(transfers(1, message(300)))
        assert ACCEPTED in await client.until(DISPOSITION)
    assert [len(record.value) for record in await read_all(bootstrap, topic)] == [292]
    assert listener.statistics().aborted == 1


async def test_partial_messages_of_many_links(bootstrap: str, new_topic: Any) -> None:
    """They share the connection's budget; the link that exceeds it is detached, and the others can complete theirs."""
    topic = await new_topic(partitions=1)
    budget = BudgetConfig(connection_bytes=200_000)
    attaches = [Frames.attach(f"l{handle}", handle, address=topic) for handle in range(3)]
    begun = message(120_000)
    async with (
        assembled(bootstrap, create=False, budget=budget) as backend,
        amqp_listener(backend, amqp={"max_message_bytes": 150_000}) as listener,
        client_of(listener, *attaches) as client,
    ):
        for handle, size in enumerate((80_000, 80_000, 50_000)):
            client.say(transfers(handle, begun[:size], handle=handle, last=False))
        assert outcomes.RESOURCE_LIMIT_EXCEEDED.encode() in await client.until(DETACH)
        for handle in range(2):
            client.say(Frames.transfer(handle, begun[80_000:], handle=handle, first=False))
            assert ACCEPTED in await client.until(DISPOSITION)
    assert [len(record.value) for record in await read_all(bootstrap, topic)] == [119_992] * 2


@pytest.mark.clause("AMQP-2.4.5")
async def test_an_idle_time_out_closes_the_connection(start_listener: Any) -> None:
    listener = await start_listener(amqp={"idle_timeout_s": 0.5})
    async with client_of(listener) as client:
        assert outcomes.RESOURCE_LIMIT_EXCEEDED.encode() in await client.until(CLOSE)
        assert await client.end() == b""


@pytest.mark.clause("AMQP-2.4.5")
async def test_heartbeats_are_sent(listener: AmqpServer) -> None:
    """A peer with an idle time-out of 0.4 s gets empty frames."""
    idle = Frames.performative(0x10, Frames.string("idle"), Frames.NULL, Frames.NULL, Frames.NULL, Frames.uint(400))
    begin = Frames.performative(0x11, Frames.NULL, b"\x43", Frames.uint(10), Frames.uint(10))
    async with client_of(listener, opening=Frames.HEADER + Frames.frame(idle) + Frames.frame(begin)) as client:
        for _ in range(5):
            while (await client.frame(empty=True))[1]:
                pass
            client.say(EMPTY)


async def test_another_protocols_header(listener: AmqpServer) -> None:
    """The answer to TLS, HTTP and MQTT on this port is AMQP's header and the end of the connection, too."""
    for first in (b"AMQP\x02\x01\x00\x00", b"\x16\x03\x01\x02\x00\x01\x00\x01", b"GET / HT", b"\x10\x0c\x00\x04MQTT"):
        host, _, port = listener.bound.rpartition(":")
        client = await WireClient.connect((host, int(port)))
        async with asyncio.timeout(TIMEOUT):
            client.say(first)
            assert await client.end() == Frames.HEADER
        await client.close()


@pytest.mark.parametrize("sending", [True, False], ids=["sender", "receiver"])
async def test_a_refused_attach_carries_all_its_fields(listener: AmqpServer, sending: bool) -> None:
    """Azure's client for Python reads the answer's 14 fields by their numbers, null or not (part 2.7.3)."""
    async with client_of(listener) as client:
        client.say(Frames.attach(sending=sending, address="__internal"))
        body = await client.until(ATTACH)
        assert body[3] in (0xC0, 0xD0)
        count = body[5] if body[3] == 0xC0 else int.from_bytes(body[8:12], "big")
        assert count == 14
        assert outcomes.UNAUTHORIZED_ACCESS.encode() in await client.until(DETACH)


@pytest.mark.parametrize("ending", ["detach", "end"])
async def test_attaches_that_are_withdrawn_before_their_answer_are_forgotten(
    listener: AmqpServer, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """While Kafka does not answer, a peer may attach and detach without end."""
    answered = asyncio.Event()
    monkeypatch.setattr(Publisher, "topic", lambda publisher, name, **options: answered.wait())
    begin = Frames.performative(0x11, Frames.NULL, b"\x43", Frames.uint(10), Frames.uint(10))
    detach = Frames.performative(DETACH, b"\x43", Frames.TRUE)
    async with client_of(listener) as client:
        (connection,) = listener.departing()
        client.say(b"".join(Frames.frame(begin, channel) for channel in (1, 2)))
        for number in range(MAX_ATTACHES):  # on two sessions, as each has a limit, too
            channel, handle = divmod(number, 200)
            client.say(on_channel(channel, Frames.attach(f"l{number}", handle)))
        for number in range(100):
            client.say(on_channel(2, Frames.attach(f"other{number}")))
            if ending == "detach":
                client.say(Frames.frame(detach, 2))
                await client.until(DETACH)
            else:
                client.say(Frames.frame(Frames.performative(0x17), 2))
                await client.until(0x17)
                client.say(Frames.frame(begin, 2))
        assert not connection._attaches._queued
        answered.set()


def on_channel(channel: int, frame: bytes) -> bytes:
    return frame[:6] + channel.to_bytes(2) + frame[8:]


async def test_a_flow_a_message_and_a_detach_in_one_read(start_listener: Any, new_topic: Any) -> None:
    """The flow lets a returned message go that is large enough to be written at once; the other link has ended then."""
    topic = await new_topic(partitions=1)
    listener = await start_listener(amqp={"reply_topic": topic})
    dynamic = b"\x00\x53\x28" + Frames.listed(*[Frames.NULL] * 4, Frames.TRUE)
    receiver = Frames.performative(
        ATTACH, Frames.string("r"), b"\x43", Frames.TRUE, Frames.NULL, Frames.NULL, dynamic, b"\x00\x53\x29\x45"
    )

    def credit(given: int, received: int) -> bytes:
        counts = (Frames.uint(received), Frames.uint(1 << 20), Frames.uint(9), Frames.uint(1 << 20), b"\x43")
        return Frames.frame(Frames.performative(FLOW, *counts, Frames.uint(received), Frames.uint(given)))

    async with client_of(listener) as client:
        client.say(Frames.frame(receiver))
        await client.until(ATTACH)
        (key,) = next(iter(listener._services._nodes.values()))._nodes
        client.say(Frames.attach("w", 1, address=f"{topic}/{key.decode()}"))
        await attached(client)
        client.say(credit(1, 0) + transfers(0, message(100_000), handle=1))
        number = 0
        while (await client.until(TRANSFER))[-1:] != b"x" or number < 1:
            number += 1
        released = Frames.performative(DISPOSITION, Frames.TRUE, b"\x43", Frames.NULL, Frames.TRUE, b"\x00\x53\x26\x45")
        client.say(Frames.frame(released))
        (node,) = next(iter(listener._services._nodes.values()))._nodes.values()
        await wait_until(lambda: node._returned and node._timer is None)
        detach = Frames.frame(Frames.performative(DETACH, b"\x52\x01", Frames.TRUE))
        client.say(credit(1, 1) + Frames.transfer(1, DATA_HEAD + bytes(4), handle=1, settled=True) + detach)
        client.say(Frames.attach("again", 2, address=topic))
        while b"again" not in await client.until(ATTACH):
            pass
    await wait_until(lambda: listener.statistics().incoming[Outcome.STORED] == 2)
