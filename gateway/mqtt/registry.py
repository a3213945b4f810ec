"""Which session holds which client id in this process [MQTT-3.1.4-3]."""

from __future__ import annotations

from typing import Protocol


class Holder(Protocol):
    """A session that holds a client id."""

    def taken_over(self) -> None:
        """Another connection uses the client id now: say so (0x8E) and close."""
        ...


class Registry:
    """Client ids in use. One process; across processes the session's record decides (a later step)."""

    def __init__(self) -> None:
        self._holders: dict[str, Holder] = {}
        self.takeovers = 0

    def __len__(self) -> int:
        return len(self._holders)

    def claim(self, client_id: str, holder: Holder) -> None:
        """Give the client id to `holder`; a former holder is told first, so that it leaves no trace after."""
        former = self._holders.get(client_id)
        self._holders[client_id] = holder
        if former is not None:
            self.takeovers += 1
            former.taken_over()

    def release(self, client_id: str, holder: Holder) -> None:
        """`holder` is gone; nothing happens when the id has another holder by now."""
        if self._holders.get(client_id) is holder:
            del self._holders[client_id]
