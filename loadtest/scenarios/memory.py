"""Scenario `memory`: measures the gateway's resident memory per idle connection and per offline session.

An offline session must only cost its record, however many messages it has missed: the log is its queue. Some sessions
reconnect at the end and must get every message in order.
"""

from __future__ import annotations

import asyncio
import resource
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, cast

from loadtest.beside import in_turn
from loadtest.clients.joining import join
from loadtest.clients.mqtt import Publisher, publishes
from loadtest.clients.mqtt_wire import Splitter, connect_packet, read_varint, subscribe_packet
from loadtest.clients.pace import Pace
from loadtest.clients.topics import create_topic
from loadtest.gateway import process_resident
from loadtest.numbering import Numbering
from loadtest.verify import Arrivals

WARM_UP: Final = 1000  # sessions before the first measurement
EXPIRY_S: Final = 3600
STEP_S: Final = 60.0  # timeout of one connection's step
FILES: Final = 65_536


class Crowd(NamedTuple):
    """Parameters.

    Attributes:
        connections: idle ones.
        sessions: offline ones.
        backlog: messages queued for each session.
        returning: sessions that reconnect to get them.
        payload: bytes.
        settle: seconds before each measurement.
    """

    connections: int = 10_000
    sessions: int = 10_000
    backlog: int = 1_000
    returning: int = 300
    payload: int = 100
    settle: float = 2.0


class Weight(NamedTuple):
    """The result, in bytes per connection or session."""

    per_connection: float
    per_session: float  # when it is offline
    per_session_with_backlog: float
    per_session_after_returns: float
    session_seconds: float
    publish_seconds: float
    return_seconds: float
    returned: int
    problems: list[str]

    def row(self, crowd: Crowd) -> dict[str, float | int]:
        """Return the columns of a report."""
        return {
            **crowd._asdict(),
            "bytes per idle connection": round(self.per_connection),
            "bytes per offline session": round(self.per_session),
            "with its backlog": round(self.per_session_with_backlog),
            "after some returned": round(self.per_session_after_returns),
            "sessions made per second": round(crowd.sessions / self.session_seconds),
            "published in s": round(self.publish_seconds, 1),
            "returned": self.returned,
            "messages to them per second": round(self.returned * crowd.backlog / self.return_seconds),
            "problems": len(self.problems),
        }


class Step(asyncio.Protocol):
    """Writes its bytes and waits for packets with the first bytes `wanted` in order; then writes `closing`."""

    def __init__(self, data: bytes, wanted: Sequence[int], closing: bytes = b"") -> None:
        self._data = data
        self._wanted = list(wanted)
        self._closing = closing
        self._splitter = Splitter()
        self.transport: asyncio.Transport | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Write the data."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(self._data)

    def data_received(self, data: bytes) -> None:
        """Handle packets."""
        for first, body in self._splitter.feed(data):
            if not self._wanted or first != self._wanted[0] or (first == 0x20 and body[1]):
                self._end(ConnectionAbortedError(f"packet 0x{first:02x} {body.hex()}"))
                return
            self._wanted.pop(0)
        if not self._wanted and self._closing and self.transport is not None:
            self.transport.write(self._closing)  # the server then closes
        elif not self._wanted:
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Finish, successfully or not."""
        self._end(exc or (ConnectionResetError("closed too early") if self._wanted else None))

    def _end(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class Returning(asyncio.Protocol):
    """Resumes its session and receives the backlog, acknowledging QoS 1 immediately.

    Attributes:
        arrivals: the received messages.
        present: CONNACK's Session Present.
    """

    def __init__(self, client_id: str, numbering: Numbering, expected: int) -> None:
        self._client_id = client_id
        self._expected = expected
        self._splitter = Splitter()
        self._transport: asyncio.Transport | None = None
        self.present: bool | None = None
        self.arrivals = Arrivals(numbering)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send CONNECT without Clean Start."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(
            connect_packet(self._client_id, clean_start=False, session_expiry_s=EXPIRY_S, keep_alive_s=0)
        )

    def data_received(self, data: bytes) -> None:
        """Handle CONNACK and PUBLISH."""
        acks = bytearray()
        for first, body in self._splitter.feed(data):
            if first == 0x20:
                self.present = bool(body[0])
            elif first & 0xF0 == 0x30:
                at = 2 + struct.unpack_from(">H", body)[0]
                acks += b"\x40\2" + body[at : at + 2]
                length, at = read_varint(body, at + 2)
                self.arrivals.take(body[at + length :])
        if acks and self._transport is not None:
            self._transport.write(bytes(acks))
        if self.arrivals.total >= self._expected and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail `done`, if it is pending."""
        if not self.done.done():
            self.done.set_exception(exc or ConnectionResetError("closed too early"))

    def close(self) -> None:
        """Disconnect; the session is kept."""
        if self._transport is not None:
            self._transport.write(b"\xe0\x00")
            self._transport.close()


def allow_files() -> None:
    """Raise the limit of open files of this process and its children."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Scales(NamedTuple):
    """The gateway to measure: its address, process id, and Kafka's address."""

    address: tuple[str, int]
    pid: int
    kafka: str


async def weigh(gateway: Scales, crowd: Crowd, say: Callable[[str], None]) -> Weight:
    """Measure a gateway that was started after `allow_files`."""
    problems: list[str] = []
    numbering = Numbering()
    topic = f"memory-{numbering.run}"
    await create_topic(gateway.kafka, topic)
    await _sessions(gateway, numbering, f"{topic}/#", range(min(WARM_UP, crowd.sessions)), "warm-up")
    per_connection = await _connections(gateway, crowd, numbering)
    say(f"{per_connection:.0f} bytes per idle connection")

    before = await _settled(gateway, crowd)
    began = time.monotonic()
    await _sessions(gateway, numbering, f"{topic}/#", range(crowd.sessions), "session")
    session_seconds = time.monotonic() - began
    empty = await _settled(gateway, crowd)
    say(f"{crowd.sessions / session_seconds:.0f} sessions/s, {(empty - before) / crowd.sessions:.0f} bytes each")

    began = time.monotonic()
    await _publish(gateway, topic, numbering, crowd)
    publish_seconds = time.monotonic() - began
    full = await _settled(gateway, crowd)
    say(f"with a backlog of {crowd.backlog}: {(full - before) / crowd.sessions:.0f} bytes each")

    began = time.monotonic()
    returned = await _return(gateway, numbering, crowd, problems)
    return_seconds = time.monotonic() - began
    after = await _settled(gateway, crowd)
    sessions = crowd.sessions
    return Weight(
        per_connection, (empty - before) / sessions, (full - before) / sessions, (after - before) / sessions,
        session_seconds, publish_seconds, return_seconds, returned, problems,
    )  # fmt: skip


async def _settled(gateway: Scales, crowd: Crowd) -> int:
    await asyncio.sleep(crowd.settle)
    return process_resident(gateway.pid)


async def _connections(gateway: Scales, crowd: Crowd, numbering: Numbering) -> float:
    before = await _settled(gateway, crowd)
    steps: list[Step] = []

    async def connect(number: int) -> None:
        data = connect_packet(f"{numbering.run}-idle-{number}", keep_alive_s=600)
        steps.append(await _step(gateway, Step(data, [0x20])))

    await in_turn(range(crowd.connections), connect)
    weight = (await _settled(gateway, crowd) - before) / max(1, crowd.connections)
    for step in steps:
        assert step.transport is not None
        step.transport.abort()
    return weight


async def _sessions(
    gateway: Scales, numbering: Numbering, topic_filter: str, numbers: Sequence[int], kind: str
) -> None:
    """Create sessions and leave them."""

    async def make(number: int) -> None:
        data = connect_packet(f"{numbering.run}-{kind}-{number}", session_expiry_s=EXPIRY_S)
        data += subscribe_packet(1, [(topic_filter, 1)])
        step = await _step(gateway, Step(data, [0x20, 0x90], b"\xe0\x00"))
        assert step.transport is not None
        step.transport.close()

    await in_turn(numbers, make)


async def _step(gateway: Scales, step: Step) -> Step:
    async with asyncio.timeout(STEP_S):
        await (await join(step, gateway.address)).done
    return step


async def _publish(gateway: Scales, topic: str, numbering: Numbering, crowd: Crowd) -> None:
    payloads = [numbering.payload(0, sequence, crowd.payload) for sequence in range(crowd.backlog)]
    publisher = Publisher(f"{topic}-publisher", publishes(f"{topic}/news", payloads), Pace(50, None))
    await publisher.join(gateway.address)
    publisher.start()
    await publisher.finished
    publisher.close()


async def _return(gateway: Scales, numbering: Numbering, crowd: Crowd, problems: list[str]) -> int:
    """Resume some sessions together in groups; return how many got everything."""
    good = 0

    async def reconnect(number: int) -> None:
        nonlocal good
        name = f"{numbering.run}-session-{number}"
        client = await join(Returning(name, numbering, crowd.backlog), gateway.address)
        try:
            async with asyncio.timeout(STEP_S):
                await client.done
        except (TimeoutError, ConnectionError) as error:
            problems.append(f"{name}: {type(error).__name__} after {client.arrivals.total} messages")
        arrivals = client.arrivals
        if not client.present:
            problems.append(f"{name}: session present is {client.present}")
        elif (arrivals.total, arrivals.duplicated, arrivals.reordered) != (crowd.backlog, 0, 0):
            problems.append(
                f"{name}: {arrivals.total} messages, {arrivals.duplicated} again, {arrivals.reordered} out of order"
            )
        else:
            good += 1
        client.close()

    step = max(1, crowd.sessions // max(1, crowd.returning))
    await in_turn(range(0, step * crowd.returning, step), reconnect)
    return good
