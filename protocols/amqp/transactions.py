"""Encoding and decoding of the transaction types (AMQP 1.0 part 4.5); the coordinator keeps the transactions."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from protocols.amqp import outcomes, primitives
from protocols.amqp.outcomes import DeliveryState, Error
from protocols.amqp.primitives import DecodeError, Described, code_of
from protocols.amqp.sections import VALUE, scan

# Descriptors of part 4.5; proton passes the states' numbers through.
DECLARE: Final = 0x31
DISCHARGE: Final = 0x32
DECLARED: Final = 0x33
TRANSACTIONAL_STATE: Final = 0x34
_ERROR: Final = 0x1D  # part 2.8.14

# transaction-error (part 4.5.8)
UNKNOWN_ID: Final = "amqp:transaction:unknown-id"
ROLLED_BACK: Final = "amqp:transaction:rollback"
TIMED_OUT: Final = "amqp:transaction:timeout"

# txn-capability (part 4.5.7)
LOCAL_TRANSACTIONS: Final = "amqp:local-transactions"
MULTI_TXNS_PER_SSN: Final = "amqp:multi-txns-per-ssn"
MULTI_SSNS_PER_TXN: Final = "amqp:multi-ssns-per-txn"


class Declare(msgspec.Struct, frozen=True, gc=False):
    """The command to start a transaction (part 4.5.2)."""

    is_global: bool  # it has a global-id, which a coordinator of local transactions does not support


class Discharge(msgspec.Struct, frozen=True, gc=False):
    """The command to end a transaction (part 4.5.3)."""

    txn_id: bytes
    fail: bool  # True asks for a rollback


def read_command(message: bytes) -> Declare | Discharge:
    """Decode a message to a coordinator (part 4.2: the body is one amqp-value).

    Raises:
        DecodeError: it is no message, or neither a declare nor a discharge.
    """
    for code, _, value, end in scan(message):
        if code != VALUE:
            continue
        body, _ = primitives.decode(message, value, end)
        if not isinstance(body, Described) or not isinstance(body.value, list):
            break
        kind = code_of(body.descriptor)
        if kind == DECLARE:
            return Declare(is_global=_item(body.value, 0) is not None)
        if kind != DISCHARGE:
            break
        fail = _item(body.value, 1)
        if fail is not None and not isinstance(fail, bool):
            raise DecodeError("a discharge whose `fail` is no boolean")
        return Discharge(_txn_id(_item(body.value, 0)), fail is True)
    raise DecodeError("a coordinator accepts only declare and discharge")


def read_state(fields: Any) -> tuple[bytes, DeliveryState | None]:
    """Return the txn-id and the outcome, if there is one, of a decoded transactional-state (part 4.5.6).

    Raises:
        DecodeError: the fields do not match part 4.5.6.
    """
    if not isinstance(fields, list):
        raise DecodeError("a transactional-state that is no list")
    return _txn_id(_item(fields, 0)), _outcome(_item(fields, 1))


def declared(txn_id: bytes) -> bytes:
    """Encode the fields of a `declared` outcome (part 4.5.5)."""
    return primitives.list_of([primitives.binary(txn_id)])


def transactional_state(txn_id: bytes, state: DeliveryState | None) -> bytes:
    """Encode the fields of a transactional-state (part 4.5.6)."""
    items = [primitives.binary(txn_id)]
    if state is not None:
        items.append(primitives.described(state.code, _fields(state)))
    return primitives.list_of(items)


def _fields(state: DeliveryState) -> bytes:
    """Encode the fields of an outcome (part 3.4)."""
    if state.code == outcomes.REJECTED and state.error is not None:
        error = state.error
        described = [primitives.symbol(error.condition), primitives.string(error.description)]
        return primitives.list_of([primitives.described(_ERROR, primitives.list_of(described))])
    if state.code == outcomes.MODIFIED:
        flags = (state.delivery_failed, state.undeliverable_here)
        return primitives.list_of([primitives.boolean(flag) for flag in flags])
    return primitives.list_of([])


def _outcome(value: Any) -> DeliveryState | None:
    if value is None:
        return None
    if not isinstance(value, Described) or not isinstance(value.value, list):
        raise DecodeError("an outcome that is no described list")
    code, fields = code_of(value.descriptor), value.value
    if code not in outcomes.TERMINAL:
        raise DecodeError("a transactional-state with an unknown outcome")
    if code == outcomes.REJECTED:
        return DeliveryState(code, error=_error(_item(fields, 0)))
    if code == outcomes.MODIFIED:
        failed, undeliverable = _item(fields, 0), _item(fields, 1)
        return DeliveryState(code, delivery_failed=failed is True, undeliverable_here=undeliverable is True)
    return DeliveryState(code)


def _error(value: Any) -> Error | None:
    """Return a peer's error (part 2.8.14). It is only for logs and dead letters, so a malformed one gives None."""
    if not isinstance(value, Described) or not isinstance(value.value, list):
        return None
    condition, description = _item(value.value, 0), _item(value.value, 1)
    if not isinstance(condition, str):
        return None
    return Error(str(condition), description if isinstance(description, str) else "")


def _txn_id(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise DecodeError("a txn-id that is no binary")
    return value


def _item(fields: list[Any], position: int) -> Any:
    """Return a field of a composite; null fields at its end may be omitted (part 1.4)."""
    return fields[position] if position < len(fields) else None
