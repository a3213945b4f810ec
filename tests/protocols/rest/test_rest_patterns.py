import time

import pytest

from protocols.rest.consuming import TopicPattern
from protocols.rest.errors import RestError


@pytest.mark.parametrize(
    ("pattern", "fits", "does_not"),
    [
        ("a.*", ["a", "a.b"], ["ba", ""]),
        ("a|b", ["a", "b"], ["ab"]),
        ("sensors[.]\\d+", ["sensors.1"], ["sensors.x", "xsensors.1"]),
        ("", [""], ["a"]),
    ],
)
def test_a_pattern_matches_complete_names(pattern: str, fits: list[str], does_not: list[str]) -> None:
    compiled = TopicPattern(pattern)
    assert all(compiled.matches(name) for name in fits)
    assert not any(compiled.matches(name) for name in does_not)


@pytest.mark.parametrize("pattern", ["[", "(?=a)b", r"(a)\1", "a{1000}{1000}{1000}", "*"])
def test_an_unsupported_expression_is_a_422(pattern: str) -> None:
    with pytest.raises(RestError) as caught:
        TopicPattern(pattern)
    assert caught.value.status == 422


def test_no_pattern_takes_more_than_linear_time() -> None:
    began = time.thread_time()
    assert not TopicPattern("(a|a)*(a+)+b").matches("a" * 249)  # backtracking would never end
    assert time.thread_time() - began < 5
