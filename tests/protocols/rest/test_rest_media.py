import pytest

from protocols.rest.errors import RestError
from protocols.rest.media import (
    CONTROL_TYPE,
    PLAIN_JSON_TYPE,
    RECORD_TYPES,
    Format,
    accepts,
    body_type,
    preferred,
    produce_format,
)

JSON_TYPE = RECORD_TYPES[Format.JSON]


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        ("application/vnd.kafka.json.v2+json", Format.JSON),
        ("application/vnd.kafka.binary.v2+json", Format.BINARY),
        ("application/vnd.kafka.text.v2+json", Format.TEXT),
        ("application/json", Format.JSON),
        ("Application/VND.kafka.JSON.v2+json", Format.JSON),
        ("application/vnd.kafka.json.v2+json; charset=UTF-8", Format.JSON),
        ('application/vnd.kafka.text.v2+json;charset="utf-8"', Format.TEXT),
    ],
)
def test_the_content_type_says_how_records_are_embedded(content_type: str, expected: Format) -> None:
    assert produce_format(content_type) is expected


@pytest.mark.parametrize(
    "content_type",
    [None, "", "text/plain", CONTROL_TYPE, "application/vnd.kafka.avro.v2+json", "application/json; charset=latin1"],
)
def test_any_other_content_type_is_a_400_that_names_the_right_ones(content_type: str | None) -> None:
    with pytest.raises(RestError) as caught:
        produce_format(content_type)
    assert caught.value.status == 400
    assert "The format of the request body is not supported" in caught.value.message
    assert JSON_TYPE in caught.value.message


def test_a_body_is_of_a_type_that_its_operation_takes() -> None:
    known = (CONTROL_TYPE, PLAIN_JSON_TYPE)
    assert body_type(CONTROL_TYPE, known) == CONTROL_TYPE
    assert body_type("application/json; charset=utf-8", known) == PLAIN_JSON_TYPE
    for wrong in (None, JSON_TYPE, "application/x-www-form-urlencoded"):
        with pytest.raises(RestError, match="not supported"):
            body_type(wrong, known)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, "a/b"),
        ("*/*", "a/b"),
        ("c/d", "c/d"),
        ("a/b;q=0.1, c/*;q=0.5", "c/d"),
        ("c/d, a/b", "a/b"),  # for equal weights our order decides
        ("a/b;q=0, */*", "c/d"),
        ("x/y", None),
    ],
)
def test_the_heaviest_of_the_offered_types_is_answered(accept: str | None, expected: str | None) -> None:
    assert preferred(accept, ("a/b", "c/d")) == expected


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, True),
        ("*/*", True),
        (JSON_TYPE, True),
        ("application/*", True),
        ("text/html, application/vnd.kafka.json.v2+json;q=0.2", True),
        ("text/html", False),
        (RECORD_TYPES[Format.BINARY], False),
        ("application/vnd.kafka.json.v2+json;q=0, */*", False),  # the most specific range decides
        ("application/*;q=0, */*;q=1", False),
        ("*/*;q=0", False),
        ("*/*;q=0, application/vnd.kafka.json.v2+json", True),
        ("application/vnd.kafka.json.v2+json;q=nonsense", True),
        ("", False),
        (",;,q=", False),
    ],
)
def test_accept_is_weighed_by_the_most_specific_range(accept: str | None, expected: bool) -> None:
    assert accepts(accept, JSON_TYPE) is expected
