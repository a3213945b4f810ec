"""An assertion that the product contains is not lost."""

from __future__ import annotations

from gateway.runtime.failures import failures
from tests.support import contained


def test_a_contained_assertion_is_told_once_and_other_errors_are_not() -> None:
    for error in (RuntimeError("of a broken subscriber"), AssertionError("of the test")):
        try:
            raise error
        except Exception as caught:
            failures.report("deliveries", caught)
    assert contained.take() is error
    assert contained.take() is None
