"""AMQP frames as trace lines: performatives (part 2.7), SASL frames (part 5.3), and the properties of messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from gateway.runtime.secret import BLANK
from gateway.trace.shown import Line, shown, shown_bytes, shown_method, shown_pairs
from protocols.amqp.primitives import DecodeError, Described, Pairs, decode
from protocols.amqp.sections import APPLICATION_PROPERTIES, DATA, PROPERTIES, SEQUENCE, VALUE

KEPT: Final = 4 * 1024  # bytes kept of a frame
LARGEST: Final = 64 * 1024 * 1024  # a larger size is no frame
MAGIC: Final = b"AMQP"
SASL_TYPE: Final = 1

PERFORMATIVES: Final[dict[int, tuple[str, Sequence[str]]]] = {
    0x10: ("open", ("container_id", "hostname", "max_frame_size", "channel_max", "idle_time_out",
                    "outgoing_locales", "incoming_locales", "offered_capabilities", "desired_capabilities",
                    "properties")),
    0x11: ("begin", ("remote_channel", "next_outgoing_id", "incoming_window", "outgoing_window", "handle_max",
                     "offered_capabilities", "desired_capabilities", "properties")),
    0x12: ("attach", ("name", "handle", "role", "snd_settle_mode", "rcv_settle_mode", "source", "target", "unsettled",
                      "incomplete_unsettled", "initial_delivery_count", "max_message_size", "offered_capabilities",
                      "desired_capabilities", "properties")),
    0x13: ("flow", ("next_incoming_id", "incoming_window", "next_outgoing_id", "outgoing_window", "handle",
                    "delivery_count", "link_credit", "available", "drain", "echo", "properties")),
    0x14: ("transfer", ("handle", "delivery_id", "delivery_tag", "message_format", "settled", "more",
                        "rcv_settle_mode", "state", "resume", "aborted", "batchable")),
    0x15: ("disposition", ("role", "first", "last", "settled", "state", "batchable")),
    0x16: ("detach", ("handle", "closed", "error")),
    0x17: ("end", ("error",)),
    0x18: ("close", ("error",)),
    0x40: ("sasl-mechanisms", ("mechanisms",)),
    0x41: ("sasl-init", ("mechanism", "initial_response", "hostname")),
    0x42: ("sasl-challenge", ("challenge",)),
    0x43: ("sasl-response", ("response",)),
    0x44: ("sasl-outcome", ("code", "additional_data")),
}  # fmt: skip
NAMES: Final = {f"amqp:{name}:list": code for code, (name, _) in PERFORMATIVES.items()}
TRANSFER: Final = 0x14
SECRET: Final = frozenset({"initial_response", "challenge", "response", "additional_data"})
TERMINUS: Final = {0x28: "source", 0x29: "target", 0x30: "coordinator"}
STATES: Final = {0x23: "received", 0x24: "accepted", 0x25: "rejected", 0x26: "released", 0x27: "modified",
                 0x33: "declared", 0x34: "transactional"}  # fmt: skip
PROPERTY_NAMES: Final = (
    "message_id", "user_id", "to", "subject", "reply_to", "correlation_id", "content_type", "content_encoding",
    "absolute_expiry_time", "creation_time", "group_id", "group_sequence", "reply_to_group_id",
)  # fmt: skip
ATTACH: Final = b"\x00\x53\x12"
DATA_SECTION: Final = b"\x00\x53\x75"
TOKENS: Final = (b"$cbs", b"put-token")  # logins by message (CBS), not supported here but sent by clients anyway

Frame = tuple[bytes, int]
"""A frame, or its start, and its full length. A protocol header is a frame of 8 bytes that starts with `AMQP`."""


class Frames:
    """Splits one direction's bytes, which are cut anywhere and may start within a frame, into frames."""

    __slots__ = ("_buffer", "_in_step", "_skip")

    def __init__(self, *, in_step: bool) -> None:
        """`in_step`: the first byte is the first byte of a frame."""
        self._buffer = bytearray()
        self._in_step = in_step
        self._skip = 0

    def split(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete, or of which the first `KEPT` bytes are."""
        buffer = self._buffer
        if self._skip:
            data, self._skip = data[self._skip :], max(0, self._skip - len(data))
        buffer += data
        at, size = 0, len(buffer)
        if not self._in_step:
            at = self._find(buffer)
            self._in_step = at < size
        while at + 8 <= size:
            length = 8 if buffer[at : at + 4] == MAGIC else int.from_bytes(buffer[at : at + 4])
            if not _is_head(buffer, at):
                self._in_step = False  # not AMQP: look for a frame in the next bytes
                at = size
                break
            if at + min(length, KEPT) > size:
                break
            yield bytes(buffer[at : at + min(length, KEPT)]), length
            self._skip = max(0, at + length - size)
            at = min(at + length, size)
        del buffer[:at]

    @staticmethod
    def _find(buffer: bytearray) -> int:
        """Return where the first frame starts: a frame header whose frame ends at another header or at the end."""
        size = len(buffer)
        for at in range(size - 7):
            if _is_head(buffer, at):
                end = at + (8 if buffer[at : at + 4] == MAGIC else int.from_bytes(buffer[at : at + 4]))
                if end == size or (end + 8 <= size and _is_head(buffer, end)):
                    return at
        return size


def _is_head(buffer: bytearray, at: int) -> bool:
    if buffer[at : at + 4] == MAGIC:
        return True
    length, offset, kind = int.from_bytes(buffer[at : at + 4]), buffer[at + 4], buffer[at + 5]
    return 8 <= length <= LARGEST and offset >= 2 and offset * 4 <= length and kind <= SASL_TYPE


class AmqpDecoder:
    """The frames of one connection; a `gateway.trace.traces.Decoder`."""

    def __init__(self, payload: int, *, fresh: bool) -> None:
        """`payload` is how many bytes of each body are shown. `fresh`: nothing was read or written before."""
        self._frames = (Frames(in_step=fresh), Frames(in_step=True))  # writes always contain whole frames
        self._payload = payload
        self._topical = False

    def units(self, data: bytes, *, sent: bool) -> Iterator[Frame]:
        """Yield the frames that are complete with these bytes."""
        return self._frames[sent].split(data)

    def concerns(self, frame: Frame, topic: bytes) -> bool:
        """Return whether a frame may concern a topic. After an attach to it, all frames of the connection do."""
        data = frame[0]
        if topic not in data:
            return self._topical
        self._topical |= data[data[4] * 4 :].startswith(ATTACH)
        return True

    def line(self, frame: Frame, *, sent: bool) -> Line:
        """Return the frame's trace line."""
        data, length = frame
        if data[:4] == MAGIC:
            return {"frame": "header", "protocol": data[4], "version": ".".join(map(str, data[5:8]))}
        offset, channel = data[4] * 4, int.from_bytes(data[6:8])
        if offset == len(data):
            return {"frame": "empty"}  # a heartbeat
        try:
            body, end = decode(data, offset, len(data))
        except DecodeError as error:
            return {"frame": "unknown", "bytes": length, "note": "large" if len(data) < length else str(error)}
        code = _code(body)
        if code not in PERFORMATIVES or not isinstance(body.value, list):
            return {"frame": "unknown", "bytes": length}
        name, fields = PERFORMATIVES[code]
        line: Line = {"frame": name} if data[5] == SASL_TYPE else {"frame": name, "channel": channel}
        for field, value in zip(fields, body.value, strict=False):
            if value is not None:
                line[field] = BLANK if field in SECRET else _shown(field, value)
        if code == TRANSFER:
            line["bytes"] = length - end
            line.update(self._message(data[end:]))
        return line

    def _message(self, data: bytes) -> Line:
        """Return a message's properties and the start of its body, as far as its first frame contains them."""
        line: Line = {}
        at = 0
        secret = any(word in data for word in TOKENS)
        while at + 3 <= len(data):
            try:
                section, after = decode(data, at, len(data))
            except DecodeError:  # the section continues in the next frame
                if data[at : at + 3] == DATA_SECTION and self._payload:
                    start = at + (5 if data[at + 3 : at + 4] == b"\xa0" else 8)
                    line["payload"] = BLANK if secret else shown_bytes(data[start:], self._payload)
                break
            if not isinstance(section, Described):
                break
            code, value = _code(section), section.value
            if code == PROPERTIES and isinstance(value, list):
                named = zip(PROPERTY_NAMES, value, strict=False)
                line["properties"] = {
                    name: BLANK if name == "user_id" else shown(one) for name, one in named if one is not None
                }
            elif code == APPLICATION_PROPERTIES and isinstance(value, Pairs):
                line["application_properties"] = shown_pairs(value)
            elif code in {DATA, SEQUENCE, VALUE}:
                if self._payload:
                    line["payload"] = BLANK if secret else _payload(value, self._payload)
                break
            at = after
        return line


def _code(value: Any) -> int | None:
    """Return the code of a described value. A descriptor may be any value, even one that is not hashable."""
    descriptor = value.descriptor if isinstance(value, Described) else None
    if isinstance(descriptor, str):
        return NAMES.get(descriptor)
    return descriptor if isinstance(descriptor, int) else None


def _payload(value: Any, most: int) -> Any:
    if isinstance(value, str):
        value = value.encode()
    return shown_bytes(value, most) if isinstance(value, bytes) else shown(value)


def _shown(field: str, value: Any) -> Any:
    """Format a field's value: names for described types, and no secrets in maps."""
    if field == "role":
        return "receiver" if value else "sender"
    if field == "mechanism":
        return shown_method(value)
    if isinstance(value, Pairs):
        return shown_pairs(value)
    if isinstance(value, Described):
        return _described(value)
    return shown(value)


def _described(value: Described) -> Any:
    code, inner = _code(value), value.value
    first = inner[0] if isinstance(inner, list) and inner else None
    if code in TERMINUS:
        return first if isinstance(first, str) else TERMINUS[code]
    if code in STATES:
        error = first if isinstance(first, Described) else None
        return f"{STATES[code]} {_described(error)}" if error is not None else STATES[code]
    if code == 0x1D and isinstance(inner, list):  # error
        return " ".join(shown(str(one)) for one in inner[:2] if one is not None)
    return shown(inner)
