"""Transfers with a foreign message-format are found wherever the stream of frames is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.amqp import _native
from protocols.amqp.formats import START, State
from tests.reference import amqp_formats
from tests.support.amqp_frames import DATA, Frames

FORMS = (_native, amqp_formats)
AZURE = 0x80013700


def transfer(format_: bytes, tag: bytes = b"t", payload: bytes = DATA, handle: bytes = b"\x43") -> bytes:
    """A frame with a transfer; the format is encoded already."""
    items = (handle, Frames.uint(7), b"\xa0" + bytes((len(tag),)) + tag, format_)
    return Frames.frame(Frames.performative(amqp_formats.TRANSFER, *items) + payload)


uints = st.one_of(
    st.just((0, b"\x43")),
    st.just((0, b"\x40")),
    st.integers(0, 255).map(lambda value: (value, bytes((0x52, value)))),
    st.integers(0, (1 << 32) - 1).map(lambda value: (value, Frames.uint(value))),
)
frames = st.one_of(
    st.tuples(uints, st.binary(max_size=32), st.binary(max_size=200)).map(
        lambda made: (made[0][0], transfer(made[0][1], made[1], made[2]))
    ),
    st.binary(max_size=120).map(lambda body: (None, Frames.frame(body))),
    st.just((0, b"\0\0\0\x08\2\0\0\0")),
)


@given(st.lists(frames, max_size=6), st.lists(st.integers(0, 600), max_size=6))
def test_formats_are_found_wherever_the_stream_is_cut(made: list[tuple[int | None, bytes]], cuts: list[int]) -> None:
    stream = Frames.HEADER + b"".join(frame for _, frame in made)
    places, at = [], len(Frames.HEADER)
    for format_, frame in made:
        at += len(frame)
        if format_:
            places.append((at, format_))
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    for form in FORMS:
        state: State = START
        found = []
        for begin, end in itertools.pairwise(edges):
            state, foreign = form.scan(stream[begin:end], state)
            for first, behind, format_ in foreign or ():
                assert 0 <= first < behind <= end - begin
                found.append((begin + behind, format_))
        if all(format_ is not None for format_, _ in made):
            assert found == places


@given(st.lists(st.one_of(st.binary(max_size=150), frames.map(lambda made: made[1])), max_size=6))
def test_both_forms_read_any_bytes_alike(parts: list[bytes]) -> None:
    states = [START, START]
    for part in parts:
        (one, found_one), (two, found_two) = (form.scan(part, state) for form, state in zip(FORMS, states, strict=True))
        assert (one, found_one) == (two, found_two)
        states = [one, two]


@pytest.mark.parametrize("form", FORMS)
def test_byte_by_byte(form: object) -> None:
    stream = Frames.HEADER + transfer(b"\x43") + transfer(Frames.uint(AZURE)) + transfer(b"\x40")
    state: State = START
    found = []
    for place in range(len(stream)):
        state, foreign = form.scan(stream[place : place + 1], state)  # type: ignore[attr-defined]
        found += [(place, *entry) for entry in foreign or ()]
    end = len(stream) - len(transfer(b"\x40")) - 1
    assert found == [(end, 0, 1, AZURE)]
