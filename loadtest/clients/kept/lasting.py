"""A client that reconnects whenever it loses its connection."""

from __future__ import annotations

import abc
import asyncio
import collections
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, NamedTuple

from loadtest.clients.connection import Connection, join

AGAIN_S: Final = 0.05  # between connection attempts
ANSWER_S: Final = 30.0  # timeout of the handshake
CONNECT_S: Final = 5.0


class LastingClient(Connection, abc.ABC):
    """Common parts of the clients of all protocols.

    Attributes:
        connects: number of connections on which the client was served.
        faults: violations by the server.
        refusals: counts of refused messages, links and connections by their code, and of lost connections.
        connected: set while it is served.
        handshakes: seconds of each reconnection's handshake.
        moved: whether it has lost a connection since `moved` was reset.
        alive_s: interval of heartbeats.
    """

    sign_of_life: ClassVar[bytes]
    alive_s = 20.0

    def __init__(self, address: tuple[str, int], client_id: str) -> None:
        super().__init__()
        self.client_id = client_id
        self.connects = 0
        self.faults: list[str] = []
        self.refusals: collections.Counter[str] = collections.Counter()
        self.connected = asyncio.Event()
        self.handshakes: list[float] = []
        self.moved = False
        self._began_at = 0.0
        self._address = address
        self._gone = asyncio.Event()
        self._decided = asyncio.Event()  # the handshake succeeded, or the connection is lost
        self._stopping = False

    async def run(self) -> None:
        """Stay connected until `stop`. It may run again afterwards, with what it has kept."""
        self._stopping = False
        while not self._stopping:
            self._gone.clear()
            self._decided.clear()
            try:
                async with asyncio.timeout(CONNECT_S):
                    await join(self, self._address)
            except (OSError, TimeoutError):
                await asyncio.sleep(AGAIN_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await self._decided.wait()
            if not self.connected.is_set() and not self._gone.is_set():
                self.faults.append(f"not served within {ANSWER_S:g} s")
                self.drop()
            while not self._gone.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.alive_s):
                        await self._gone.wait()
                self.write(self.sign_of_life)
            await asyncio.sleep(AGAIN_S)

    def stop(self) -> None:
        """Disconnect; `run` then returns."""
        self._stopping = True
        self.close()

    def _served(self) -> None:
        """Note that the server has accepted the client."""
        if self.moved:
            self.handshakes.append(time.monotonic() - self._began_at)
        self.connected.set()
        self._decided.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the handshake."""
        super().connection_made(transport)
        self._began_at = time.monotonic()
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the lost connection; `run` reconnects."""
        if not self._stopping:
            self.refusals["connection lost"] += 1
            self.moved = self.moved or self.connected.is_set()
        self._transport = None
        self.connected.clear()
        self._gone.set()
        self._decided.set()

    @abc.abstractmethod
    def _begin(self) -> None:
        """Send the first bytes of the handshake."""


class Messages(NamedTuple):
    """The numbered messages of a sender.

    Attributes:
        key: of all of them; MQTT: the last level of their topic.
        payload: makes the payload of a message.
        on_ack: called with each acknowledged message.
        window: the most unacknowledged messages; HTTP: the most records of a request.
    """

    key: str
    payload: Callable[[int], bytes]
    on_ack: Callable[[int], None]
    window: int


class Place(NamedTuple):
    """The position of a record in its topic."""

    partition: int
    offset: int


class Delivery(NamedTuple):
    """A received message.

    Attributes:
        payload: of its Data section.
        place: the record's position.
        generation: of the connection: how often the gateway was killed before it.
        at: time of arrival, `time.monotonic`.
    """

    payload: bytes
    place: Place
    generation: int
    at: float


class NumberedSender:
    """The progress of a client that sends numbered messages; a mix-in.

    Attributes:
        messages: what it sends.
        total: number of messages; may be increased.
        answered: number of acknowledged messages.
        given_up: number of refused messages that are not sent again.
    """

    messages: Messages
    total = 0
    answered = 0
    given_up = 0
    _next = 0  # the next message to send for the first time

    def push(self) -> None:
        """Send as many messages as allowed."""
        raise NotImplementedError

    def top_up(self, due: float) -> None:
        """Have it send its first `due` messages; a delayed sender does not catch up in one burst."""
        most = self.answered + self.given_up + 4 * self.messages.window
        self.total = max(self.total, int(min(due, most)))
        self.push()

    def acknowledge(self, number: int) -> None:
        """Count an acknowledged message."""
        self.answered += 1
        self.messages.on_ack(number)

    @property
    def finished(self) -> bool:
        """Whether every message is acknowledged or given up."""
        return self.answered + self.given_up >= self.total

    @property
    def sent(self) -> int:
        """The number of messages sent at least once."""
        return self._next


def progressed(senders: Sequence[NumberedSender]) -> Callable[[], bool]:
    """Return a condition: every sender has got an acknowledgement since this call."""
    before = [one.answered for one in senders]
    return lambda: all(one.answered > then for one, then in zip(senders, before, strict=True))
