"""Requests that a gateway must survive: valid ones of most operations, damaged in body, framing, head or timing.

One client in ten leaves in mid-poll, stream or upload.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

from loadtest.clients.hostile.storm import CLOSE_S, Conversation
from loadtest.clients.http_wire import CONTROL, request, request_head

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

RECORDS: Final = "application/vnd.kafka.{}.v2+json"
NOISE: Final = (
    b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b"\x00", b"\xff", b"\xed\xa0\x80", b"1e999", b"null", b"-0",
)  # fmt: skip
DEEP: Final = 60_000
FOREIGN: Final = frozenset({"Origin: null", "Origin: https://evil.example", "Sec-Fetch-Site: cross-site"})
LARGE: Final = 300_000
KNOWN: Final = 0.25  # share of conversations that repeat a request head on the connection
LEAVING: Final = 0.1  # share of clients that leave in the middle
LONG_MS: Final = 20_000  # far longer than such a client stays
STAY_S: Final = 0.05  # the longest stay after the start
PIECE_S: Final = 0.002  # between two pieces of a request
ACCEPT: Final = "Accept: */*"
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST: Final = b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"  # so that the gateway closes
BOMB: Final = gzip.compress(bytes(32 << 20), mtime=0)  # far over the body size limit


CODINGS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "gzip": lambda body: gzip.compress(body, mtime=0),
    "deflate": zlib.compress,
    "zstd": zstd.compress,
}


def attack(rng: random.Random, topic: str, silent: str) -> Conversation:
    """Return a conversation, determined by `rng`.

    Both topics must exist: `topic` receives what is stored by mistake, and `silent` has no records. Nothing is stored
    of a truncated coding or a foreign origin.
    """
    if rng.random() < LEAVING:
        return _departure(rng, topic, silent)
    if rng.random() < KNOWN:
        return _known(rng, topic)
    method, path, media, body = _valid(rng, topic)
    body = _damaged(rng, body)
    coding, is_cut = "", False
    if rng.random() < 0.1:
        coding = rng.choice(list(CODINGS))
        whole = CODINGS[coding](body)
        short = whole[: rng.randrange(1, len(whole))]
        body = rng.choice([BOMB if coding == "gzip" else whole, whole, short, short, body])
        is_cut = (
            body is short and method == "POST" and not path.endswith("/records")
        )  # those report it in their last line
    length = len(body)
    chunked = rng.random() < 0.2
    if rng.random() < 0.1:
        length = rng.choice([length + 10, max(0, length - 3), 1 << 40, 0])
        is_cut = is_cut and length > 0  # else there is no body
    host = rng.choice(["h", "h", "", "x" * 300, "rebound.example"])
    fields = [f"Host: {host}", "Connection: close"]
    if method == "POST":
        fields.append("Transfer-Encoding: chunked" if chunked else f"Content-Length: {length}")
        fields.append(f"Content-Type: {rng.choice([media, media, media, media, 'text/html', CONTROL])}")
    if coding:
        fields.append(f"Content-Encoding: {coding}")
    fields += rng.sample(
        ["Expect: 100-continue", "Accept: text/plain;q=0", "Authorization: Basic ////", "Last-Event-ID: 9:9,x",
         "X-Forwarded-Path: ////", "Forwarded: for=;;;", "traceparent: 00-zz",
         f"Idempotency-Key: \"{rng.random()}\"", "Accept-Encoding: gzip;q=9, zstd", "Origin: null",
         "Origin: https://evil.example", "Sec-Fetch-Site: cross-site", "Upgrade: websocket"],
        rng.choice([0, 0, 0, 1, 3]),
    )  # fmt: skip
    head = "\r\n".join([f"{method} {path} HTTP/1.{rng.choice([1, 1, 1, 0])}", *fields, "", ""]).encode()
    refused = is_cut or host == "rebound.example" or not FOREIGN.isdisjoint(fields)
    if rng.random() < 0.05:
        head, refused = _flipped(rng, head), False  # perhaps in the part that is refused
    sent = head + (_chunks(rng, body) if chunked and method == "POST" else body)
    ending = rng.choice(["wait"] * 6 + ["leave", "reset"])
    if ending != "wait":
        sent = sent[: rng.randrange(len(sent)) + 1] if rng.random() < 0.7 else sent
    elif rng.random() < 0.05:
        sent = sent[: rng.randrange(len(sent)) + 1]
    cut = rng.randrange(len(sent) + 1)
    pieces = [piece for piece in (sent[:cut], sent[cut:]) if piece]
    return Conversation(pieces, ending, PIECE_S, refused=refused)


def judged(one: Conversation, answer: bytes | None) -> tuple[Sequence[str], str]:
    """Return what is counted of a conversation, and a problem: an error of the gateway, or what it had to refuse."""
    answer = (answer or b"").removeprefix(CONTINUE)
    status = answer[9:12].decode(errors="replace") if answer.startswith(b"HTTP/1.") else "none"
    wrong = one.ending == "wait" and (status == "500" or (one.refused and status.startswith("2")))
    counted = one.kind or (status if one.ending == "wait" else one.ending)
    return [counted], repr(answer[:300]) if wrong else ""


def _departure(rng: random.Random, topic: str, silent: str) -> Conversation:
    """Start an operation, wait for its start where the protocol reports it, and leave."""
    way, ending, stay_s = rng.choice(["poll", "stream", "upload"]), rng.choice(["leave", "reset"]), STAY_S
    first: list[bytes] = []
    if way == "poll":
        group = f"/consumers/gone-{rng.getrandbits(64):x}"
        partition = {"partitions": [{"topic": silent, "partition": 0}]}
        path = f"{group}/instances/one"
        values = (
            (group, {"name": "one", "auto.offset.reset": "latest"}),
            (f"{path}/assignments", partition),
            (f"{path}/positions/end", partition),
        )
        first = [request("POST", at, CONTROL, json.dumps(value).encode()) for at, value in values]
        piece = request_head("GET", f"{path}/records?timeout={LONG_MS}", CONTROL, ACCEPT)
    elif way == "stream":
        piece, stay_s = request_head("GET", f"/topics/{silent}/stream", CONTROL, ACCEPT), CLOSE_S / 2
    else:
        line = json.dumps({"key": "a2V5", "value": "dmFs"}).encode() + b"\n"
        part = line * 5 + line[: rng.randrange(len(line))]
        head = request_head("POST", f"/topics/{topic}/records", "application/x-ndjson", "Transfer-Encoding: chunked")
        piece = b"%b%x\r\n%b\r\n" % (head, len(part), part)
    return Conversation([piece], ending, rng.random() * stay_s, first, kind=f"left in mid-{way}")


def _known(rng: random.Random, topic: str) -> Conversation:
    """Return requests with one head, valid and damaged, split anywhere, some pipelined."""
    embedded = rng.choice(["json", "binary", "text"])
    records = json.dumps({"records": [{"key": "a2V5", "value": "dmFs"}] * rng.choice([1, 3, 200])}).encode()
    head = (
        f"POST /topics/{topic} HTTP/1.1\r\nHost: h\r\nContent-Type: {RECORDS.format(embedded)}\r\nContent-Length: "
    ).encode()

    def post(body: bytes) -> bytes:
        return b"%b%d\r\n\r\n%b" % (head, len(body), body)

    pieces: list[bytes] = []
    for _ in range(rng.choice([1, 1, 2, 5])):
        sent = post(_damaged(rng, records) if rng.random() < 0.7 else records)
        if rng.random() < 0.2:
            sent = _flipped(rng, sent)
        cut = rng.randrange(len(sent) + 1) if rng.random() < 0.4 else 0
        pieces += [piece for piece in (sent[:cut], sent[cut:]) if piece]
    if rng.random() < 0.2:
        pieces = [b"".join(pieces)]
    ending = rng.choice(["wait"] * 4 + ["leave", "reset"])
    return Conversation([*pieces, LAST] if ending == "wait" else pieces, ending, PIECE_S, [post(records)])


def _valid(rng: random.Random, topic: str) -> tuple[str, str, str, bytes]:
    """Return the method, path, media type and body of a valid request."""
    embedded = rng.choice(["json", "binary", "text"])
    record: dict[str, Any] = {"key": "a2V5", "value": "dmFs", "headers": [{"key": "h", "value": "aA=="}]}
    records = {"records": [record] * rng.choice([0, 1, 3, 200])}
    partitions = {"partitions": [{"topic": topic, "partition": 0}]}
    offsets = {"offsets": [{"topic": topic, "partition": 0, "offset": 1}]}
    name = f"/consumers/hostile/instances/c{rng.randrange(5)}"
    line = json.dumps(record).encode() + b"\n"
    requests: list[tuple[str, str, str, Any]] = [
        ("POST", f"/topics/{topic}", RECORDS.format(embedded), records),
        ("POST", f"/topics/{topic}", RECORDS.format(embedded), records),
        ("POST", f"/topics/{topic}?async=true", RECORDS.format(embedded), records),
        ("POST", f"/topics/{topic}/partitions/0", RECORDS.format(embedded), records),
        ("POST", f"/topics/{topic}/records", "application/x-ndjson", line * rng.choice([1, 50])),
        ("POST", "/consumers/hostile", CONTROL, {"name": f"c{rng.randrange(5)}", "format": embedded}),
        ("POST", f"{name}/subscription", CONTROL, {"topics": [topic]}),
        ("POST", f"{name}/subscription", CONTROL, {"topic_pattern": "((a+)+)+$"}),
        ("POST", f"{name}/assignments", CONTROL, partitions),
        ("POST", f"{name}/offsets", CONTROL, offsets),
        ("POST", f"{name}/positions", CONTROL, offsets),
        ("POST", f"{name}/positions/end", CONTROL, partitions),
        ("GET", f"{name}/records?timeout=200&max_bytes={rng.choice([0, 1, 5000])}", CONTROL, b""),
        ("DELETE", name, CONTROL, b""),
        ("GET", f"/topics/{topic}/records?partition=0&offset={rng.choice([0, 10**18])}&limit=5", CONTROL, b""),
        ("GET", f"/topics/{topic}/stream?from=beginning&limit=3&duration=300", CONTROL, b""),
        ("GET", f"/topics/{'%00' * rng.randrange(3)}{topic}/../partitions/9", CONTROL, b""),
        ("GET", "/stream", CONTROL, b""),
    ]
    method, path, media, body = rng.choice(requests)
    return method, path, media, body if isinstance(body, bytes) else json.dumps(body).encode()


def _damaged(rng: random.Random, body: bytes) -> bytes:
    """Return a body that usually differs from the given one."""
    kind = rng.randrange(9)
    if kind == 0:
        return rng.randbytes(rng.choice([1, 100, LARGE]))
    if kind == 1:
        return rng.choice([b"[", b'{"records":[', b'{"a":']) * DEEP
    if kind == 2:
        return body[: rng.randrange(len(body) + 1)]
    if kind == 3:
        return body.replace(b'"', b'"' + b"x" * LARGE, 1)
    if kind == 4:
        return body.replace(b":", b":" + b"9" * rng.choice([20, 5000]), 1)
    if kind == 5:
        return b""
    return _flipped(rng, body)


def _flipped(rng: random.Random, data: bytes) -> bytes:
    """Replace or insert some bytes."""
    damaged = bytearray(data)
    for _ in range(rng.choice([1, 1, 3, 20])):
        place = rng.randrange(len(damaged) + 1)
        damaged[place : place + rng.randrange(2)] = rng.choice(NOISE)
    return bytes(damaged)


def _chunks(rng: random.Random, body: bytes) -> bytes:
    """Frame a body in chunks, sometimes wrongly."""
    size = rng.choice(
        [b"%x" % len(body), b"%x" % (len(body) + 1), b"fffffffffffffffff", b"-1", b"0x5", b"%x;a=b" % len(body)]
    )
    return (b"%b\r\n%b\r\n" % (size, body) if body else b"") + rng.choice(
        [b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b""]
    )
