"""proton's transactions (`Container.declare_transaction`) in a thread, for tests that run in an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from proton import Delivery, Event, Message, ProtonException
from proton.handlers import TransactionHandler
from proton.reactor import Transaction
from proton.utils import BlockingConnection, BlockingReceiver

WAIT_S = 60
TRANSACTIONAL_STATE = 0x34
T = TypeVar("T")


class Ends(TransactionHandler):
    """Handles proton's events of a transaction.

    Attributes:
        event: the last event, one of `declared`, `committed`, `aborted`, `declare failed` or `commit failed`.
        condition: the error condition after a failure.
    """

    def __init__(self) -> None:
        self.event = ""
        self.condition = ""

    def _record(self, event: Event, name: str) -> None:
        condition = event.delivery.remote.condition
        self.condition = "" if condition is None else str(condition.name)
        self.event = name

    def on_transaction_declared(self, event: Event) -> None:
        self._record(event, "declared")

    def on_transaction_committed(self, event: Event) -> None:
        self._record(event, "committed")

    def on_transaction_aborted(self, event: Event) -> None:
        self._record(event, "aborted")

    def on_transaction_declare_failed(self, event: Event) -> None:
        self._record(event, "declare failed")

    def on_transaction_commit_failed(self, event: Event) -> None:
        self._record(event, "commit failed")


class Transacted:
    """A client's transaction, used in the client's thread.

    Attributes:
        ends: the handler of its events.
    """

    def __init__(self, connection: BlockingConnection, *, settles: bool = True, wait_s: float = WAIT_S) -> None:
        """Declare the transaction.

        Args:
            connection: proton's connection.
            settles: settle accepted deliveries immediately, as JMS does, instead of with the discharge.
            wait_s: time limit for each answer.
        """
        self._connection = connection
        self._wait_s = wait_s
        self.ends = Ends()
        self.transaction: Transaction = connection.container.declare_transaction(
            connection.conn, handler=self.ends, settle_before_discharge=settles
        )
        self.wait(lambda: bool(self.ends.event))

    def wait(self, condition: Callable[[], bool]) -> None:
        """Run proton until the condition is true."""
        self._connection.wait(condition, timeout=self._wait_s)

    def post(self, sender: Any, message: Message) -> Delivery:
        """Send a message in the transaction, without waiting."""
        return self.transaction.send(sender.link, message)

    def outcome(self, delivery: Delivery) -> tuple[int, str]:
        """Wait for a message's outcome in the transaction; return its descriptor and its condition."""
        self.wait(lambda: bool(delivery.remote_state))
        if int(delivery.remote_state) != TRANSACTIONAL_STATE:
            condition = delivery.remote.condition
            return -int(delivery.remote_state), "" if condition is None else str(condition.name)
        outcome = delivery.remote.data[1]
        return int(outcome.descriptor), str(outcome.value[0].value[0]) if outcome.value and outcome.value[0] else ""

    def take(self, receiver: BlockingReceiver) -> Message:
        """Receive a message and accept it in the transaction."""
        message = receiver.receive(self._wait_s)
        self.transaction.accept(receiver.fetcher.unsettled.popleft())
        return message

    def end(self, *, commit: bool = True) -> str:
        """Discharge the transaction and wait for the answer."""
        self.ends.event = ""
        (self.transaction.commit if commit else self.transaction.abort)()
        self.wait(lambda: bool(self.ends.event))
        return self.ends.event


class TransactedClient:
    """A connection with its own thread."""

    def __init__(self, address: str, **options: Any) -> None:
        """`address` is the gateway's, as host:port."""
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._address = address
        self._options = options
        self.connection: BlockingConnection

    async def connect(self) -> TransactedClient:
        """Open the connection."""

        def work() -> None:
            self.connection = BlockingConnection(f"amqp://{self._address}", timeout=WAIT_S, **self._options)

        await self.run(work)
        return self

    async def close(self, patience: float = WAIT_S) -> None:
        """Close the connection in any state; proton waits `patience` seconds for an answer."""

        def work() -> None:
            self.connection.timeout = patience
            with contextlib.suppress(ProtonException):
                self.connection.close()

        await self.run(work)
        self._thread.shutdown()

    async def __aenter__(self) -> TransactedClient:
        return await self.connect()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in the connection's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
