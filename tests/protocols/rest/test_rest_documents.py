"""Concatenated JSON documents, however the body is split."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.rest.errors import RestError
from protocols.rest.splitters import DocumentSplitter

LIMIT = 10_000
SPACES = st.text(alphabet=" \t\r\n", max_size=3)
TEXTS = st.text(alphabet='ab"\\{}[]/ü\n ', max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
DOCUMENTS = st.lists(st.dictionaries(TEXTS, VALUES, max_size=3) | st.lists(VALUES, max_size=3), max_size=5)
HARD = rb'{"a":"}\"{\\"}[[],"]"]{"b":"\\\\\"","c":[{}]}' + b"\n" + ' {"ü":"\u2028"}'.encode() + b"\r\n[1]  "


def cut(parts: list[bytes], limit: int = LIMIT) -> list[bytes]:
    splitter = DocumentSplitter(limit)
    found = [document for part in parts for document in splitter.feed(part)]
    splitter.finish()
    assert splitter.fault is None
    return found


def test_documents_are_cut_at_any_byte() -> None:
    whole = cut([HARD])
    assert [json.loads(document) for document in whole] == [
        {"a": '}"{\\'}, [[], "]"], {"b": '\\\\"', "c": [{}]}, {"ü": "\u2028"}, [1],
    ]  # fmt: skip
    for place in range(len(HARD) + 1):
        assert cut([HARD[:place], HARD[place:]]) == whole
    assert cut([HARD[place : place + 1] for place in range(len(HARD))]) == whole


@given(documents=DOCUMENTS, space=SPACES, size=st.integers(1, 40), ascii_only=st.booleans())
def test_concatenated_documents_are_split(documents: list[Any], space: str, size: int, ascii_only: bool) -> None:
    texts = [json.dumps(document, ensure_ascii=ascii_only).encode() for document in documents]
    body = space.encode().join(texts)
    assert cut([body[place : place + size] for place in range(0, len(body), size)]) == texts


@pytest.mark.parametrize("body", [b'"text"', b"1", b"null", b"}", b",{}", b"\x1e{}"])
@pytest.mark.parametrize("single", [True, False])
def test_a_value_that_is_not_an_object_ends_the_body(body: bytes, single: bool) -> None:
    splitter = DocumentSplitter(LIMIT)
    whole = b'{"a":1} ' + body
    parts = [whole[place : place + 1] for place in range(len(whole))] if single else [whole]
    assert [document for part in parts for document in splitter.feed(part)] == [b'{"a":1}']
    assert splitter.fault is not None
    assert splitter.fault.error_code == 400
    assert splitter.feed(b"{}") == []
    splitter.finish()


@pytest.mark.parametrize("body", [b"{", b'{"a', b'{"a":"\\', b"[[]"])
def test_a_body_that_breaks_off_is_an_error(body: bytes) -> None:
    splitter = DocumentSplitter(LIMIT)
    assert splitter.feed(b"{}" + body) == [b"{}"]
    with pytest.raises(RestError) as refused:
        splitter.finish()
    assert refused.value.status == 400


@pytest.mark.parametrize("end", [b'"}', b""])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_document_that_is_too_large_ends_the_body(end: bytes, size: int) -> None:
    fits = b'{"a":"' + b"x" * 92 + b'"}'
    assert cut([fits, fits], limit=100) == [fits, fits]
    splitter = DocumentSplitter(100)
    body = fits + b'{"a":"' + b"x" * 93 + b'"' + end
    found = [one for place in range(0, len(body), size) for one in splitter.feed(body[place : place + size])]
    assert found == [fits]
    if end or len(body) - len(fits) > 100:
        assert splitter.fault is not None
        assert splitter.fault.error_code == 413


def test_a_long_string_is_scanned_once() -> None:
    """Byte by byte it would take minutes if each part started again at the string's first byte."""
    body = b'{"a":"' + b"\\\\x" * 100_000 + b'"}'
    splitter = DocumentSplitter(1_000_000)
    found = [one for place in range(len(body)) for one in splitter.feed(body[place : place + 1])]
    assert found == [body]
