"""Packets written by hand; shares no code with the tested codec.

Tokens between blanks: hex digits; 'text' without, s'text' with length prefix; * is the remaining length; v is the
property length of all up to a ;.
"""

from __future__ import annotations


def varint(value: int) -> bytes:
    out = []
    while True:
        value, low = divmod(value, 128)
        out.append(low + (128 if value else 0))
        if not value:
            return bytes(out)


def wire(text: str) -> bytes:
    out = bytearray()
    marks: list[tuple[str, int]] = []
    for token in text.split():
        if token in ("*", "v"):
            marks.append((token, len(out)))
        elif token == ";":
            kind, at = marks.pop()
            assert kind == "v"
            out[at:at] = varint(len(out) - at)
        elif token.startswith("s'"):
            data = token[2:-1].replace("_", " ").encode()
            out += len(data).to_bytes(2, "big") + data
        elif token.startswith("'"):
            out += token[1:-1].replace("_", " ").encode()
        else:
            out += bytes.fromhex(token)
    while marks:
        kind, at = marks.pop()
        assert kind == "*"
        out[at:at] = varint(len(out) - at)
    return bytes(out)
