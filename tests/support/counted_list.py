"""A list that counts how many of its elements were taken, by position or by iteration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class CountedList(list[Any]):
    """`taken` counts an element each time it is taken."""

    taken = 0

    def __getitem__(self, position: Any) -> Any:
        self.taken += 1
        return super().__getitem__(position)

    def __iter__(self) -> Iterator[Any]:
        for element in super().__iter__():
            self.taken += 1
            yield element
