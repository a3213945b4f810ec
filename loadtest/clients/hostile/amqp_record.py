"""Records what real AMQP clients send: qpid-proton talks to a gateway through a relay that keeps the client's bytes.

Each recording is a list of pieces: protocol headers and whole frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import uuid
from typing import Any, Final

from proton import Array, Data, Delivery, Described, Message, decimal128, int32, symbol, timestamp, ulong
from proton.handlers import MessagingHandler, TransactionHandler
from proton.reactor import Container, DurableSubscription, DynamicNodeProperties, Filter, Selector
from proton.utils import BlockingConnection, LinkDetached

WAIT_S: Final = 30
Pieces = list[bytes]


class Relay:
    """Forwards one connection between a client and the gateway, and records the client's bytes."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.sent = bytearray()
        self._target = target
        self._server: asyncio.Server
        self._over = asyncio.Event()

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        async with asyncio.timeout(WAIT_S):
            await self._over.wait()

    @property
    def url(self) -> str:
        """The URL for the client."""
        host, port = self._server.sockets[0].getsockname()
        return f"amqp://{host}:{port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._copy(reader, far_writer, self.sent))
            group.create_task(self._copy(far_reader, writer, bytearray()))
        self._over.set()

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                kept += data
                writer.write(data)
        writer.close()


def cut(said: bytes) -> Pieces:
    """Split a client's bytes into protocol headers and frames."""
    pieces: Pieces = []
    at = 0
    while at < len(said):
        size = 8 if said[at : at + 4] == b"AMQP" else struct.unpack_from(">I", said, at)[0]
        pieces.append(said[at : at + size])
        at += size
    return pieces


async def record(address: tuple[str, int], topic: str) -> list[Pieces]:
    """Return all recordings, made with the gateway at `address` and an existing topic."""
    found: list[Pieces] = []
    for play in (_basics, _groups, _transactions, _pass):
        async with Relay(address) as relay:
            await asyncio.to_thread(play, relay.url, topic)
            found.append(cut(bytes(relay.sent)))
    return found


def rich() -> Message:
    """Return a message with every section that proton can write, and many types."""
    values: dict[Any, Any] = {
        "text": "ünïcode", "flag": True, "int": int32(-5), "long": 2**40, "real": 1.5, "raw": b"\xff\x00", "none": None,
        "time": timestamp(1_700_000_000_000), "uuid": uuid.UUID(int=7), "symbol": symbol("sym"), "ulong": ulong(2**63),
        "decimal": decimal128(bytes(range(16))),
    }  # fmt: skip
    message = Message(
        id=uuid.UUID(int=3), correlation_id=ulong(9), user_id=b"anonymous", address="elsewhere", subject="subject",
        reply_to="replies/x", content_type=symbol("text/plain"), content_encoding=symbol("identity"),
        group_id="group", group_sequence=4, reply_to_group_id="back", durable=True, priority=7, ttl=600,
        properties=values, body={"list": [1, [2, {"three": 3}]], "array": Array(None, Data.INT, 1, 2, 3)},
    )  # fmt: skip
    message.annotations = {symbol("x-opt-bridge.key"): "key", symbol("x-opt-jms-msg-type"): 2}
    message.instructions = {symbol("x-opt-instruction"): Described(symbol("what"), ["it", "is"])}
    return message


def _basics(url: str, topic: str) -> None:
    """Record SASL, settled and unsettled messages, the anonymous relay, a large message, a temporary queue."""
    connection = BlockingConnection(url, timeout=WAIT_S, allowed_mechs="ANONYMOUS", max_frame_size=4096)
    receiver = connection.create_receiver(topic, credit=20, name="tail")
    sender = connection.create_sender(topic, name="sender")
    sender.send(Message(body=b"plain", inferred=True))
    sender.send(rich())
    sender.send(Message(body=b"x" * 70_000, inferred=True))
    relay = connection.create_sender(None, name="relay")
    relay.send(Message(body="text", address=f"{topic}/key"))
    for _ in range(4):
        receiver.receive(timeout=WAIT_S)
        receiver.accept()
    temporary = connection.create_receiver(None, dynamic=True, credit=2, name="temporary", options=_dynamic())
    relay.send(Message(body=["reply"], address=temporary.link.remote_source.address))
    temporary.receive(timeout=WAIT_S)
    temporary.accept()
    temporary.link.close()
    relay.close()  # type: ignore[no-untyped-call]
    receiver.link.detach()
    connection.close()


def _dynamic() -> Any:
    return DynamicNodeProperties({"lifetime-policy": "delete-on-close"})


def _groups(url: str, topic: str) -> None:
    """Record groups: a filter, every outcome, durable and shared subscriptions, positions, refused links."""
    connection = BlockingConnection(url, timeout=WAIT_S, allowed_mechs="ANONYMOUS")
    name = uuid.uuid4().hex
    options = Selector("colour = 'green' OR amqp.priority > 3")
    receiver = connection.create_receiver(f"{topic}/group.id/{name}", credit=10, name="group", options=options)
    sender = connection.create_sender(topic, name="sender")
    for number in range(4):
        sender.send(Message(body=number, properties={"colour": "green", "number": number}))
    for outcome in (Delivery.ACCEPTED, Delivery.REJECTED, Delivery.RELEASED, Delivery.MODIFIED):
        receiver.receive(timeout=WAIT_S)
        assert receiver.fetcher is not None
        delivery = receiver.fetcher.unsettled.popleft()
        delivery.local.failed = True
        delivery.update(outcome)
        delivery.settle()
    receiver.close()  # type: ignore[no-untyped-call]
    durable = connection.create_receiver(topic, credit=1, name=f"durable-{name}", options=DurableSubscription())
    durable.link.detach()
    offsets = Filter({symbol("rabbitmq:stream-offset-spec"): Described(symbol("rabbitmq:stream-offset-spec"), "first")})
    first = connection.create_receiver(topic, credit=3, name="first", options=offsets)
    first.receive(timeout=WAIT_S)
    first.accept()
    with contextlib.suppress(LinkDetached):
        connection.create_receiver(f"{topic}/no/such", name="refused")
    with contextlib.suppress(LinkDetached):
        connection.create_receiver(topic, name="bad", options=Selector("colour = "))
    connection.close()


class _Transaction(MessagingHandler, TransactionHandler):
    """Commits one transaction and aborts another; if they are refused, that is recorded."""

    def __init__(self, url: str, topic: str) -> None:
        super().__init__(auto_accept=False, prefetch=5)
        self._url, self._topic = url, topic
        self._done = 0
        self._posted = False
        self._transaction: Any = None

    def on_start(self, event: Any) -> None:
        self._container = event.container
        self._connection = event.container.connect(self._url, reconnect=False, allowed_mechs="ANONYMOUS")
        self._sender = event.container.create_sender(self._connection, self._topic)
        event.container.declare_transaction(self._connection, handler=self)
        event.container.schedule(10, self)

    def on_timer_task(self, event: Any) -> None:
        self._connection.close()

    def on_transaction_declared(self, event: Any) -> None:
        self._transaction = event.transaction
        self._posted = False
        self.on_sendable(event)

    def on_sendable(self, event: Any) -> None:
        if self._transaction is None or self._posted or not self._sender.credit:
            return
        self._posted = True
        self._transaction.send(self._sender, Message(body=b"in a transaction", inferred=True))
        if self._done:
            self._transaction.abort()
        else:
            self._transaction.commit()

    def on_transaction_committed(self, event: Any) -> None:
        self._done += 1
        self._transaction = None
        self._container.declare_transaction(self._connection, handler=self)

    def on_transaction_aborted(self, event: Any) -> None:
        self._end(event)

    def on_transaction_declare_failed(self, event: Any) -> None:
        self._end(event)

    def on_transaction_commit_failed(self, event: Any) -> None:
        self._end(event)

    def on_link_error(self, event: Any) -> None:
        self._end(event)

    def _end(self, event: Any) -> None:
        self._connection.close()

    def on_connection_closed(self, event: Any) -> None:
        event.container.stop()


def _transactions(url: str, topic: str) -> None:
    Container(_Transaction(url, topic)).run()


class _Pass(MessagingHandler):
    """Connects without SASL; settled and unsettled messages, several sessions, a rejected message, heartbeats."""

    def __init__(self, url: str, topic: str) -> None:
        super().__init__()
        self._url, self._topic = url, topic
        self._answers = 0

    def on_start(self, event: Any) -> None:
        connection = event.container.connect(self._url, reconnect=False, heartbeat=1, sasl_enabled=False)
        self._connection = connection
        self._sender = event.container.create_sender(connection, f"queue://{self._topic}")
        session = connection.session()
        session.open()
        self._second = event.container.create_sender(session, f"{self._topic}/partitions/0")
        event.container.schedule(10, self)

    def on_timer_task(self, event: Any) -> None:
        self._connection.close()

    def on_link_opened(self, event: Any) -> None:
        if event.link.is_sender:
            event.link.send(Message(body=b"settled", inferred=True)).settle()
            event.link.send(Message(body=None, user_id=b"somebody else"))
            event.link.send(Message(body="accepted"))

    def on_settled(self, event: Any) -> None:
        self._answers += 1
        if self._answers == 4:
            self._connection.close()

    def on_connection_closed(self, event: Any) -> None:
        event.container.stop()


def _pass(url: str, topic: str) -> None:
    Container(_Pass(url, topic)).run()
