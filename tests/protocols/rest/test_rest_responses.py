import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.rest.errors import RestError, invalid
from protocols.rest.responses import ErrorBody, Page, RecordHeader, RecordItem, Stored, encode_error, encode_results


def item(value: object, number: int = 0) -> RecordItem:
    return RecordItem("t", None, value, 0, number, 1700000000000)


def test_results_stand_in_order_with_errors_among_them() -> None:
    body = encode_results([Stored(1, 7), ErrorBody(404, "no such partition"), Stored(0, 8)])
    assert json.loads(body) == {
        "offsets": [
            {"partition": 1, "offset": 7},
            {"error_code": 404, "message": "no such partition"},
            {"partition": 0, "offset": 8},
        ]
    }


def test_one_result_and_no_result_have_the_same_shape() -> None:
    assert encode_results([Stored(2, 2**40)]) == b'{"offsets":[{"partition":2,"offset":1099511627776}]}'
    assert encode_results([ErrorBody(503, "x")]) == b'{"offsets":[{"error_code":503,"message":"x"}]}'
    assert encode_results([]) == b'{"offsets":[]}'


def test_an_error_has_validation_errors_only_when_there_are_some() -> None:
    assert json.loads(encode_error(RestError(404, "Not Found"))) == {"error_code": 404, "message": "Not Found"}
    assert json.loads(encode_error(invalid("here")))["validation_errors"] == ["here"]


def test_a_record_has_headers_only_when_there_are_some() -> None:
    page = Page(1000)
    page.add(item(msgspec.Raw(b'{"a":1.10}')))
    page.add(RecordItem("t", b"k", b"\x00", 1, 2, 3, (RecordHeader("h", b"v"), RecordHeader("h", None))))
    first, second = page.finish()[1:-1].split(b"},{", 1)
    assert first + b"}" == (
        b'{"topic":"t","key":null,"value":{"a":1.10},"partition":0,"offset":0,"timestamp":1700000000000}'
    )
    assert json.loads(b"{" + second) == {
        "topic": "t", "key": "aw==", "value": "AA==", "partition": 1, "offset": 2, "timestamp": 3,
        "headers": [{"key": "h", "value": "dg=="}, {"key": "h", "value": None}],
    }  # fmt: skip


@given(st.lists(st.integers(0, 300), max_size=20), st.integers(0, 1000))
def test_a_page_never_outgrows_its_limit_but_by_one_record_and_loses_none(sizes: list[int], limit: int) -> None:
    pending = [item("x" * size, number) for number, size in enumerate(sizes)]
    seen = []
    while pending:
        page = Page(limit)
        taken = 0
        for one in pending:
            if not page.add(one):
                break
            taken += 1
        body = page.finish()
        records = json.loads(body)
        assert len(records) == taken == page.count >= 1
        assert len(body) <= limit or taken == 1
        seen += [record["offset"] for record in records]
        del pending[:taken]
    assert seen == list(range(len(sizes)))


@given(st.lists(st.integers(0, 300), max_size=200), st.integers(0, 30_000), st.integers(0, 3))
def test_many_records_at_once_make_the_page_that_one_after_the_other_makes(
    sizes: list[int], limit: int, before: int
) -> None:
    items = [item("x" * size, number) for number, size in enumerate(sizes)]
    single, together = Page(limit), Page(limit)
    for one in items[:before]:
        assert single.add(one) == together.add(one)
    taken = 0
    for one in items[before:]:
        if not single.add(one):
            break
        taken += 1
    assert together.extend(items[before:]) == taken
    assert together.count == single.count
    assert together.finish() == single.finish()


def test_an_empty_page_is_an_empty_list() -> None:
    assert Page(10).finish() == b"[]"


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_the_smallest_limits_still_deliver(limit: int) -> None:
    page = Page(limit)
    assert page.add(item("a"))
    assert not page.add(item("b"))
