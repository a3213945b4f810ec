"""Admission: never more places than there are, never more than a client's share, and none is lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flowcontrol.admission import Admission, AdmissionError, Refusal

LIMIT, EACH = 7, 3
CLIENTS = st.sampled_from("abcd")


class Places(RuleBasedStateMachine):
    """Clients that enter and leave."""

    def __init__(self):
        super().__init__()
        self.places = Admission(LIMIT, EACH)
        self.inside = Counter()

    @rule(client=CLIENTS)
    def enter(self, client):
        before = self.places.active
        refusal = self.places.enter(client)
        if self.inside.total() == LIMIT:
            assert refusal is Refusal.FULL
        elif self.inside[client] == EACH:
            assert refusal is Refusal.GREEDY
        else:
            assert refusal is None
            self.inside[client] += 1
        assert self.places.active == before + (refusal is None)

    @rule(client=CLIENTS)
    def leave(self, client):
        if self.inside[client]:
            self.places.leave(client)
            self.inside[client] -= 1
        else:
            with pytest.raises(AdmissionError):
                self.places.leave(client)

    @invariant()
    def counts_are_exact(self):
        assert self.places.active == self.inside.total() <= LIMIT
        assert self.places.clients == len(+self.inside)


TestPlaces = Places.TestCase
TestPlaces.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("limits", [(0, 1), (1, 0)])
def test_there_is_a_place_at_least(limits):
    with pytest.raises(ValueError, match="positive"):
        Admission(*limits)
