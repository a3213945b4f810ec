"""Finds tests for which pytest-asyncio would make another event loop, which ends all async fixtures of the session."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import pytest
from pytest_asyncio.plugin import is_async_test


def check(items: Iterable[pytest.Item]) -> None:
    """Raise pytest.UsageError for a synchronous test with an async fixture."""
    for item in items:
        if isinstance(item, pytest.Function) and not is_async_test(item) and (found := _async_fixtures(item)):
            raise pytest.UsageError(f"{item.nodeid} uses the async {', '.join(found)}: make it async too")


def _async_fixtures(item: pytest.Function) -> list[str]:
    return [
        name
        for name, (*_, definition) in item._fixtureinfo.name2fixturedefs.items()
        if inspect.iscoroutinefunction(definition.func) or inspect.isasyncgenfunction(definition.func)
    ]
