"""Reading and writing proton's C objects: what a peer put there is taken as bytes, never trusted to be text.

proton's Python wrappers decode as UTF-8 and raise for anything else; here that is a `DecodeError`, the peer's fault.
`cproton` is shipped by python-qpid-proton but is no public API: the version is pinned, and a missing symbol stops the
start, because each one used is looked up at import or in the tests.
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

DESCRIPTION_LIMIT: Final = 200  # characters of our error texts: they must fit a frame of 512 bytes
_EXPIRY: Final = {
    int(lib.PN_EXPIRE_WITH_LINK): "link-detach",
    int(lib.PN_EXPIRE_WITH_SESSION): "session-end",
    int(lib.PN_EXPIRE_WITH_CONNECTION): "connection-close",
    int(lib.PN_EXPIRE_NEVER): "never",
}


_SILENT: Final = {"_tracer": lambda _transport, _message: None}
_SILENT_HANDLE: Final = ffi.new_handle(_SILENT)  # one for all: cproton's own way makes one for each transport


def owned(handle: Any) -> Any:
    """A connection, a collector or a transport that was just made; it goes with its last reference here.

    proton's Python objects around them would cost a kilobyte for each connection.
    """
    return ffi.gc(handle, lib.pn_decref)


def address(handle: Any) -> int:
    """What a delivery or a link is known by: a number can be handed to C, and is found in a dict."""
    return int(ffi.cast("uintptr_t", handle))


def delivery_at(address: int) -> Any:
    """The delivery that is known by `address`."""
    return ffi.cast("pn_delivery_t *", address)


def discard_events() -> None:
    """Make `EVENTS` empty before something comes in, whose events count.

    What is there is what a connection's own verbs and its output did, and tells nobody anything.
    """
    while lib.pn_collector_pop(EVENTS):
        pass


def silence(transport: Any) -> None:
    """Drop proton's own log lines about its peer, which could fill our standard error: errors come as a condition."""
    record = lib.pn_transport_attachments(transport)
    lib.pn_record_def_py(record)
    lib.pn_record_set_py(record, _SILENT_HANDLE)
    lib.pn_transport_set_tracer(transport, lib.pn_pytracer)


EVENTS: Final = owned(lib.pn_collector())
"""What happened on whichever connection was given something last: one for all, as a collector keeps the memory of the
most events that it ever held, which is a kilobyte after the opening frames. See `discard_events`."""
_NOWHERE: Final = owned(lib.pn_connection())
_TERMINI: Final = (lib.pn_link_source, lib.pn_link_target, lib.pn_link_remote_source, lib.pn_link_remote_target)
_NOTHING: Final = lib.pn_link_remote_source(lib.pn_sender(lib.pn_session(_NOWHERE), b""))


def forget_termini(link: Any) -> None:
    """Give back what a link's termini take, both ours and the peer's: half a kilobyte each."""
    for terminus in _TERMINI:
        lib.pn_terminus_copy(terminus(link), _NOTHING)


def terminus(handle: Any) -> Terminus:
    """A source or target as the peer wrote it. Raises DecodeError."""
    kind = TerminusKind(int(lib.pn_terminus_get_type(handle)))
    if kind is TerminusKind.NONE:
        return Terminus(kind)
    return Terminus(
        kind,
        address=text(lib.pn_terminus_get_address(handle)),
        durable=int(lib.pn_terminus_get_durability(handle)),
        expiry=_EXPIRY.get(int(lib.pn_terminus_get_expiry_policy(handle)), "session-end"),
        dynamic=bool(lib.pn_terminus_is_dynamic(handle)),
        # To ask for what is not there makes it; a target has neither.
        filters=filters(lib.pn_terminus_filter(handle)) if kind is TerminusKind.SOURCE else (),
        outcomes=symbols(lib.pn_terminus_outcomes(handle)) if kind is TerminusKind.SOURCE else (),
        capabilities=symbols(lib.pn_terminus_capabilities(handle)),
        copies=int(lib.pn_terminus_get_distribution_mode(handle)) == lib.PN_DIST_MODE_COPY,
    )


def terminus_size(handle: Any) -> int:
    """At most how many bytes a terminus of ours takes in an attach."""
    address = lib.pn_terminus_get_address(handle)
    parts = [lib.pn_terminus_capabilities(handle), lib.pn_terminus_properties(handle)]
    if lib.pn_terminus_get_type(handle) == lib.PN_SOURCE:
        parts += (lib.pn_terminus_filter(handle), lib.pn_terminus_outcomes(handle))
    return 64 + (len(ffi.string(address)) if address else 0) + sum(len(_encoded(data)) for data in parts)


def text(chars: Any) -> str | None:
    """A C string. Raises DecodeError."""
    if not chars:
        return None
    try:
        return str(ffi.string(chars).decode())
    except UnicodeDecodeError:
        raise DecodeError("a name that is not UTF-8") from None


def _encoded(data: Any) -> bytes:
    """A pn_data in its encoded form; empty when it is."""
    size = lib.pn_data_encoded_size(data) if data else 0  # NULL: the field was null
    if size <= 0:
        return b""
    space = ffi.new("char[]", size)
    written = lib.pn_data_encode(data, space, size)
    return bytes(ffi.buffer(space, written)[:]) if written > 0 else b""


def value(data: Any) -> Any:
    """What is in a pn_data, through its encoded form: our decoder takes any bytes. Raises DecodeError."""
    encoded = _encoded(data)
    return primitives.decode(encoded, 0, len(encoded))[0] if encoded else None


def filters(data: Any) -> tuple[Filter, ...]:
    """A filter set (part 3.5.8); null is an empty one. Raises DecodeError."""
    encoded = _encoded(data)
    if not encoded or encoded == primitives.NULL:
        return ()
    if encoded[0] not in primitives.MAP_CODES:
        raise DecodeError("a filter set that is no map")
    count, at, end = primitives.compound(encoded, 0, len(encoded))
    if count % 2:
        raise DecodeError("a map with an odd number of items")
    found: list[Filter] = []
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
        found.append(Filter(name, descriptor, item, (encoded[at:middle], encoded[middle:after])))
        at = after
    return tuple(found)


def mapping(data: Any) -> Pairs:
    """A map; null is an empty one. Raises DecodeError."""
    found = value(data)
    if isinstance(found, Pairs):
        return found
    if found is None:
        return Pairs()
    raise DecodeError("a map was expected")


def symbols(data: Any) -> tuple[str, ...]:
    """One symbol or an array of them (`multiple="true"`, part 1.4). Raises DecodeError."""
    found = value(data)
    if isinstance(found, Described):
        found = found.value
    items = found if isinstance(found, tuple | list) and not isinstance(found, Pairs) else (found,)
    return tuple(str(item) for item in items if isinstance(item, str))


def condition(handle: Any) -> Error | None:
    """An error of the peer, if there is one; for logs, so bad text is replaced."""
    if not lib.pn_condition_is_set(handle):
        return None
    name, description = (
        ffi.string(chars).decode(errors="replace") if chars else ""
        for chars in (lib.pn_condition_get_name(handle), lib.pn_condition_get_description(handle))
    )
    return Error(name, description)


def set_condition(handle: Any, error: Error | None) -> None:
    """Say why an endpoint is closed or a delivery is rejected."""
    if error is not None:
        lib.pn_condition_set_name(handle, error.condition.encode())
        description = error.description[:DESCRIPTION_LIMIT].replace("\0", " ")
        lib.pn_condition_set_description(handle, description.encode(errors="replace"))
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
    """Fill a pn_data from encoded bytes of ours."""
    lib.pn_data_clear(data)
    taken = lib.pn_data_decode(data, ffi.from_buffer(encoded), len(encoded))
    assert taken == len(encoded)


def set_durable_source(handle: Any, address: str) -> None:
    """Make a terminus the durable source at `address`, which never expires."""
    lib.pn_terminus_set_type(handle, lib.PN_SOURCE)
    lib.pn_terminus_set_address(handle, address.encode())
    lib.pn_terminus_set_durability(handle, lib.PN_DELIVERIES)
    lib.pn_terminus_set_expiry_policy(handle, lib.PN_EXPIRE_NEVER)
