"""Local transactions (AMQP 1.0 part 4): the messages posted and retired with a txn-id form one Kafka transaction.

A `Coordinator` is a link whose messages declare and discharge transactions. A `Transaction` belongs to it, and every
link of the connection may take part. Posted messages are stored immediately but invisible until the commit; retirements
are kept until the discharge. A successful discharge makes both effective together. Otherwise posted messages are
discarded, retired and settled records are offered again as a failed attempt, and the peer keeps unsettled deliveries.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import structlog

from flowcontrol.admission import Admission, Refusal, client_share
from gateway.amqp.counters import Counts
from gateway.amqp.links.incoming import IncomingLink, settle_each
from gateway.amqp.links.outgoing import OutgoingLink
from gateway.amqp.links.peer import Peer
from gateway.kafka.contracts import Result
from gateway.kafka.groups.delivery.assignment import AssignedPartition
from gateway.kafka.groups.reader import GroupReader
from gateway.kafka.transactions.kafka_transaction import TransactionFailed, Transactions
from gateway.runtime.failures import failures
from mapping.outcomes import Outcome
from mapping.record import Record
from protocols.amqp.events import Retired
from protocols.amqp.links import Link
from protocols.amqp.outcomes import (
    DECODE_ERROR,
    INTERNAL_ERROR,
    NOT_ALLOWED,
    NOT_IMPLEMENTED,
    REJECTED,
    RESOURCE_LIMIT_EXCEEDED,
    STATE_ACCEPTED,
    STATE_FAILED,
    UNAUTHORIZED_ACCESS,
    DeliveryState,
    Error,
)
from protocols.amqp.primitives import DecodeError
from protocols.amqp.transactions import (
    LOCAL_TRANSACTIONS,
    MULTI_SSNS_PER_TXN,
    MULTI_TXNS_PER_SSN,
    ROLLED_BACK,
    TIMED_OUT,
    UNKNOWN_ID,
    Declare,
    Discharge,
    read_command,
)

log = structlog.get_logger(__name__)

CAPABILITIES: Final = (LOCAL_TRANSACTIONS, MULTI_TXNS_PER_SSN, MULTI_SSNS_PER_TXN)
COMMAND_BYTES: Final = 4096  # max-message-size of a coordinator's link; a command has less than 100 bytes
COMMAND_CREDIT: Final = 50
SETTLE_S: Final = 5.0
"""How long a rollback waits until posted messages are stored, so that they get their usual outcome."""
_REJECTED_OUTCOME: Final = "amqp:rejected:list"


class Coordinators:
    """All transactions of the process."""

    def __init__(
        self,
        kafka: Transactions,
        counts: Counts,
        *,
        limit: int,
        per_client: int | None,
        timeout_s: float,
        random_id: Callable[[], str],
    ) -> None:
        """`limit` is the number of open transactions, `per_client` the share of one client (see `client_share`).

        `random_id` returns hexadecimal digits for a txn-id.
        """
        self.kafka = kafka
        self.counts = counts
        self.timeout_s = timeout_s  # from the first message of a transaction to its discharge
        self.open: set[Transaction] = set()  # declared, their discharge not answered, their coordinators attached
        self.ending: set[asyncio.Task[None]] = set()  # running commits and rollbacks
        self._places = Admission(limit, client_share(limit, per_client)) if limit else None
        self._random_id = random_id
        self._stopping = False

    def declare(self, coordinator: Coordinator) -> Transaction | Error:
        """Start a transaction; return it or the reason why it is refused."""
        if self._stopping:
            return Error(INTERNAL_ERROR, "the gateway is stopping")
        client = coordinator.peer.share
        refusal = Refusal.FULL if self._places is None else self._places.enter(client)
        if refusal is not None:
            whose = "" if refusal is Refusal.FULL else " of this client"
            return Error(RESOURCE_LIMIT_EXCEEDED, f"too many transactions{whose} are open")
        transaction = Transaction(self, coordinator, bytes.fromhex(self._random_id()))
        self.open.add(transaction)
        return transaction

    def close(self, transaction: Transaction) -> None:
        """Give the place of a transaction back; later calls do nothing."""
        if transaction in self.open:
            assert self._places is not None
            self.open.remove(transaction)
            self._places.leave(transaction.coordinator.peer.share)

    def stop(self) -> None:
        """Roll back the open transactions in the background; running commits continue."""
        self._stopping = True
        for transaction in tuple(self.open):
            transaction.roll_back(Error(ROLLED_BACK, "the gateway is stopping"))

    async def wait_ended(self, timeout: float) -> None:
        """Wait for running commits and rollbacks."""
        if self.ending:
            await asyncio.wait(self.ending, timeout=timeout)


class Coordinator:
    """A link on which a peer declares and discharges transactions; the `context` of the engine's link."""

    __slots__ = ("_coordinators", "link", "peer", "transactions")

    def __init__(
        self, coordinators: Coordinators, peer: Peer, link: Link, transactions: dict[bytes, Transaction]
    ) -> None:
        self._coordinators = coordinators
        self.transactions = transactions  # the connection's transactions by txn-id
        self.link = link  # the engine's
        self.peer = peer  # the connection

    def receive(self, deliveries: Sequence[Any], messages: Sequence[bytes], size: int, now_ms: int) -> None:
        """Handle commands; see `IncomingLink.receive`."""
        for delivery, data in zip(deliveries, messages, strict=True):
            self._command(delivery, data)

    def unfit(self, delivery: Any, size: int, format_: int, transaction: Transaction | None) -> None:
        """Refuse a message that is too large to be a command, or has another format."""
        self._reject(delivery, Error(DECODE_ERROR, f"a message of {size} bytes is no command"))

    def post(self, transaction: Transaction | None, delivery: Any, data: bytes, now_ms: int) -> None:
        """Close the link: a command cannot be part of a transaction."""
        self._end(Error(NOT_ALLOWED, "a command cannot be part of a transaction"))

    def top_up(self) -> None:
        """Grant credit for commands, when it is worth a frame."""
        grant = COMMAND_CREDIT - self.link.credit - self.link.held  # those that are not answered yet
        if self.link.attached and not self.peer.quiescing and grant > COMMAND_CREDIT // 2:
            self.peer.engine.grant(self.link, grant)

    def answer(self, delivery: Any, error: Error | None) -> None:
        """Settle a discharge as accepted, or rejected with `error`."""
        if self.peer.left:
            return
        if error is not None:
            self._reject(delivery, error)
        else:
            self.peer.engine.settle_delivery(self.link, delivery, STATE_ACCEPTED)
        self.top_up()
        self.peer.flush_soon()

    def detached(self) -> None:
        """Roll back the link's transactions: the link has ended (part 4.3)."""
        for transaction in [candidate for candidate in self.transactions.values() if candidate.coordinator is self]:
            transaction.roll_back(Error(ROLLED_BACK, "the coordinator's link was detached"))
            transaction.forget()

    def _command(self, delivery: Any, data: bytes) -> None:
        if delivery is None:
            self._end(Error(NOT_ALLOWED, "a command has to be sent unsettled (part 4.2)"))
            return
        try:
            command = read_command(data)
        except DecodeError as error:
            self._reject(delivery, Error(DECODE_ERROR, str(error)))
            return
        if isinstance(command, Discharge):
            self._discharge(delivery, command)
        elif self.link.attached:  # otherwise an earlier command has ended the link, and nobody would discharge it
            self._declare(delivery, command)

    def _declare(self, delivery: Any, command: Declare) -> None:
        if command.is_global:
            self._reject(delivery, Error(NOT_IMPLEMENTED, "global transactions are not supported"))
            return
        if not self.peer.grant.may_transact(self.peer.client_id):
            self._reject(delivery, Error(UNAUTHORIZED_ACCESS, "no right to use transactions"))
            return
        declared = self._coordinators.declare(self)
        if isinstance(declared, Error):
            self._reject(delivery, declared)
            return
        self.transactions[declared.id] = declared
        self.peer.engine.settle_declared(self.link, delivery, declared.id)

    def _discharge(self, delivery: Any, command: Discharge) -> None:
        transaction = self.transactions.get(command.txn_id)
        if transaction is None or transaction.coordinator is not self:
            self._reject(delivery, Error(UNKNOWN_ID, "no transaction of this link has this txn-id"))
            return
        del self.transactions[command.txn_id]
        transaction.discharge(delivery, fail=command.fail)

    def _reject(self, delivery: Any, error: Error) -> None:
        """Reject a command; close the link if it was sent settled or the controller does not support it (part 4.2)."""
        outcomes = self.link.source.outcomes
        if delivery is None or (outcomes and _REJECTED_OUTCOME not in outcomes):
            self._end(error)
            return
        self.peer.engine.settle_delivery(self.link, delivery, DeliveryState(REJECTED, error=error))

    def _end(self, error: Error) -> None:
        if self.link.attached:
            self.peer.engine.close_link(self.link, error)
            self.peer.flush_soon()
            self.detached()


def _settle(tokens: Sequence[Any], result: Result) -> None:
    """Settle messages; only their tokens refer to the transaction, so that Kafka's side makes no reference cycle."""
    *_, transaction = tokens[0]
    transaction.settle(tokens, result)


class Transaction:
    """One transaction of a peer."""

    __slots__ = (
        "_concluded", "_coordinators", "_ending", "_held", "_kafka", "_peer", "_retired", "_timer", "_unheld",
        "coordinator", "error", "id",
    )  # fmt: skip

    def __init__(self, coordinators: Coordinators, coordinator: Coordinator, txn_id: bytes) -> None:
        self.id = txn_id  # its txn-id
        self.coordinator = coordinator  # the link on which it was declared
        self.error: Error | None = None  # why it must be rolled back; None while it can be committed
        self._coordinators = coordinators
        self._peer = coordinator.peer
        self._kafka = coordinators.kafka.begin(_settle)
        self._retired: dict[int, tuple[OutgoingLink, Retired]] = {}  # by the record's id: the latest outcome
        self._held = 0  # messages whose topic is being looked up
        self._unheld: asyncio.Event | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ending = asyncio.Lock()
        self._concluded = False

    # Posting (part 4.4.1).

    def use(self) -> None:
        """Start the timer with the first message or retirement."""
        if self._timer is None and self.error is None:
            self._timer = asyncio.get_running_loop().call_later(self._coordinators.timeout_s, self._expire)

    def post(self, incoming: IncomingLink, delivery: Any, record: Record) -> None:
        """Store a record; the delivery is settled when every in-sync replica has it."""
        self._kafka.submit(record, (incoming, delivery, self), incoming.sender)

    def spoil(self, reason: str) -> None:
        """Make a later discharge a rollback."""
        self._set_rollback_only(Error(ROLLED_BACK, reason))

    def hold(self) -> None:
        """Delay the discharge until `unhold`, because the topic of a message is being looked up."""
        self._held += 1

    def unhold(self) -> None:
        """End one `hold`: the message was posted or refused."""
        self._held -= 1
        if self._unheld is not None and not self._held:
            self._unheld.set()

    def settle(self, tokens: Sequence[Any], result: Result) -> None:
        """Settle messages of this transaction after Kafka's answer."""
        if result.outcome is not Outcome.STORED:
            self.spoil(f"a message was not stored: {result.reason}")
        settle_each(self._peer, tokens, result, self)

    # Retiring (part 4.4.2).

    def retire(self, link: OutgoingLink, event: Retired) -> None:
        """Keep a delivery's outcome until the discharge."""
        if self.error is not None:
            if event.delivery is None:
                link.disposition(event.token, STATE_FAILED)
            return
        self.use()
        if id(event.token) not in self._retired:  # otherwise a second disposition before the delivery is settled
            link.retiring += 1
        self._retired[id(event.token)] = (link, event)

    def _records_to_commit(self) -> list[tuple[GroupReader, AssignedPartition, int]]:
        """Return the records to commit for groups; fail the transaction if a record has another receiver now."""
        places = []
        for link, event in self._retired.values():
            if event.state == STATE_ACCEPTED and link.in_group:
                place = link.place(event.token)
                if place is None:
                    self.spoil("a retired record is no longer its receiver's")
                else:
                    places.append((*place, event.token.offset))
        return places

    def _conclude(self, *, committed: bool) -> None:
        """Apply the outcomes of the retired deliveries, or undo them."""
        if self._concluded:
            return
        self._concluded = True
        peer = self._peer
        retired = list(self._retired.values())
        self._retired.clear()
        for link, event in retired if committed else reversed(retired):
            record, state, delivery = event.token, event.state, event.delivery
            if delivery is None or not link.link.attached:
                if committed:
                    link.disposition(record, state)
                else:
                    link.revert(record)
            elif (
                committed
                and state is not None
                and not peer.left
                and peer.engine.settle_retired(link.link, delivery, record, state)  # False if it is settled already
            ):
                link.disposition(record, state)
            link.retirement_ended()
        peer.flush_soon()

    # The end.

    def discharge(self, delivery: Any, *, fail: bool) -> None:
        """Start the commit, or the rollback if `fail`, and answer the discharge."""
        self._spawn(self._discharge(delivery, fail))

    def roll_back(self, error: Error) -> None:
        """Start a rollback by the gateway; a later discharge is rejected with `error`."""
        self._set_rollback_only(error)
        self._spawn(self._abort())

    def forget(self) -> None:
        """Remove the transaction: it can no longer be discharged."""
        self.coordinator.transactions.pop(self.id, None)
        self._coordinators.close(self)

    def _set_rollback_only(self, error: Error) -> None:
        if self.error is None:
            self.error = error

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        self._coordinators.counts.transactions_timed_out += 1
        self.roll_back(Error(TIMED_OUT, f"not discharged within {self._coordinators.timeout_s:g} s"))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task that is not cancelled with the connection."""
        task = self._peer.pump.spawn(self._guarded(work))
        self._coordinators.ending.add(task)
        task.add_done_callback(self._coordinators.ending.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # a bug here closes only this connection
            failures.report("transaction", error)
            self._peer.pump.abort()

    async def _discharge(self, delivery: Any, fail: bool) -> None:
        counts = self._coordinators.counts
        if fail:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_S):
                    await self._posted()
            self.spoil("the peer has rolled it back")
            await self._abort()
            error = None
        else:
            await self._posted()
            error = await self._commit()
            counts.transactions_committed += error is None
        self._coordinators.close(self)
        self.coordinator.answer(delivery, error)

    async def _posted(self) -> None:
        """Wait until every posted message is stored or refused."""
        if self._held:
            self._unheld = asyncio.Event()
            await self._unheld.wait()
        await self._kafka.stored()

    async def _commit(self) -> Error | None:
        """Commit, or roll back and return why; what happens during the commit no longer matters."""
        async with self._ending:
            places = self._records_to_commit()
            if self.error is None:
                self._stop_timer()
                try:
                    await self._kafka.commit(places)
                except TransactionFailed as failed:
                    self.spoil(failed.reason)
                else:
                    self._conclude(committed=True)
                    return None
        await self._abort()
        return self.error

    async def _abort(self) -> None:
        """Roll back; idempotent."""
        self._stop_timer()
        async with self._ending:
            if not self._concluded:
                self._coordinators.counts.transactions_rolled_back += 1
                reason = self.error.description if self.error is not None else ""
                await self._kafka.abort(Result(outcome=Outcome.BUSY, reason=reason))
                self._conclude(committed=False)
