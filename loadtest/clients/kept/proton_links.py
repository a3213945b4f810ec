"""Reconnecting AMQP clients with unmodified qpid-proton.

Each connection has its own container, which runs in a thread and ends with the connection. Callbacks are forwarded to
the event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from proton import Array, Data, Message, Terminus, symbol
from proton.handlers import MessagingHandler
from proton.reactor import Container, ReceiverOption

from loadtest.clients.kept.lasting import Delivery, Messages, NumberedSender, Place

AGAIN_S: Final = 0.2
TICK_S: Final = 0.01
HEARTBEAT_S: Final = 20
_TRANSIENT: Final = ("amqp:connection:forced", "amqp:internal-error", "amqp:connection:framing-error")
"""Also includes proton's own condition for a broken connection."""


class ProtonClient(MessagingHandler):
    """One link on one connection at a time. Proton's callbacks run in the container's thread.

    Attributes:
        connects: number of connections on which the link was attached.
        faults: violations by the server.
    """

    def __init__(self, address: tuple[str, int], container: str, **options: Any) -> None:
        super().__init__(**options)
        self.client_id = container
        self.connects = 0
        self.faults: list[str] = []
        self._url = "amqp://{}:{}".format(*address)
        self._loop = asyncio.get_running_loop()
        self._stopping = False
        self._connection: Any = None

    async def run(self) -> None:
        """Stay connected until `stop`."""
        while not self._stopping:
            container = Container(self)
            container.container_id = self.client_id
            await asyncio.to_thread(container.run)
            self._lost()
            await asyncio.sleep(AGAIN_S)

    def stop(self) -> None:
        """Disconnect; `run` then returns."""
        self._stopping = True

    def _lost(self) -> None:
        """Handle a lost connection."""

    def _attach(self, container: Any) -> None:
        """Attach the link."""
        raise AssertionError("to be overridden")

    def _work(self) -> None:
        """Do periodic work while connected."""

    def on_start(self, event: Any) -> None:
        """Connect."""
        self._connection = event.container.connect(
            self._url, reconnect=False, heartbeat=HEARTBEAT_S, allowed_mechs="ANONYMOUS"
        )
        self._attach(event.container)
        event.container.schedule(TICK_S, self)

    def on_timer_task(self, event: Any) -> None:
        """Check for work and for `stop`."""
        if self._connection is None:
            return  # without another timer the container ends
        if self._stopping:
            self._connection.close()
            self._connection = None
            return
        self._work()
        event.container.schedule(TICK_S, self)

    def on_transport_error(self, event: Any) -> None:
        """Note that the connection broke or was refused."""
        self._connection = None

    def on_disconnected(self, event: Any) -> None:
        """Note that the connection is closed."""
        self._connection = None

    def on_link_error(self, event: Any) -> None:
        """Handle a refused or detached link."""
        self._ended(event.link.remote_condition)

    def on_connection_error(self, event: Any) -> None:
        """Handle a close by the server."""
        self._ended(event.connection.remote_condition)

    def _ended(self, condition: Any) -> None:
        if condition is not None and condition.name not in _TRANSIENT:
            self.faults.append(f"the server ended with {condition}")
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class ProtonSender(NumberedSender, ProtonClient):
    """Sends numbered unsettled messages; see `KeptSender`."""

    def __init__(self, address: tuple[str, int], container: str, target: str, messages: Messages) -> None:
        super().__init__(address, container)
        self.messages = messages
        self._target = target
        self._sender: Any = None
        self._again: list[int] = []
        self._waiting: set[int] = set()

    def push(self) -> None:
        """Do nothing: the container's thread checks `total` itself."""

    def _lost(self) -> None:
        self._sender = None
        self._again = sorted({*self._again, *self._waiting})
        self._waiting.clear()

    def _attach(self, container: Any) -> None:
        self._sender = container.create_sender(self._connection, self._target, name="kept")

    def on_link_opened(self, event: Any) -> None:
        """Count an attached link; a null target means that a detach follows."""
        if event.link.remote_target.address is not None:
            self.connects += 1

    def on_sendable(self, event: Any) -> None:
        """Send within the new credit."""
        self._work()

    def _work(self) -> None:
        sender, (key, payload, _, window) = self._sender, self.messages
        while sender.credit > 0 and len(self._waiting) < window and (self._again or self._next < self.total):
            if self._again:
                number = heapq.heappop(self._again)
            else:
                number = self._next
                self._next += 1
            self._waiting.add(number)
            notes = {symbol("x-opt-bridge.key"): key}
            sender.send(Message(body=payload(number), inferred=True, annotations=notes), tag=str(number))

    def on_accepted(self, event: Any) -> None:
        """Count a message that is in Kafka."""
        number = int(event.delivery.tag)
        self._waiting.discard(number)
        self._loop.call_soon_threadsafe(self.acknowledge, number)

    def on_released(self, event: Any) -> None:
        """Queue a released or modified message for sending again."""
        number = int(event.delivery.tag)
        self._waiting.discard(number)
        heapq.heappush(self._again, number)

    def on_rejected(self, event: Any) -> None:
        """Record a rejected message as a fault."""
        self.faults.append(f"message {event.delivery.tag} rejected: {event.delivery.remote.condition}")


class _Terms(ReceiverOption):
    """The source's durability and capabilities."""

    def __init__(self, durable: bool, capabilities: Sequence[str]) -> None:
        self._durable = durable
        self._capabilities = capabilities

    def apply(self, receiver: Any) -> None:
        """Set them in the attach."""
        if self._durable:
            receiver.source.durability = Terminus.DELIVERIES
            receiver.source.expiry_policy = Terminus.EXPIRE_NEVER
        if self._capabilities:
            names = map(symbol, self._capabilities)
            receiver.source.capabilities.put_object(Array(None, Data.SYMBOL, *names))


class ProtonReceiver(ProtonClient):
    """Receives from one source, and accepts everything immediately; see `KeptReceiver`."""

    def __init__(
        self,
        address: tuple[str, int],
        container: str,
        link: str,
        source: str,
        *,
        on_delivery: Callable[[Delivery], None],
        on_accept: Callable[[Delivery, float], None],
        generation: Callable[[], int],
        durable: bool = False,
        capabilities: Sequence[str] = (),
    ) -> None:
        super().__init__(address, container, prefetch=100, auto_accept=False)
        self.attached = asyncio.Event()
        self.generation_at_start = 0
        self._link, self._source = link, source
        self._terms = _Terms(durable, capabilities)
        self._on_delivery = on_delivery
        self._on_accept = on_accept
        self._generation = generation

    def _attach(self, container: Any) -> None:
        self.generation_at_start = self._generation()
        container.create_receiver(self._connection, self._source, name=self._link, options=self._terms)

    def on_link_opened(self, event: Any) -> None:
        """Count an attached link; a null source means that a detach follows."""
        if event.link.remote_source.address is not None:
            self.connects += 1
            self._loop.call_soon_threadsafe(self.attached.set)

    def on_message(self, event: Any) -> None:
        """Accept a message, and pass it on."""
        notes = event.message.annotations
        place = Place(notes["x-opt-bridge.partition"], notes["x-opt-bridge.offset"])
        delivery = Delivery(bytes(event.message.body), place, self.generation_at_start, time.monotonic())
        self.accept(event.delivery)
        self._loop.call_soon_threadsafe(self._take, delivery)

    def _take(self, delivery: Delivery) -> None:
        self._on_delivery(delivery)
        self._on_accept(delivery, delivery.at)
