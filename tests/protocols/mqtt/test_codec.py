"""Variable byte integers, strings and binary data (section 1.5)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.errors import PeerError, UsageError
from protocols.mqtt.codec import (
    MAX_VARINT,
    Reader,
    decode_name,
    decode_text,
    decode_varint,
    encode_binary,
    encode_text,
    encode_varint,
    is_text,
    read_varint,
    split_packets,
)

# Table 1-1: the first and last value of each size.
SIZES = [
    (0, "00"),
    (127, "7f"),
    (128, "8001"),
    (16_383, "ff7f"),
    (16_384, "808001"),
    (2_097_151, "ffff7f"),
    (2_097_152, "80808001"),
    (268_435_455, "ffffff7f"),
]


@pytest.mark.clause("MQTT-1.5.5-1")
@pytest.mark.parametrize(("value", "data"), SIZES)
def test_variable_byte_integer(value: int, data: str) -> None:
    raw = bytes.fromhex(data)
    assert encode_varint(value) == raw
    assert decode_varint(b"\xff" + raw + b"\xff", 1, 1 + len(raw)) == (value, 1 + len(raw))
    if len(raw) > 1:
        assert read_varint(raw, 0, len(raw)) == (value, len(raw), False)


@pytest.mark.clause("MQTT-1.5.5-1")
@pytest.mark.parametrize(
    "data", ["8000", "808000", "ff8000", "80808000", "80", "ffffff", "8080808001", "ffffffff7f", ""]
)
def test_not_a_variable_byte_integer(data: str) -> None:
    raw = bytes.fromhex(data)
    with pytest.raises(PeerError) as caught:
        decode_varint(raw, 0, len(raw))
    assert caught.value.code == 0x81


@pytest.mark.parametrize("value", [-1, MAX_VARINT + 1])
def test_no_variable_byte_integer_for(value: int) -> None:
    with pytest.raises(UsageError):
        encode_varint(value)


@given(st.integers(0, MAX_VARINT))
def test_variable_byte_integer_round_trip(value: int) -> None:
    raw = encode_varint(value)
    assert decode_varint(raw, 0, len(raw)) == (value, len(raw))


@given(st.lists(st.binary(max_size=300)))
def test_a_run_of_packets_is_split_where_each_ends(bodies: list[bytes]) -> None:
    packets = [b"\x30" + encode_varint(len(body)) + body for body in bodies]
    assert split_packets(b"".join(packets)) == packets


def test_a_remaining_length_waits_for_its_end_and_not_for_ever() -> None:
    assert read_varint(b"\x80", 0, 1) is None
    assert read_varint(b"\x80\x80\x80", 0, 3) is None
    assert read_varint(b"\x80\x00", 0, 2) == (0, 2, True)
    with pytest.raises(PeerError):
        read_varint(b"\x80\x80\x80\x80", 0, 4)


@pytest.mark.clause("MQTT-1.5.4-1")
@pytest.mark.parametrize("data", ["ff", "c328", "eda080", "edbfbf", "f4908080", "c0af", "e0808f", "f08080af", "e282"])
def test_ill_formed_utf8(data: str) -> None:
    with pytest.raises(PeerError):
        decode_text(bytes.fromhex(data))


@pytest.mark.clause("MQTT-1.5.4-2")
def test_no_null_character_in_a_string() -> None:
    with pytest.raises(PeerError):
        decode_text(b"a\0b")
    with pytest.raises(UsageError):
        encode_text("a\0b")


@pytest.mark.clause("MQTT-1.5.4-3")
def test_a_byte_order_mark_stays() -> None:
    assert decode_text(b"\xef\xbb\xbfa") == "\ufeffa"


@pytest.mark.parametrize("text", ["\x01", "\x1f", "\x7f", "\x9f", "\ufdd0", "\uffff", "\U0001fffe", "\n"])
def test_names_have_no_control_characters_but_text_may(text: str) -> None:
    assert decode_text(text.encode()) == text
    with pytest.raises(PeerError):
        decode_name(text.encode())


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_text_round_trip(text: str) -> None:
    raw = encode_text(text)
    reader = Reader(raw + b"more")
    assert reader.text() == text
    assert reader.take(4) == b"more"
    reader.finish()


def test_what_does_not_fit_a_length_prefix_cannot_be_sent() -> None:
    assert len(encode_text("x" * 65_535)) == 65_537
    assert len(encode_binary(b"x" * 65_535)) == 65_537
    for too_much in (
        lambda: encode_text("x" * 65_536),
        lambda: encode_binary(b"x" * 65_536),
        lambda: encode_text("\ud800"),
    ):
        with pytest.raises(UsageError):
            too_much()


def test_a_reader_does_not_look_beyond_its_end() -> None:
    reader = Reader(b"\x00\x03abcdef", 0, 4)
    with pytest.raises(PeerError):
        reader.binary()
    reader = Reader(b"\x00\x01ab")
    assert reader.binary() == b"a"
    assert reader.left == 1
    with pytest.raises(PeerError):
        reader.finish()


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        ("", True), ("41 00 0a", True), ("c3a9", True), ("f09f9880", True), ("ff", False), ("c3", False),
        ("eda080", False), ("c080", False),
    ],
)  # fmt: skip
def test_a_payload_that_is_text(payload: str, text: bool) -> None:
    assert is_text(bytes.fromhex(payload)) is text
