"""What a feed keeps of its latest record: bounded, however many names clients give their subscriptions."""

import weakref

import pytest

from gateway.rest.live.live_subscription import live_form
from gateway.rest.streams.feeds import SHARED_BYTES, SHARED_FORMS, Feed
from mapping.record import Received
from mapping.tenants import Names
from protocols.rest.media import Format


@pytest.mark.parametrize(("size", "kept"), [(10, SHARED_FORMS), (SHARED_BYTES, 1)])
def test_the_forms_of_the_latest_record_are_bounded(size: int, kept: int) -> None:
    feed = Feed("t")
    feed.select([Received("t", None, b'"%b"' % (b"x" * size), (), 0, 0, 0)], 0)
    make = live_form.__wrapped__  # without its own cache
    forms = [make(Format.JSON, f"name {number}", Names()) for number in range(SHARED_FORMS + 20)]
    sent = [feed.encoded(form) for form in forms]
    assert [feed.encoded(form) for form in forms] == sent
    assert feed.encoded(forms[0]) is sent[0]
    left = [weakref.ref(form) for form in forms]
    del forms
    assert sum(one() is not None for one in left) == kept
