"""What is reported to the audit trail: logins, refusals and administrative actions (ADR 0082).

The code that accepts or refuses a client calls `audit`, of which the process has one. The trail itself is an optional
part (`gateway.audit`); without a trail a call costs a check of `audit.enabled`.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import msgspec


class Where(msgspec.Struct, frozen=True):
    """The connection that a line is about."""

    protocol: str
    address: str = ""
    listener: str = ""
    client: str = ""


def where_of(protocol: str, socket: Any, client: str = "") -> Where:
    """Return the `Where` of a pump or an HTTP connection."""
    return Where(protocol, socket.peer, socket.entrance.name, client)


class Trail(Protocol):
    """Where the reports go."""

    def accepted(self, where: Where, principal: str, method: str) -> None:
        """Record a successful login."""

    def refused(self, where: Where, reason: str, *, name: str, busy: bool) -> None:
        """Record a refused login. `name` is the claimed name; `busy` means that the login was not checked."""

    def denied(self, where: Where, principal: str, what: str, on: str, reason: str) -> None:
        """Record that a logged-in client was refused an operation."""

    def act(self, where: Where, principal: str, what: str, on: str) -> None:
        """Record an administrative action. `principal` is "" for an action from this machine without a login."""


class Audit:
    """Passes reports to the trail while there is one."""

    def __init__(self) -> None:
        self.trail: Trail | None = None

    @property
    def enabled(self) -> bool:
        """Whether reports go anywhere."""
        return self.trail is not None

    def accepted(self, where: Where, principal: str, method: str) -> None:
        """Report a successful login."""
        if self.trail is not None:
            self.trail.accepted(where, principal, method)

    def refused(self, where: Where, reason: str, *, name: str = "", busy: bool = False) -> None:
        """Report a refused login."""
        if self.trail is not None:
            self.trail.refused(where, reason, name=name, busy=busy)

    def denied(self, where: Where, principal: str, what: str, on: str = "", reason: str = "") -> None:
        """Report that a logged-in client was refused an operation."""
        if self.trail is not None:
            self.trail.denied(where, principal, what, on, reason)

    def act(self, where: Where, principal: str, what: str, on: str = "") -> None:
        """Report an administrative action."""
        if self.trail is not None:
            self.trail.act(where, principal, what, on)


audit: Final = Audit()
"""The reports of this process."""
