"""The engine's part in transactions (part 4.4): transfers and dispositions that carry a txn-id, and answers with one.

Only a connection on which a coordinator was attached looks for them: a txn-id can come from nowhere else, and nobody
else pays for it.
"""

from __future__ import annotations

from typing import Any

from protocols.amqp import native, outcomes, transactions
from protocols.amqp.endpoints import Endpoints
from protocols.amqp.events import Retired
from protocols.amqp.links import Link
from protocols.amqp.native import lib
from protocols.amqp.outcomes import State
from protocols.amqp.primitives import DecodeError


class Transacting(Endpoints):
    """The rare verbs and events of transactions."""

    def settle_declared(self, link: Link, delivery: Any, txn_id: bytes) -> None:
        """Answer a declare (part 4.2)."""
        self._settle_with(link, delivery, transactions.DECLARED, transactions.declared(txn_id))

    def settle_posted(self, link: Link, delivery: Any, txn_id: bytes, state: State) -> None:
        """Settle a received delivery with its outcome within a transaction (part 4.4.1)."""
        fields = transactions.transactional_state(txn_id, state)
        self._settle_with(link, delivery, transactions.TRANSACTIONAL_STATE, fields)

    def _settle_with(self, link: Link, delivery: Any, code: int, fields: bytes) -> None:
        link.held -= 1
        if not link.attached:
            if link.finished and not link.held:
                self._untidy.append(link)
            return
        handle = native.delivery_at(delivery)
        native.put(lib.pn_disposition_data(lib.pn_delivery_local(handle)), fields)
        lib.pn_delivery_update(handle, code)
        lib.pn_delivery_settle(handle)

    def settle_retired(self, link: Link, delivery: Any, state: State) -> bool:
        """Settle a delivery of ours whose outcome a transaction has applied (part 4.4.2).

        Returns:
            False when there is none: the peer has settled it meanwhile, or the link is gone.
        """
        sent = self._sent.pop(delivery, None)
        if sent is None:
            return False
        link.release(1, sent[2])
        handle = native.delivery_at(delivery)
        lib.pn_delivery_update(handle, state.code)
        lib.pn_delivery_settle(handle)
        return True

    def _txn_of(self, link: Link, delivery: Any, events: list[Any]) -> bytes | None:
        """The txn-id of a transfer; None when it has none that can be read, which ends the link."""
        try:
            return self._read_txn(delivery)[0]
        except DecodeError as error:
            self._violated(link, outcomes.DECODE_ERROR, f"transactional-state: {error}", events)
            return None

    def _on_retirement(self, link: Link, delivery: Any, settled: bool, events: list[Any]) -> None:
        """The peer gives a delivery of ours an outcome within a transaction."""
        address = native.address(delivery)
        sent = self._sent.get(address)
        if sent is None:
            return
        token = sent[1]
        try:
            txn_id, state = self._read_txn(delivery)
        except DecodeError as error:
            self._violated(link, outcomes.DECODE_ERROR, f"transactional-state: {error}", events)
            return
        if settled:
            del self._sent[address]
            link.release(1, sent[2])
            lib.pn_delivery_settle(delivery)
            events.append(Retired(link, token, None, txn_id, state))
        elif state is not None:
            events.append(Retired(link, token, address, txn_id, state))

    def _read_txn(self, delivery: Any) -> tuple[bytes, State | None]:
        return transactions.read_state(native.value(lib.pn_disposition_data(lib.pn_delivery_remote(delivery))))
