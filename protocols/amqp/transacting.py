"""The engine's part in transactions (part 4.4): transfers, dispositions and answers that carry a txn-id.

The engine looks for txn-ids only on a connection where the peer has attached a coordinator: without one a peer has no
txn-id, and other connections do not pay for the check.
"""

from __future__ import annotations

from typing import Any

import msgspec

from protocols.amqp import native, outcomes, transactions
from protocols.amqp.endpoints import Endpoints
from protocols.amqp.events import Retired
from protocols.amqp.links import Link
from protocols.amqp.native import lib
from protocols.amqp.outcomes import DeliveryState, Error
from protocols.amqp.primitives import DecodeError


class Transacting(Endpoints):
    """Adds the commands and events of transactions, which are rare."""

    def settle_declared(self, link: Link, delivery: Any, txn_id: bytes) -> None:
        """Answer a declare (part 4.2)."""
        self._settle_with(link, delivery, transactions.DECLARED, transactions.declared(txn_id))

    def settle_posted(self, link: Link, delivery: Any, txn_id: bytes, state: DeliveryState) -> None:
        """Settle a received delivery with its outcome within a transaction (part 4.4.1)."""
        if state.error is not None:
            error = Error(state.error.condition, native.description_of(state.error))
            state = msgspec.structs.replace(state, error=error)
        fields = transactions.transactional_state(txn_id, state)
        self._settle_with(link, delivery, transactions.TRANSACTIONAL_STATE, fields)

    def _settle_with(self, link: Link, delivery: Any, code: int, fields: bytes) -> None:
        if not self._release(link, 1):
            return
        handle = native.delivery_at(delivery)
        native.put(lib.pn_disposition_data(lib.pn_delivery_local(handle)), fields)
        self._conclude(link, handle, code)

    def settle_retired(self, link: Link, delivery: Any, token: Any, state: DeliveryState) -> bool:
        """Settle a delivery that we sent and that a committed transaction retired (part 4.4.2).

        Returns:
            False when it is no longer unsettled: the peer has settled it in the meantime, or the link is detached.
            Another delivery may have its handle then, and has another token.
        """
        owner, held, size = self._sent.get(delivery, (None, None, 0))
        if owner is not link or held is not token:
            return False
        del self._sent[delivery]
        link.release(1, size)
        handle = native.delivery_at(delivery)
        lib.pn_delivery_update(handle, state.code)
        lib.pn_delivery_settle(handle)
        return True

    def _on_retirement(self, link: Link, delivery: Any, settled: bool, events: list[Any]) -> None:
        """Handle a disposition that gives a delivery that we sent an outcome within a transaction."""
        address = native.address(delivery)
        sent = self._sent.get(address)
        if sent is None:
            return
        _, token, size = sent
        txn = self._read_txn(link, delivery, events)
        if txn is None:
            return
        if settled:
            del self._sent[address]
            link.release(1, size)
            lib.pn_delivery_settle(delivery)
            events.append(Retired(link, token, None, *txn))
        elif txn[1] is not None:
            events.append(Retired(link, token, address, *txn))

    def _read_txn(self, link: Link, delivery: Any, events: list[Any]) -> tuple[bytes, DeliveryState | None] | None:
        """Return the txn-id and the outcome of a delivery; if they are malformed, detach the link and return None."""
        try:
            return transactions.read_state(native.value(lib.pn_disposition_data(lib.pn_delivery_remote(delivery))))
        except DecodeError as error:
            self._detach_with_error(link, outcomes.DECODE_ERROR, f"transactional-state: {error}", events)
            return None
