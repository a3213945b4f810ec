"""What happens to every delivery: taken as proton's events tell, accepted, sent.

This is the reference, and what runs where no C extension was built: `_native.c` has the same functions, and takes whole
runs of deliveries in one call. Deliveries and links are known by their addresses.
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

# One delivery tag for the process: proton copies it.
_tag_bytes: Final = bytearray(4)
_tag_kept: Final = ffi.new("pn_delivery_tag_t *", (4, _from_buffer(_tag_bytes)))
_tag: Final = _tag_kept[0]
_write_tag: Final = Struct(">I").pack_into


def take_usual(
    _links: dict[int, Any],  # the engine's: by address
    _sent: dict[int, tuple[Any, Any, int]],  # likewise: the link, the token and the bytes of what was sent
    _transactional: bool,
    _events: list[Any],  # what has happened is appended
) -> int:
    """Take deliveries off proton's events as long as they are usual, in their order.

    Usual are complete messages of one transfer within credit and limits, and acceptances of what was sent. Here none
    is: the engine says what each means, and in C nothing else comes of those that are taken.

    Returns:
        The type of the first event that is left for the engine; 0: there is none.
    """
    event = _peek(EVENTS)
    return int(_event_type(event)) if event else 0


def accept(deliveries: Sequence[int | None]) -> None:
    """Settle received deliveries as accepted; None stands for one that came settled."""
    for address in deliveries:
        if address is not None:
            delivery = _cast("pn_delivery_t *", address)
            _update(delivery, ACCEPTED)
            _settle(delivery)


def send(
    link: Any,  # the engine's
    number: int,  # of the first message: its tag, of 32 bits
    messages: Sequence[bytes],
    tokens: Sequence[Any] | None,  # beside them; None: they are sent settled
    sent: dict[int, tuple[Any, Any, int]],  # the engine's: what is sent unsettled is noted in it
) -> int:
    """Send messages on a link that has credit for them; how many bytes they are."""
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
