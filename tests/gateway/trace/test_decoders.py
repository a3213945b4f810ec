"""Trace decoders with bytes that are cut anywhere, start midway, are broken or large: no secrets, no exceptions."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.runtime.secret import BLANK
from gateway.trace.amqp import AmqpDecoder
from gateway.trace.http import HttpDecoder, target
from gateway.trace.mqtt import KEPT, MqttDecoder
from gateway.trace.shown import shown_bytes, shown_pairs
from gateway.trace.streams import EventDecoder, WebSocketDecoder
from protocols.mqtt import packets
from protocols.mqtt.packets import Version
from protocols.mqtt.properties import Properties
from protocols.rest.streams.streaming import LAST_CHUNK, chunk, event, heartbeat
from protocols.websocket import close_frame, write_frame
from tests.support.amqp_frames import Frames
from tests.support.mqtt_packets import encode_packet
from tests.support.websocket import TEXT
from tests.support.websocket import frame as client_frame

SECRET = "hunter2-canary"
V5 = Version.V5


def lines(decoder: Any, data: bytes, *, sent: bool = False, piece: int = 1 << 30) -> list[dict[str, Any]]:
    """Return the trace lines of bytes that arrive in pieces."""
    found = []
    for at in range(0, len(data), piece):
        found += [decoder.line(unit, sent=sent) for unit in decoder.units(data[at : at + piece], sent=sent)]
    return json.loads(msgspec.json.encode(found))


CONNECT = packets.Connect(
    V5, "sensor-1", username=SECRET, password=SECRET.encode(), keep_alive=30,
    will=packets.Will("gone", b"bye", 1, False, None),
    properties=Properties(
        authentication_method="SCRAM-SHA-256", authentication_data=SECRET.encode(),
        user_properties=(("api-key", "shown"), ("token", SECRET), ("site", "north")),
    ),
)  # fmt: skip
SAID = (
    CONNECT,
    packets.Auth(0x18, Properties(authentication_method="SCRAM-SHA-256", authentication_data=SECRET.encode())),
    packets.Publish("a/b", b"21.5", 1, False, True, 7, Properties(correlation_data=b"\x00\x01")),
    packets.Publish("a/b", bytes(range(256)) * 40, 0),
    packets.Subscribe(8, (packets.Subscription("a/#", 1),)),
    packets.Pingreq(),
    packets.Disconnect(0x04, Properties(reason_string="tired")),
)


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_mqtt(piece: int) -> None:
    data = b"".join(encode_packet(packet, V5) for packet in SAID)
    told = lines(MqttDecoder(None, b"", 4), data, piece=piece)
    kinds = ["CONNECT", "AUTH", "PUBLISH", "PUBLISH", "SUBSCRIBE", "PINGREQ", "DISCONNECT"]
    assert [line["packet"] for line in told] == kinds
    assert SECRET not in str(told)
    connect = told[0]
    assert (connect["client_id"], connect["password"], connect["username"]) == ("sensor-1", "***", "***")
    assert (connect["version"], connect["keep_alive"]) == ("5.0", 30)
    assert connect["user_properties"] == {"api-key": "***", "token": "***", "site": "north"}
    assert connect["will"] == {
        "packet": "will",
        "topic": "gone",
        "bytes": 3,
        "payload": "bye",
        "qos": 1,
        "retain": False,
    }
    assert (told[2]["topic"], told[2]["payload"], told[2]["bytes"], told[2]["dup"]) == ("a/b", "21.5", 4, True)
    assert (told[3]["bytes"], told[3]["payload"]) == (10_240, "0x00010203…")
    assert told[4]["subscriptions"] == ["a/# QoS 1"]
    assert (told[6]["reason_code"], told[6]["reason_string"]) == ("0x04", "tired")


def test_a_large_packet_is_skipped_and_not_kept() -> None:
    large = encode_packet(packets.Publish("big", bytes(5_000_000), 0), V5)
    decoder = MqttDecoder(V5, b"", 0)
    told = lines(decoder, large + encode_packet(packets.Pingreq(), V5), piece=100_000)
    assert told == [
        {
            "packet": "PUBLISH",
            "topic": "big",
            "bytes": 5_000_000,
            "qos": 0,
            "retain": False,
            "dup": False,
            "packet_id": 0,
        },
        {"packet": "PINGREQ"},
    ]
    many = packets.Subscribe(1, tuple(packets.Subscription(f"{number:0200}", 0) for number in range(100)))
    [told_of] = lines(decoder, encode_packet(many, V5))
    assert (told_of["packet"], told_of["note"]) == ("SUBSCRIBE", "large")
    assert told_of["bytes"] > KEPT


@pytest.mark.parametrize("piece", [1, 13, 1 << 20])
def test_amqp(piece: int) -> None:
    init = Frames.performative(0x41, Frames.symbol("PLAIN"), Frames.binary(b"\0ann\0" + SECRET.encode()))
    answer = Frames.performative(0x43, Frames.binary(SECRET.encode()))
    message = b"\x00\x53\x73" + Frames.listed(Frames.NULL, Frames.binary(SECRET.encode()), Frames.string("q"))
    message += b"\x00\x53\x74\xc1" + bytes([10 + len(SECRET)]) + b"\x02\xa1\x05token\xa1" + bytes([len(SECRET)])
    message += SECRET.encode() + b"\x00\x53\x75\xa0\x05hello"
    data = (
        b"AMQP\x03\x01\0\0" + Frames.frame(init, kind=1) + Frames.frame(answer, kind=1) + Frames.begin()
        + Frames.attach(address="orders") + Frames.transfer(0, message) + b"\0\0\0\x08\x02\0\0\0"
    )  # fmt: skip
    told = lines(AmqpDecoder(64, fresh=True), data, piece=piece)
    assert [line["frame"] for line in told] == [
        "header", "sasl-init", "sasl-response", "header", "open", "begin", "attach", "transfer", "empty",
    ]  # fmt: skip
    assert SECRET not in str(told)
    assert (told[1]["mechanism"], told[1]["initial_response"]) == ("PLAIN", "***")
    assert (told[4]["container_id"], told[6]["target"], told[6]["role"]) == ("scripted", "orders", "sender")
    transfer = told[7]
    assert transfer["properties"] == {"user_id": "***", "to": "q"}
    assert (transfer["application_properties"], transfer["payload"]) == ({"token": "***"}, "hello")
    assert transfer["bytes"] == len(message)


def test_no_descriptor_that_a_client_may_invent_ends_the_trace() -> None:
    odd = b"\x00" + Frames.listed(Frames.uint(1)) + Frames.listed(Frames.uint(2))  # a list as the descriptor of a list
    attach = Frames.performative(0x12, Frames.string("s"), Frames.uint(0), Frames.TRUE, Frames.NULL, Frames.NULL, odd)
    data = (
        Frames.frame(odd)
        + Frames.frame(attach)
        + Frames.transfer(0, odd)
        + Frames.transfer(0, b"\x00\x53\x75\xa0\x02ok")
    )
    told = lines(AmqpDecoder(8, fresh=True), data)
    assert [line["frame"] for line in told] == ["unknown", "attach", "transfer", "transfer"]
    assert (told[1]["source"], told[3]["payload"]) == ([2], "ok")


def test_amqp_finds_its_step_amid_a_frame_and_hides_a_token_that_is_put() -> None:
    frames = Frames.attach(address="a") + Frames.attach(address="$cbs")
    put = Frames.transfer(0, b"\x00\x53\x77\xa1" + bytes([len(SECRET)]) + SECRET.encode() + b"$cbs")
    decoder = AmqpDecoder(64, fresh=False)
    assert lines(decoder, frames[5:]) == lines(AmqpDecoder(64, fresh=True), Frames.attach(address="$cbs"))
    assert SECRET not in str(lines(decoder, put))


REQUEST = (
    "POST http://ann:{0}@h/topics/a?access_token={0}&timeout=5&key={0} HTTP/1.1\r\nHost: h\r\n"
    "Authorization: Bearer {0}\r\nCookie: s={0}\r\nX-Api-Key: {0}\r\n"
    "Proxy-Authorization: Basic {0}\r\nContent-Type: application/json\r\n"
    "Content-Length: 11\r\n\r\n" + "{{\"a\": 1 }}\r\n"
).format(SECRET).encode()  # fmt: skip
ANSWERS = (
    f"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nSet-Cookie: {SECRET}\r\n\r\nabc"
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n1\r\n!\r\n0\r\n\r\n"
    "HTTP/1.1 204 No Content\r\n\r\n"
).encode()


@pytest.mark.parametrize("piece", [1, 9, 1 << 20])
def test_http(piece: int) -> None:
    decoder = HttpDecoder()
    head = b"HEAD /topics HTTP/1.1\r\nHost: h\r\n\r\n"
    asked = lines(decoder, REQUEST + head, piece=piece)
    assert SECRET not in str(asked)
    assert asked == [
        {
            "request": "POST",
            "target": "http://***@h/topics/a?access_token=***&timeout=5&key=***",
            "fields": {"host": "h", "content-type": "application/json", "content-length": "11"},
        },
        {"body": 11},
        {"request": "HEAD", "target": "/topics", "fields": {"host": "h"}},
    ]
    decoder = HttpDecoder()
    told = lines(decoder, ANSWERS, sent=True, piece=piece)
    assert SECRET not in str(told)
    assert [line.get("answer", line.get("body")) for line in told] == [200, 3, 200, 6, 204]


def test_http_finds_its_step_amid_a_body_and_tells_the_events_of_a_stream() -> None:
    decoder = HttpDecoder()
    assert lines(decoder, b"rest of a body GET / HTTP/1.1 is no head here\r\n") == []
    assert [line["request"] for line in lines(decoder, b"GET /topics HTTP/1.1\r\nHost: h\r\n\r\n")] == ["GET"]
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    events = chunk(event(b"{x: 1}")) + chunk(heartbeat("")) + chunk(event(b"{}")) + LAST_CHUNK
    assert [line["answer"] for line in lines(decoder, head + events, sent=True)] == [200]
    told = lines(EventDecoder(64), events, sent=True)
    assert told == [
        {"event": 12, "payload": "data: {x: 1}"}, {"event": 13, "payload": ": nothing new"},
        {"event": 8, "payload": "data: {}"},
    ]  # fmt: skip


def test_what_a_socket_says_after_an_upgrade_is_no_http() -> None:
    decoder = HttpDecoder()
    lines(decoder, b"GET /stream HTTP/1.1\r\nUpgrade: websocket\r\n\r\n")
    assert lines(decoder, b"HTTP/1.1 101 Switching Protocols\r\n\r\n", sent=True)[0]["answer"] == 101
    assert lines(decoder, b"GET / HTTP/1.1\r\n\r\n") == []


@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_websockets(piece: int) -> None:
    decoder = WebSocketDecoder(None, 8)
    data = client_frame(b'{"type":"produce"}', TEXT) + client_frame(b"x" * 70_000, TEXT)
    assert lines(decoder, data, piece=piece * 1000) == [
        {"message": 18, "payload": '{"type":…'},
        {"message": 70_000, "payload": "xxxxxxxx…"},
    ]
    sent = write_frame(TEXT, b"ok") + close_frame(1008, "out")
    assert lines(decoder, sent, sent=True) == [{"message": 2, "payload": "ok"}, {"close": 1008, "reason": "out"}]


@given(st.binary(max_size=400), st.integers(1, 50), st.booleans())
def test_no_bytes_make_a_decoder_fail(data: bytes, piece: int, sent: bool) -> None:
    for decoder in (
        MqttDecoder(None, b"", 8), MqttDecoder(Version.V311, data[:3], 8), AmqpDecoder(8, fresh=True),
        AmqpDecoder(8, fresh=False), HttpDecoder(), EventDecoder(8),
    ):  # fmt: skip
        lines(decoder, data, sent=sent, piece=piece)
        lines(decoder, b"AMQP\0\1\0\0\0\0\0\x10\2\0\0\0" + data + b"HTTP/1.1 200 \r\n\r\n", sent=sent, piece=piece)


def test_bytes_are_text_where_they_are() -> None:
    assert shown_bytes("grün".encode(), 64) == "grün"
    assert shown_bytes("grü".encode(), 3) == "gr…"
    assert shown_bytes(b"\xff", 3) == "0xff"
    assert shown_bytes(b"a\x1b[31m", 64) == "0x611b5b33316d"
    assert target("/a?b") == "/a?b"
    assert target("http://ann:pa/ss?w@rd@h/a?limit=1") == "http://***@h/a?limit=1"
    [told] = lines(
        MqttDecoder(None, b"", 0), encode_packet(packets.Auth(0x18, Properties(authentication_method=SECRET)), V5)
    )
    assert told["authentication_method"] == "***"


@pytest.mark.parametrize(
    "name",
    ["pwd", "PIN", "user-pin", "otpCode", "sas_key", "X-JWT", "bearer", "session-id", "Signature", "x-auth-key",
     "ConnectionString", "connection-string", "api-key", "token"],
)  # fmt: skip
def test_names_that_mean_a_secret_are_blanked(name: str) -> None:
    assert shown_pairs([(name, "hush"), ("shipping", "by sea"), ("author", "ann")]) == {
        name: BLANK, "shipping": "by sea", "author": "ann",
    }  # fmt: skip
