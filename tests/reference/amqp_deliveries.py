"""The work per delivery with proton in Python: receive, accept, send; see `protocols/amqp/_native.pyi`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protocols.amqp import native
from protocols.amqp.native import ffi, lib
from protocols.amqp.outcomes import ACCEPTED


def take_usual(
    _links: dict[int, Any],  # the engine's links by address
    _sent: dict[int, tuple[Any, Any, int]],  # the engine's unsettled deliveries by address: link, token, size in bytes
    _transactional: bool,
    _events: list[Any],  # new events are appended to it
) -> int:
    event = lib.pn_collector_peek(native.EVENTS)
    return int(lib.pn_event_type(event)) if event else 0


def accept(_link: Any, deliveries: Sequence[int | None]) -> None:
    for address in deliveries:
        if address is not None:
            delivery = native.delivery_at(address)
            lib.pn_delivery_update(delivery, ACCEPTED)
            lib.pn_delivery_settle(delivery)


def send(
    link: Any,
    number: int,  # the first message's delivery tag, 32 bits; the next messages count on
    messages: Sequence[bytes],
    tokens: Sequence[Any] | None,  # one for each message; None sends them settled
    sent: dict[int, tuple[Any, Any, int]],  # the engine's unsettled deliveries; the new ones are added
) -> int:
    for place, data in enumerate(messages):
        tag = ((number + place) & 0xFFFFFFFF).to_bytes(4)
        delivery = lib.pn_delivery(link.handle, {"size": len(tag), "start": ffi.from_buffer(tag)})  # it copies the tag
        lib.pn_link_send(link.handle, data, len(data))
        lib.pn_link_advance(link.handle)
        if tokens is None:
            lib.pn_delivery_settle(delivery)
        else:
            sent[native.address(delivery)] = (link, tokens[place], len(data))
    return sum(map(len, messages))
