"""A bounded memory: what was stored last is kept."""

from __future__ import annotations

import collections
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(collections.OrderedDict[Key, Value]):
    """Keeps the last `most` entries, in the order in which they were stored last."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)
