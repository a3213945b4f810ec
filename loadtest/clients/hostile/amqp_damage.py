"""Damages recorded conversations of AMQP clients: bytes, whole frames, and fields inside otherwise valid frames."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from loadtest.clients.amqp_wire import listed, read_value
from loadtest.clients.hostile.storm import Conversation

Pieces = list[bytes]
RECORDED: Final = "conversation-00000000"  # the topic of the recordings
TOPIC: Final = "conversation-{:08x}"
STEP_S: Final = 0.02  # for the gateway's answer to a frame

_SIGNIFICANT: Final = (0x00, 0x01, 0x40, 0x45, 0x7F, 0x80, 0xC0, 0xC1, 0xE0, 0xFE, 0xFF)
_VALUES: Final = (
    b"\x40", b"\x41", b"\x42", b"\x43", b"\x44", b"\x45", b"\x52\x01", b"\x70\xff\xff\xff\xff", b"\x70\x7f\xff\xff\xff",
    b"\x80" + b"\xff" * 8, b"\x54\x80", b"\x50\xff", b"\x60\xff\xff", b"\x82" + b"\x7f\xf8" + b"\0" * 6,
    b"\x98" + b"\x11" * 16, b"\x94" + b"\x22" * 16, b"\x73\xff\xff\xff\xff", b"\x83" + b"\x80" + b"\0" * 7,
    b"\xa0\x00", b"\xa0\x04tag\x00", b"\xa1\x03a/b", b"\xa1\x02\xc3\x28", b"\xa1\x00", b"\xa3\x02\xff\xfe",
    b"\xa1\xff" + b"n" * 255, b"\xb0\x00\x00\x01\x00" + b"b" * 256, b"\xb1\x00\x00\x00\x01a",
    b"\xc1\x03\x02\x40\x40", b"\xc1\x02\x01\x40", b"\xc1\x01\x00", b"\xd1\x00\x00\x00\x04\x00\x00\x00\x00",
    b"\xc0\x01\x00", b"\xd0\x00\x00\x00\x04\x7f\xff\xff\xff", b"\xe0\x02\x01\x40", b"\xe0\x04\x01\xa3\x01x",
    b"\xf0\x00\x00\x00\x05\xff\xff\xff\xff\x41", b"\x00\x53\x24\x45", b"\x00\x53\x27\xc0\x03\x02\x41\x41",
    b"\x00\x53\x28\x45", b"\x00\x53\x29\xc0\x01\x00", b"\x00\x53\x30\xc0\x01\x00", b"\x00\x53\x34\xc0\x02\x01\x40",
    b"\x00\xa3\x03abc\x40", b"\x00" * 40 + b"\x40", b"\xc0\x02\x01" * 20 + b"\x45", b"\x00\x40\x40",
)  # fmt: skip
"""Values that are meaningful, or excessive, in any field."""


def recordings(topic: str) -> list[Pieces]:
    """Return what real clients said to a topic, one of `TOPIC`: protocol headers and whole frames."""
    text = Path(__file__).with_name("amqp_conversations.json").read_text("utf-8")
    assert len(topic) == len(RECORDED), topic
    return [
        [bytes.fromhex(piece).replace(RECORDED.encode(), topic.encode()) for piece in pieces]
        for pieces in json.loads(text)["conversations"].values()
    ]


def hostile(recordings: Sequence[Pieces], rng: random.Random, silent: float) -> Conversation:
    """Return a damaged conversation; a share of them, `silent`, ends in silence, which the gateway must close."""
    pieces = damaged(recordings, rng)
    patience = STEP_S if rng.random() < 0.7 else 0.0
    ending = "wait" if rng.random() < silent else rng.choice(("half-close", "half-close", "reset", "leave"))
    return Conversation(_splits(pieces, rng), ending, patience)


def judged(one: Conversation, answer: bytes | None) -> tuple[Sequence[str], str]:
    """Return what is counted of a conversation."""
    return ["conversations", one.ending, *(["answered"] if answer != b"" else [])], ""


def _splits(pieces: Pieces, rng: random.Random) -> Pieces:
    """Split the same bytes differently, sometimes."""
    if rng.random() < 0.7:
        return [piece for piece in pieces if piece]
    data = b"".join(pieces)
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(8)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if start < end]


def damaged(recordings: Sequence[Pieces], rng: random.Random) -> Pieces:
    """Return one of the conversations with some faults, or noise."""
    kind = rng.randrange(10)
    pieces = list(rng.choice(recordings))
    if kind == 0:
        return [rng.randbytes(rng.randrange(1, 3000))]
    if kind == 1:
        return [*pieces[: rng.randrange(len(pieces))], rng.randbytes(rng.randrange(1, 600))]
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        if not pieces:
            break
        at = rng.randrange(len(pieces))
        if kind <= 3:
            pieces[at] = _bytes(pieces[at], rng)
        elif kind <= 5:
            _shuffle(pieces, at, recordings, rng)
        else:
            pieces[at] = _body(pieces[at], rng)
    return pieces


def _bytes(data: bytes, rng: random.Random) -> bytes:
    """Change, delete, repeat or insert some bytes."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 6))):
        at = rng.randrange(len(changed)) if changed else 0
        match rng.randrange(5):
            case 0 if changed:
                changed[at] ^= 1 << rng.randrange(8)
            case 1 if changed:
                changed[at] = rng.choice(_SIGNIFICANT)
            case 2:
                del changed[at : at + rng.randrange(1, 9)]
            case 3:
                changed[at:at] = changed[at : at + rng.randrange(1, 40)]
            case _:
                changed[at:at] = rng.randbytes(rng.randrange(1, 9))
    return bytes(changed)


def _shuffle(pieces: Pieces, at: int, recordings: Sequence[Pieces], rng: random.Random) -> None:
    """Delete, repeat or move a frame, change its channel, or insert one of another conversation."""
    match rng.randrange(5):
        case 0:
            del pieces[at]
        case 1:
            pieces[at:at] = [pieces[at]] * rng.choice((1, 2, 50))
        case 2:
            pieces.insert(rng.randrange(len(pieces)), pieces.pop(at))
        case 3:
            pieces.insert(at, rng.choice(rng.choice(recordings)))
        case _:
            channel = struct.pack(">H", rng.choice((0, 1, 2, 63, 64, 65535)))
            pieces[at] = pieces[at][:6] + channel + pieces[at][8:]


def _body(piece: bytes, rng: random.Random) -> bytes:
    """Return a frame with a correct size but damaged content."""
    if piece[:4] == b"AMQP" or len(piece) <= 8:
        return piece
    body = piece[8:]
    if rng.random() < 0.3:
        return _frame(piece, _bytes(body, rng))
    try:
        return _frame(piece, _rewritten(body, rng))
    except (IndexError, ValueError, TypeError, RecursionError, struct.error):  # it is already damaged
        return _frame(piece, _bytes(body, rng))


def _rewritten(body: bytes, rng: random.Random) -> bytes:
    """Return a performative with changed fields, or with a changed message after it."""
    end = read_value(body, 0)[1]
    fields, _ = _fields(body[:end])
    if rng.random() < 0.4 and len(body) > end:
        return body[:end] + _bytes(body[end:], rng)
    match rng.randrange(4):
        case 0 if fields:
            fields[rng.randrange(len(fields))] = rng.choice(_VALUES)
        case 1:
            fields.insert(rng.randrange(len(fields) + 1), rng.choice(_VALUES))
        case 2 if fields:
            del fields[rng.randrange(len(fields))]
        case _ if fields:
            at = rng.randrange(len(fields))
            fields[at] = _nested(fields[at], rng)
    return body[:3] + listed(fields) + body[end:]


def _nested(field: bytes, rng: random.Random) -> bytes:
    """Change a field inside a source, a target or a state; replace any other field."""
    if field[:2] != b"\x00\x53" or len(field) < 4 or field[3] not in (0x45, 0xC0, 0xD0):
        return rng.choice(_VALUES)
    fields, _ = _fields(field)
    if fields:
        fields[rng.randrange(len(fields))] = rng.choice(_VALUES)
    return field[:2] + bytes((rng.choice((field[2], field[2], 0x28, 0x29, 0x30)),)) + listed(fields)


def _fields(described: bytes) -> tuple[list[bytes], int]:
    """Return the encoded fields of a described list with a short descriptor, and the list's end."""
    code = described[3]
    if code == 0x45:
        return [], 4
    at = 6 if code == 0xC0 else 12
    count = described[5] if code == 0xC0 else struct.unpack_from(">I", described, 8)[0]
    fields: list[bytes] = []
    for _ in range(count):
        after = read_value(described, at)[1]
        fields.append(described[at:after])
        at = after
    return fields, at


def _frame(piece: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body) + 8) + piece[4:8] + body
