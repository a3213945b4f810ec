"""Coded bodies: whole, cut at every byte, damaged at every bit, and in pieces."""

import gzip
import zlib
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise

import pytest
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.rest.content_coding import PIECE, BodyDecoder, CodingError, coding_of

TEXT = b'{"records":[{"value":"' + bytes(range(48, 122)) * 3 + b'"}]}'


def raw_deflate(data: bytes) -> bytes:
    maker = zlib.compressobj(wbits=-15)
    return maker.compress(data) + maker.flush()


def checked_zstd(data: bytes) -> bytes:
    return zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1})


FORMS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "gzip of two members": ("gzip", lambda data: gzip.compress(data[:7]) + gzip.compress(data[7:])),
    "zlib": ("deflate", zlib.compress),
    "raw deflate": ("deflate", raw_deflate),
    "zstd": ("zstd", checked_zstd),
    "zstd of two frames": ("zstd", lambda data: checked_zstd(data[:7]) + zstd.compress(data[7:])),
    "zstd, a frame to skip": ("zstd", lambda data: b"\x50\x2a\x4d\x18\x03\0\0\0abc" + zstd.compress(data)),
}


def decode(coding: str, *parts: bytes) -> bytes:
    decoder = BodyDecoder(coding)
    found = b"".join(piece for part in parts for piece in decoder.feed(part))
    decoder.finish()
    return found


def boundaries(form: str) -> set[int]:
    """Where a body of this form may end: after a complete member or frame."""
    return {
        "gzip of two members": {len(gzip.compress(TEXT[:7]))},
        "zstd of two frames": {len(checked_zstd(TEXT[:7]))},
        "zstd, a frame to skip": {11},
    }.get(form, set())


@pytest.mark.parametrize("form", FORMS)
def test_a_body_cut_at_any_byte_is_refused(form: str) -> None:
    coding, make = FORMS[form]
    whole = make(TEXT)
    assert decode(coding, whole) == TEXT
    for end in set(range(len(whole))) - boundaries(form):
        with pytest.raises(CodingError):
            decode(coding, whole[:end])


@pytest.mark.parametrize("form", FORMS)
def test_a_body_may_come_byte_by_byte(form: str) -> None:
    coding, make = FORMS[form]
    whole = make(TEXT)
    assert decode(coding, *(whole[place : place + 1] for place in range(len(whole)))) == TEXT


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("garbage", [b"\0", b"\x1f", b"garbage that follows", b"\x28\xb5\x2f\xfd"])
def test_nothing_may_follow(form: str, garbage: bytes) -> None:
    coding, make = FORMS[form]
    for parts in ((make(TEXT) + garbage,), (make(TEXT), garbage)):
        with pytest.raises(CodingError):
            decode(coding, *parts)


@pytest.mark.parametrize("form", ["gzip", "zlib", "zstd"])  # each with a checksum
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_damaged_body_never_decodes_to_another(form: str, data: st.DataObject) -> None:
    coding, make = FORMS[form]
    damaged = bytearray(make(TEXT))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    found = TEXT  # unchanged if the damage is in a field without effect, such as gzip's time
    with suppress(CodingError):
        found = decode(coding, bytes(damaged))
    assert found == TEXT


@settings(max_examples=200, deadline=None)
@given(form=st.sampled_from(sorted(FORMS)), body=st.binary(max_size=3000), cuts=st.lists(st.integers(0, 4000)))
def test_how_a_body_is_split_does_not_matter(form: str, body: bytes, cuts: list[int]) -> None:
    coding, make = FORMS[form]
    whole = make(body)
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    assert decode(coding, *(whole[begin:end] for begin, end in pairwise(places))) == body


@pytest.mark.parametrize("form", FORMS)
def test_a_bomb_comes_in_small_pieces(form: str) -> None:
    coding, make = FORMS[form]
    decoder = BodyDecoder(coding)
    sizes = [len(piece) for piece in decoder.feed(make(b" " * 5_000_000))]
    decoder.finish()
    assert (sum(sizes), max(sizes) <= PIECE, min(sizes) > 0) == (5_000_000, True, True)


def test_a_window_that_is_too_large_is_refused() -> None:
    """RFC 9659: a frame of a few bytes could ask for 128 MB otherwise."""
    options = {zstd.CompressionParameter.window_log: 27, zstd.CompressionParameter.content_size_flag: 0}
    maker = zstd.ZstdCompressor(options=options)
    body = maker.compress(b"a" * 1000) + maker.flush()
    with pytest.raises(CodingError):
        decode("zstd", body)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
@given(body=st.binary(max_size=200))
def test_anything_else_is_refused_in_one_line(coding: str, body: bytes) -> None:
    said = "one line"
    try:
        decode(coding, body)
    except CodingError as error:
        said = str(error)
    assert said.isprintable()


@pytest.mark.parametrize(
    ("fields", "coding"),
    [
        ((), None),
        (("identity",), None),
        (("",), None),
        ((" GZip ",), "gzip"),
        (("x-gzip",), "gzip"),
        (("identity, zstd",), "zstd"),
        (("identity", "deflate"), "deflate"),
    ],
)
def test_the_coding_that_is_named(fields: tuple[str, ...], coding: str | None) -> None:
    assert coding_of(fields) == coding


@pytest.mark.parametrize(
    "fields", [("br",), ("gzip, gzip",), ("gzip", "zstd"), ("deflate, br",), ("gzip;q=1",), ("\xdc",)]
)
def test_codings_that_are_not_served(fields: tuple[str, ...]) -> None:
    with pytest.raises(CodingError):
        coding_of(fields)
