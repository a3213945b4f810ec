"""proton's blocking client in a separate thread, for tests that run in an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from proton import UNDESCRIBED, Array, ConnectionException, Data, Message, symbol
from proton.reactor import LinkOption
from proton.utils import BlockingConnection

from gateway.amqp.server import AmqpServer

WAIT_S = 60
TIMEOUT = 60
T = TypeVar("T")


async def as_client(listener: AmqpServer, work: Callable[[BlockingConnection], T], **options: Any) -> T:
    """Run `work` with a blocking connection in a thread."""
    return await as_client_of(listener.bound, work, **options)


async def as_client_of(address: str, work: Callable[[BlockingConnection], T], **options: Any) -> T:
    """Run `work` with a blocking connection to `HOST:PORT` in a thread."""

    def run() -> T:
        connection = BlockingConnection(f"amqp://{address}", timeout=TIMEOUT, **options)
        try:
            return work(connection)
        finally:
            connection.close()

    return await asyncio.to_thread(run)


def data(body: bytes, **fields: Any) -> Message:
    """A message with one Data section."""
    return Message(body=body, inferred=True, **fields)


def body_of(message: Message) -> bytes:
    """Return the bytes of a message's Data section."""
    found = message.body
    assert isinstance(found, memoryview | bytes)
    return bytes(found)


def until_drained(connection: BlockingConnection, *receivers: Any) -> None:
    """Wait until the credit is used up and all its messages have arrived.

    proton may have processed the end of a drain while events of messages before it are still queued.
    """
    links = [receiver.link for receiver in receivers]
    connection.wait(lambda: not any(link.draining() or link.queued for link in links), timeout=TIMEOUT)


class Temporary(LinkOption):
    """Create a temporary node; `kind` is a capability."""

    def __init__(self, kind: str = "") -> None:
        self.kind = kind

    def apply(self, link: Any) -> None:
        terminus = link.target if link.is_sender else link.source
        terminus.dynamic = True
        if self.kind:
            terminus.capabilities.put_object(Array(UNDESCRIBED, Data.SYMBOL, symbol(self.kind)))


class ThreadedSender:
    """A sender link to one topic, used in one thread as proton requires."""

    def __init__(self, address: str, topic: str) -> None:
        self._address = address
        self._topic = topic
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._connection: BlockingConnection
        self._sender: Any
        self._info: Any = None

    async def _call(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def connect(self) -> ThreadedSender:
        """Connect and attach."""

        def work() -> None:
            self._connection = BlockingConnection(f"amqp://{self._address}", timeout=WAIT_S)
            self._sender = self._connection.create_sender(self._topic)

        await self._call(work)
        return self

    async def send(self, body: bytes) -> str:
        """Send, wait for the outcome, and return its name."""

        def work() -> str:
            delivery = self._sender.link.send(Message(body=body))
            # The outcome and the close may arrive in one segment; then proton reports the close first.
            with contextlib.suppress(ConnectionException):
                self._connection.wait(lambda: delivery.settled, timeout=WAIT_S)
            return str(getattr(delivery.remote_state, "name", delivery.remote_state))

        return str(await self._call(work))

    async def attach(self, topic: str) -> None:
        """Attach another link."""
        await self._call(lambda: self._connection.create_sender(topic, name=f"{topic}-2"))

    async def end(self) -> str | None:
        """Wait until the gateway closes the connection; return the error condition."""

        def work() -> str | None:
            with contextlib.suppress(ConnectionException):
                while self._connection.conn.remote_condition is None and not self._connection.disconnected:
                    self._connection.wait(lambda: False, timeout=WAIT_S)
            condition = self._connection.conn.remote_condition
            self._info = None if condition is None else condition.info
            return None if condition is None else str(condition.name)

        ended = await self._call(work)
        self._thread.shutdown()
        return ended

    def info(self) -> dict[str, Any]:
        """Return the error condition's description and info, after `end`."""
        return {str(name): value for name, value in (self._info or {}).items()}

    async def close(self) -> None:
        """Close the connection."""
        await self._call(self._connection.close)
        self._thread.shutdown()
