"""What the sans-io connections of event streams and of live WebSockets share: the bytes that wait to be written."""

from __future__ import annotations


class StreamConnection:
    """The part of a `protocols.connection.Connection` that writes, with a heartbeat; the other part reads.

    Attributes:
        waiting: bytes that wait for `data_to_send`.
        closing: whether the end was sent, or the socket is closed or given up.
    """

    def __init__(self, heartbeat_s: float) -> None:
        self.waiting = 0
        self.closing = False
        self._out: list[bytes] = []
        self._heartbeat_s = heartbeat_s
        self._next_heartbeat: float | None = None

    def data_to_send(self) -> bytes:
        """Return and remove the bytes to write; b"" when there are none."""
        out = self._out
        if not out:
            return b""
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        self.waiting = 0
        return data

    def next_deadline(self) -> float | None:
        """Return when `tick` must be called, in seconds of its clock, or None."""
        return None if self.closing else self._next_heartbeat

    def _write(self, data: bytes) -> None:
        self._out.append(data)
        self.waiting += len(data)
