"""The work per delivery with proton: receive, accept, send.

This is the reference, and it runs where no C extension was built: `_native.c` has the same functions, and reads whole
runs of deliveries in one call. Deliveries and links are identified by their addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any, Final

from protocols.amqp.native import EVENTS, ffi, lib
from protocols.amqp.outcomes import ACCEPTED

# Imported once: a look-up in `lib` costs as much as a cheap call.
_cast, _from_buffer = ffi.cast, ffi.from_buffer
_peek, _event_type = lib.pn_collector_peek, lib.pn_event_type
_new_delivery, _send, _advance = lib.pn_delivery, lib.pn_link_send, lib.pn_link_advance
_update, _settle = lib.pn_delivery_update, lib.pn_delivery_settle

# One buffer for the delivery tags of the whole process: proton copies the tag.
_tag_bytes: Final = bytearray(4)
_tag_kept: Final = ffi.new("pn_delivery_tag_t *", (4, _from_buffer(_tag_bytes)))
_tag: Final = _tag_kept[0]
_write_tag: Final = Struct(">I").pack_into


def take_usual(
    _links: dict[int, Any],  # the engine's links by address
    _sent: dict[int, tuple[Any, Any, int]],  # the engine's unsettled deliveries by address: link, token, size in bytes
    _transactional: bool,
    _events: list[Any],  # new events are appended to it
) -> int:
    """Process usual deliveries from the front of proton's event queue, and stop at the first other event.

    Usual are complete messages of one transfer within credit and limits, and `accepted` outcomes of sent deliveries.
    The C version processes these with the same result as the engine; this version leaves every event to the engine.

    Returns:
        The type of the first event that is left for the engine, or 0 when there is none.
    """
    event = _peek(EVENTS)
    return int(_event_type(event)) if event else 0


def accept(deliveries: Sequence[int | None]) -> None:
    """Settle received deliveries as accepted; None stands for one that the peer sent settled."""
    for address in deliveries:
        if address is not None:
            delivery = _cast("pn_delivery_t *", address)
            _update(delivery, ACCEPTED)
            _settle(delivery)


def send(
    link: Any,
    number: int,  # the first message's delivery tag, 32 bits; the next messages count on
    messages: Sequence[bytes],
    tokens: Sequence[Any] | None,  # one for each message; None sends them settled
    sent: dict[int, tuple[Any, Any, int]],  # the engine's unsettled deliveries; the new ones are added
) -> int:
    """Send messages on a link that has credit for them, and return their size in bytes."""
    handle = _cast("pn_link_t *", link.address)
    total = 0
    for place, data in enumerate(messages):
        _write_tag(_tag_bytes, 0, (number + place) & 0xFFFFFFFF)
        delivery = _new_delivery(handle, _tag)
        size = len(data)
        _send(handle, data, size)
        _advance(handle)
        if tokens is None:
            _settle(delivery)
        else:
            sent[int(_cast("uintptr_t", delivery))] = (link, tokens[place], size)
        total += size
    return total
