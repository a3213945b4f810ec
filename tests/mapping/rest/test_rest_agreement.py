"""Produce requests are validated while they are decoded, not against the contract's schemas: both must agree."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.rest.server.openapi_pages import load_contract
from mapping.record import LAST_MILLISECOND
from mapping.rest.incoming import to_records
from protocols.rest.contract import check_body
from protocols.rest.errors import RestError
from protocols.rest.media import RECORD_TYPES, Format

OPERATIONS = load_contract().operations

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
BASE64 = st.text("ABCabc012+/=", max_size=9)
TEXT = st.none() | st.text(max_size=8) | BASE64 | JSON
NUMBER = st.none() | st.integers() | st.integers(0, 3) | st.sampled_from([1.0, 1.5, 2**31 - 1, 2**31, 2**63, -1]) | JSON
HEADER = st.fixed_dictionaries({"key": st.text(max_size=4), "value": st.none() | BASE64 | st.text(max_size=4)}) | JSON


def mostly(fields: dict[str, st.SearchStrategy[Any]], *names: str) -> st.SearchStrategy[dict[str, Any]]:
    """An object with any of the fields, and perhaps one that is unknown."""
    return st.fixed_dictionaries({}, optional={**fields, **dict.fromkeys(names, JSON)})


RECORD = mostly(
    {"key": TEXT, "value": TEXT, "partition": NUMBER, "timestamp": NUMBER, "headers": st.lists(HEADER, max_size=2)}
)
GOOD = st.fixed_dictionaries({"value": TEXT}, optional={"key": TEXT, "timestamp": st.none() | st.integers(0, 2**41)})
BODY = (
    st.fixed_dictionaries({"records": st.lists(GOOD | RECORD, max_size=3)}) | mostly({"records": JSON}, "other") | JSON
)


def verdict(check: Any) -> int:
    try:
        check()
    except RestError as error:
        return error.status
    return 200


@pytest.mark.parametrize("embedded", Format)
@pytest.mark.parametrize(("operation", "partition"), [("send", None), ("sendToPartition", 1)])
@settings(max_examples=120, deadline=None)
@given(body=BODY)
@example({"records": [{"value": None, "timestamp": LAST_MILLISECOND}]})
@example({"records": [{"value": None, "timestamp": LAST_MILLISECOND + 1}]})
def test_the_fast_checks_and_the_contract_agree(
    embedded: Format, operation: str, partition: int | None, body: Any
) -> None:
    declared = OPERATIONS[operation].body
    assert declared is not None
    text = json.dumps(body).encode()

    def read() -> None:
        to_records(text, embedded, topic="t", partition=partition, limit=100, principal="x")

    contract = verdict(lambda: check_body(declared.media[RECORD_TYPES[embedded]], text))
    fast = verdict(read)
    assert (fast == 200) == (contract == 200)
    # With several faults they may name different ones; with a single one they agree.
    assert fast == contract or {fast, contract} == {400, 422}
