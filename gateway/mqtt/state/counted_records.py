"""The session records of all gateways in memory, counted in all and by principal, and the limits of new ones."""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.kafka.contracts import Refused
from mapping.outcomes import Outcome

UNLIMITED: Final = 1 << 62
ENTRY_BYTES: Final = 500
"""Bytes counted for a session in addition to its client id and record."""


class SessionLimits(msgspec.Struct, frozen=True):
    """How many sessions may be stored, and the bytes that they may take in memory."""

    sessions: int = UNLIMITED
    size: int = UNLIMITED
    sessions_per_principal: int = UNLIMITED
    size_per_principal: int = UNLIMITED


class _HeldRecord(msgspec.Struct, gc=False):
    """What one principal has."""

    sessions: int = 0
    size: int = 0


class _Head(msgspec.Struct):
    """The field of a session record that says whose it is."""

    principal: str


class CountedRecords(dict[str, bytes]):
    """Session records by client id. Everything that is stored is taken; `check` is for what a client asks for.

    Invariant: `size` and the principals' numbers are those of the entries.
    """

    def __init__(self, limits: SessionLimits) -> None:
        super().__init__()
        self.size = 0  # bytes of all
        self.refused = 0
        self._limits = limits
        self._principals: dict[str, _HeldRecord] = {}
        self._principal = msgspec.json.Decoder(_Head)

    def __setitem__(self, client_id: str, value: bytes) -> None:
        self.pop(client_id, None)
        super().__setitem__(client_id, value)
        size = _size(client_id, value)
        self.size += size
        held = self._principals.setdefault(self._principal.decode(value).principal, _HeldRecord())
        held.sessions += 1
        held.size += size

    def pop(self, client_id: str, default: bytes | None = None) -> bytes | None:  # type: ignore[override]
        """Remove an entry."""
        value = super().pop(client_id, None)
        if value is None:
            return default
        size, principal = _size(client_id, value), self._principal.decode(value).principal
        self.size -= size
        held = self._principals[principal]
        held.sessions -= 1
        held.size -= size
        if not held.sessions:
            del self._principals[principal]
        return value

    def check(self, client_id: str, principal: str, value: bytes) -> None:
        """Check that a client may store this record. One that is not larger than the stored one always may be.

        Raises:
            Refused: FULL, with the limit.
        """
        known = self.get(client_id)
        more = _size(client_id, value) - (0 if known is None else _size(client_id, known))
        if known is not None and more <= 0:
            return
        limits, held = self._limits, self._principals.get(principal) or _HeldRecord()
        new = known is None
        if len(self) + new > limits.sessions:
            self._refuse("sessions are stored (mqtt.max_sessions)")
        if self.size + more > limits.size:
            self._refuse("bytes of sessions are stored (mqtt.max_session_bytes)")
        if held.sessions + new > limits.sessions_per_principal:
            self._refuse("sessions of this principal are stored (mqtt.max_sessions_per_principal)")
        if held.size + more > limits.size_per_principal:
            self._refuse("bytes of this principal's sessions are stored (mqtt.max_session_bytes_per_principal)")

    def _refuse(self, what: str) -> None:
        self.refused += 1
        raise Refused(Outcome.FULL, f"too many {what}")


def _size(client_id: str, value: bytes) -> int:
    return ENTRY_BYTES + len(client_id) + len(value)
