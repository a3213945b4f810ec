"""SASLprep: the examples of RFC 4013, and what each rule refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.security.login.saslprep import saslprep


@pytest.mark.parametrize(
    ("text", "prepared"),
    [
        ("I\u00adX", "IX"),  # RFC 4013 part 3, examples 1 to 5
        ("user", "user"),
        ("USER", "USER"),
        ("\u00aa", "a"),
        ("\u2168", "IX"),
        ("a\u00a0b", "a b"),
        ("\uff50\uff41ss", "pass"),
        ("\u0627\u0628", "\u0627\u0628"),
        ("", ""),
    ],
)
def test_prepared(text: str, prepared: str) -> None:
    assert saslprep(text) == prepared
    assert saslprep(text, stored=True) == prepared


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("\u0007", "prohibited"),  # RFC 4013 part 3, examples 6 and 7
        ("\u06271", "right-to-left"),
        ("a\0b", "prohibited"),
        ("a\u0627", "both directions"),
        ("\u0627a\u0628", "both directions"),
        ("x\ue000", "prohibited"),
        ("x\ufdd0", "prohibited"),
        ("x\ufffd", "prohibited"),
        ("x\u2ff0", "prohibited"),
        ("x" + chr(0xD800), "prohibited"),
        ("x\u200e", "prohibited"),
        ("x\U000e0001", "prohibited"),
    ],
)
def test_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        saslprep(text)


def test_what_unicode_did_not_know_is_refused_only_where_it_is_kept() -> None:
    assert saslprep("a\u0221") == "a\u0221"
    with pytest.raises(ValueError, match=r"Unicode 3\.2"):
        saslprep("a\u0221", stored=True)


@given(st.text())
def test_any_text_is_refused_or_prepared_for_good(text: str) -> None:
    try:
        prepared = saslprep(text)
    except ValueError:
        return
    assert saslprep(prepared) == prepared
