"""The records of shared subscriptions in memory: where each of them, a group with one of its filters, began."""

from __future__ import annotations

from collections import Counter
from typing import Final

from gateway.mqtt.state.records import ShareRecord, decode, encode

SHARES: Final = 200_000
"""How many are remembered in all, at some 200 bytes each."""
SHARES_OF_GROUP: Final = 1000
END: Final = "\0"  # between group and filter; no MQTT string contains it


class ShareTable:
    """Records by name (group, `END`, filter)."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self._counts: Counter[str] = Counter()  # by group

    def apply(self, name: str, value: bytes | None) -> None:
        """Set a record; None deletes it."""
        group = name.partition(END)[0]
        if value is not None:
            self._counts[group] += name not in self.records
            self.records[name] = value
        elif self.records.pop(name, None) is not None:
            self._counts[group] -= 1
            if not self._counts[group]:
                del self._counts[group]

    def find(self, name: str) -> ShareRecord | None:
        """Return the record of a subscription."""
        return decode(ShareRecord, self.records.get(name))

    def knows(self, group: str) -> bool:
        """Whether the group has a record: then all of its filters have one."""
        return group in self._counts

    def add(self, name: str, record: ShareRecord) -> bool:
        """Add a record; return False if there are too many."""
        if len(self.records) >= SHARES or self._counts[name.partition(END)[0]] >= SHARES_OF_GROUP:
            return False
        self.apply(name, encode(record))
        return True

    def of_group(self, group: str) -> list[str]:
        """Return the names of a group's subscriptions."""
        return [name for name in self.records if name.startswith(group + END)] if group in self._counts else []
