"""The counts of session records are those of the records, whatever is stored and removed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.kafka.contracts import Refused
from gateway.mqtt.state.counted_records import ENTRY_BYTES, CountedRecords, SessionLimits
from gateway.mqtt.state.records import SessionRecord, encode
from mapping.outcomes import Outcome

NAMES = st.sampled_from(["a", "b", "c", "dd"])
OWNERS = st.sampled_from(["ann", "bob"])
LIMITS = SessionLimits(sessions=3, size=4 * ENTRY_BYTES, sessions_per_principal=2, size_per_principal=3 * ENTRY_BYTES)


def record(principal: str, filler: int) -> bytes:
    return encode(SessionRecord("n" * filler, principal, 1))


@given(st.lists(st.tuples(NAMES, OWNERS, st.none() | st.integers(0, 900), st.booleans())))
def test_counts_and_limits(steps: list[tuple[str, str, int | None, bool]]) -> None:
    """`forced` is a record from the log, which is always taken."""
    records, model = CountedRecords(LIMITS), {}
    for client_id, principal, filler, forced in steps:
        if filler is None:
            assert records.pop(client_id, None) == model.pop(client_id, (None, ""))[0]
        else:
            value = record(principal, filler)
            if forced or allowed(model, client_id, principal, value):
                if not forced:
                    records.check(client_id, principal, value)
                records[client_id] = value
                model[client_id] = value, principal
            else:
                with pytest.raises(Refused) as refused:
                    records.check(client_id, principal, value)
                assert refused.value.outcome is Outcome.FULL
        assert dict(records) == {name: value for name, (value, _) in model.items()}
        assert records.size == size(model)


def size(model: dict[str, tuple[bytes, str]], principal: str | None = None) -> int:
    return sum(
        ENTRY_BYTES + len(name) + len(value) for name, (value, owner) in model.items() if principal in (None, owner)
    )


def allowed(model: dict[str, tuple[bytes, str]], client_id: str, principal: str, value: bytes) -> bool:
    if client_id in model and len(value) <= len(model[client_id][0]):
        return True
    after = {**model, client_id: (value, principal)}
    more = size(after) - size(model)
    new = client_id not in model
    of_principal = [owner for _, owner in model.values()].count(principal)
    return (
        len(after) <= LIMITS.sessions
        and size(after) <= LIMITS.size
        and of_principal + new <= LIMITS.sessions_per_principal
        and size(model, principal) + more <= LIMITS.size_per_principal
    )
