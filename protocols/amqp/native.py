"""Reading and writing proton's C objects; a peer's fields are read as bytes, because they may be invalid UTF-8.

proton's Python wrappers decode as UTF-8 and raise an error of their own; here invalid data raises `DecodeError`.
`cproton` is shipped by python-qpid-proton but is no public API, so its version is pinned. Every symbol that is used is
looked up at import or in the tests, so that a missing one is found early.
"""

from __future__ import annotations

from typing import Any, Final

import cproton

from protocols.amqp import primitives
from protocols.amqp.links import Filter, Terminus, TerminusKind
from protocols.amqp.outcomes import Error
from protocols.amqp.primitives import DecodeError, Described, Pairs

ffi: Final[Any] = cproton.ffi
lib: Final[Any] = cproton.lib

DESCRIPTION_LIMIT: Final = 200  # bytes of an error description that we send: it must fit a frame of 512 bytes
_EXPIRY: Final = {
    int(lib.PN_EXPIRE_WITH_LINK): "link-detach",
    int(lib.PN_EXPIRE_WITH_SESSION): "session-end",
    int(lib.PN_EXPIRE_WITH_CONNECTION): "connection-close",
    int(lib.PN_EXPIRE_NEVER): "never",
}


_SILENT: Final = {"_tracer": lambda _transport, _message: None}
_SILENT_HANDLE: Final = ffi.new_handle(_SILENT)  # shared: cproton itself would make one for each transport


def owned(handle: Any) -> Any:
    """Return a new proton object (connection, collector, transport) as one that is freed with its last reference.

    proton's Python objects around them would cost a kilobyte for each connection.
    """
    return ffi.gc(handle, lib.pn_decref)


def address(handle: Any) -> int:
    """Return the address of a delivery or a link, which identifies it in dicts and in C."""
    return int(ffi.cast("uintptr_t", handle))


def delivery_at(address: int) -> Any:
    """Return the delivery at `address`."""
    return ffi.cast("pn_delivery_t *", address)


def function_at(name: str, kind: str) -> int:
    """Return the address of one of proton's C functions, for `_native`. Raises ImportError when it has another type."""
    pointer = ffi.addressof(lib, name)
    type_name = ffi.typeof(pointer).cname
    if type_name != kind:
        raise ImportError(f"proton's {name} is {type_name}, not {kind}")
    return address(pointer)


def discard_events() -> None:
    """Empty `EVENTS` before new input: it only holds events of our own commands and output, which are not handled."""
    while lib.pn_collector_pop(EVENTS):
        pass


def silence(transport: Any) -> None:
    """Drop proton's log lines about its peer: they could flood standard error, and conditions report the errors."""
    record = lib.pn_transport_attachments(transport)
    lib.pn_record_def_py(record)
    lib.pn_record_set_py(record, _SILENT_HANDLE)
    lib.pn_transport_set_tracer(transport, lib.pn_pytracer)


EVENTS: Final = owned(lib.pn_collector())
"""The collector of all connections, with the events of the one that is being processed. One is enough, and a collector
keeps the memory of the most events it ever held: a kilobyte after the opening frames. See `discard_events`."""
_NOWHERE: Final = owned(lib.pn_connection())
_TERMINI: Final = (lib.pn_link_source, lib.pn_link_target, lib.pn_link_remote_source, lib.pn_link_remote_target)
_NOTHING: Final = lib.pn_link_remote_source(lib.pn_sender(lib.pn_session(_NOWHERE), b""))


def forget_termini(link: Any) -> None:
    """Free the memory of a link's termini, ours and the peer's: half a kilobyte each."""
    for terminus in _TERMINI:
        lib.pn_terminus_copy(terminus(link), _NOTHING)


def terminus(handle: Any) -> Terminus:
    """Read a source or target of the peer. Raises DecodeError."""
    kind = TerminusKind(int(lib.pn_terminus_get_type(handle)))
    if kind is TerminusKind.NONE:
        return Terminus(kind)
    return Terminus(
        kind,
        address=text(lib.pn_terminus_get_address(handle)),
        durable=int(lib.pn_terminus_get_durability(handle)),
        expiry=_EXPIRY.get(int(lib.pn_terminus_get_expiry_policy(handle)), "session-end"),
        dynamic=bool(lib.pn_terminus_is_dynamic(handle)),
        # Only for a source: the getters allocate the field when it is missing, and a target has neither.
        filters=filters(lib.pn_terminus_filter(handle)) if kind is TerminusKind.SOURCE else (),
        outcomes=symbols(lib.pn_terminus_outcomes(handle)) if kind is TerminusKind.SOURCE else (),
        capabilities=symbols(lib.pn_terminus_capabilities(handle)),
        copies=int(lib.pn_terminus_get_distribution_mode(handle)) == lib.PN_DIST_MODE_COPY,
    )


def terminus_size(handle: Any) -> int:
    """Return the largest possible encoded size, in bytes, of our terminus in an attach."""
    address = lib.pn_terminus_get_address(handle)
    parts = [lib.pn_terminus_capabilities(handle), lib.pn_terminus_properties(handle)]
    if lib.pn_terminus_get_type(handle) == lib.PN_SOURCE:
        parts += (lib.pn_terminus_filter(handle), lib.pn_terminus_outcomes(handle))
    return 64 + (len(ffi.string(address)) if address else 0) + sum(len(_encoded(data)) for data in parts)


def text(chars: Any) -> str | None:
    """Decode a C string; NULL gives None. Raises DecodeError."""
    if not chars:
        return None
    try:
        return str(ffi.string(chars).decode())
    except UnicodeDecodeError:
        raise DecodeError("a name that is not UTF-8") from None


def _encoded(data: Any) -> bytes:
    """Encode a pn_data; an empty one gives no bytes."""
    size = lib.pn_data_encoded_size(data) if data else 0  # NULL when the field was null
    if size <= 0:
        return b""
    space = ffi.new("char[]", size)
    written = lib.pn_data_encode(data, space, size)
    return bytes(ffi.buffer(space, written)[:]) if written > 0 else b""


def value(data: Any) -> Any:
    """Decode the value of a pn_data with our own decoder, which is safe for any bytes. Raises DecodeError."""
    encoded = _encoded(data)
    return primitives.decode(encoded, 0, len(encoded))[0] if encoded else None


def filters(data: Any) -> tuple[Filter, ...]:
    """Decode a filter set (part 3.5.8); null is an empty one. Raises DecodeError."""
    encoded = _encoded(data)
    if not encoded or encoded == primitives.NULL:
        return ()
    if encoded[0] not in primitives.MAP_CODES:
        raise DecodeError("a filter set that is no map")
    count, at, end = primitives.compound(encoded, 0, len(encoded))
    if count % 2:
        raise DecodeError("a map with an odd number of items")
    filters_read: list[Filter] = []
    for _ in range(count // 2):
        name, middle = primitives.decode(encoded, at, end)
        item, after = primitives.decode(encoded, middle, end)
        if not isinstance(name, str):
            raise DecodeError("a filter's name that is no symbol")
        descriptor = None
        if isinstance(item, Described):
            descriptor, item = item
            if not isinstance(descriptor, str | int):
                raise DecodeError(f"filter {name!r} has neither a symbol nor a number as its descriptor")
        filters_read.append(Filter(name, descriptor, item, (encoded[at:middle], encoded[middle:after])))
        at = after
    return tuple(filters_read)


def mapping(data: Any) -> Pairs:
    """Decode a map; null is an empty one. Raises DecodeError."""
    decoded = value(data)
    if isinstance(decoded, Pairs):
        return decoded
    if decoded is None:
        return Pairs()
    raise DecodeError("a map was expected")


def symbols(data: Any) -> tuple[str, ...]:
    """Decode one symbol or an array of them (`multiple="true"`, part 1.4). Raises DecodeError."""
    decoded = value(data)
    if isinstance(decoded, Described):
        decoded = decoded.value
    items = decoded if isinstance(decoded, tuple | list) and not isinstance(decoded, Pairs) else (decoded,)
    return tuple(str(item) for item in items if isinstance(item, str))


def condition(handle: Any) -> Error | None:
    """Return the peer's error, if it sent one; for logs, so invalid UTF-8 is replaced."""
    if not lib.pn_condition_is_set(handle):
        return None
    name, description = (
        ffi.string(chars).decode(errors="replace") if chars else ""
        for chars in (lib.pn_condition_get_name(handle), lib.pn_condition_get_description(handle))
    )
    return Error(name, description)


def description_of(error: Error) -> str:
    """Return the description of an error that we send, up to `DESCRIPTION_LIMIT`."""
    text = error.description[:DESCRIPTION_LIMIT].replace("\0", " ")
    return text.encode(errors="replace")[:DESCRIPTION_LIMIT].decode(errors="ignore")


def set_condition(handle: Any, error: Error | None) -> None:
    """Set the error with which an endpoint is closed or a delivery is rejected; None leaves it unset."""
    if error is not None:
        lib.pn_condition_set_name(handle, error.condition.encode())
        lib.pn_condition_set_description(handle, description_of(error).encode())
        if error.info:
            items = [
                encoded
                for name, value in error.info
                for encoded in (
                    primitives.symbol(name),
                    primitives.string(value) if isinstance(value, str) else primitives.integer(value),
                )
            ]
            put(lib.pn_condition_info(handle), primitives.map_of(items))


def put(data: Any, encoded: bytes) -> None:
    """Fill a pn_data from bytes that we encoded."""
    lib.pn_data_clear(data)
    taken = lib.pn_data_decode(data, ffi.from_buffer(encoded), len(encoded))
    assert taken == len(encoded)


def set_expiry(handle: Any, *, kept: bool) -> None:
    """Let a terminus end with its link, or never (part 3.5.6)."""
    lib.pn_terminus_set_timeout(handle, 0)
    lib.pn_terminus_set_expiry_policy(handle, lib.PN_EXPIRE_NEVER if kept else lib.PN_EXPIRE_WITH_LINK)
    if not kept:
        lib.pn_terminus_set_durability(handle, lib.PN_NONDURABLE)
    elif lib.pn_terminus_get_durability(handle) == lib.PN_NONDURABLE:
        lib.pn_terminus_set_durability(handle, lib.PN_CONFIGURATION)


def set_durable_source(handle: Any, address: str) -> None:
    """Set a terminus to the durable source at `address`."""
    lib.pn_terminus_set_type(handle, lib.PN_SOURCE)
    lib.pn_terminus_set_address(handle, address.encode())
    lib.pn_terminus_set_durability(handle, lib.PN_DELIVERIES)
