"""Authentication over several messages, independent of their transport: MQTT's AUTH or AMQP's SASL frames."""

from __future__ import annotations

import abc
from typing import Protocol

import msgspec

from gateway.security.fair_queue import Busy
from gateway.security.identity import Identity
from gateway.security.scram import Continue, Disproven, Proven, ScramServer


class Done(msgspec.Struct, frozen=True, gc=False):
    """The client has authenticated."""

    identity: Identity  # the authenticated client
    data: bytes  # the last message to the client
    expires_ms: int | None = None  # wall clock, epoch milliseconds; None: never


class Failed(msgspec.Struct, frozen=True, gc=False):
    """The client is refused. The reason is only for the log, because it says what was wrong."""

    reason: str  # for the log
    busy: bool = False  # not checked; the client may try again


Step = Continue | Done | Failed


class LoginGuard(Protocol):
    """The part of `Authenticator` that exchanges use; a Protocol because `authentication` imports this module."""

    def check_busy(self, address: str) -> None:
        """Raise Busy if logins from this address are not checked now."""

    def accepted(self) -> None:
        """Count a successful exchange."""

    async def wait_refused(self, address: str) -> None:
        """Count a failed exchange and wait until it may be answered."""


class Exchange(abc.ABC):
    """One exchange on one connection."""

    __slots__ = ("_address", "_guard", "_user")

    def __init__(self, guard: LoginGuard, address: str, user: str | None) -> None:
        """Failures are counted for `address`; `user` is as for `Authenticator.exchange`."""
        self._guard = guard
        self._address = address
        self._user = user

    @abc.abstractmethod
    async def step(self, data: bytes | None) -> Step:
        """Process the client's next message; None if it sent no initial response. A failure is delayed on purpose."""

    def _busy(self) -> Failed | None:
        """Return the refusal if logins from this address are not checked now."""
        try:
            self._guard.check_busy(self._address)
        except Busy as busy:
            return Failed(str(busy), busy=True)
        return None


class ScramExchange(Exchange):
    """A SCRAM exchange."""

    __slots__ = ("_server",)

    def __init__(self, server: ScramServer, guard: LoginGuard, address: str, user: str | None) -> None:
        super().__init__(guard, address, user)
        self._server = server

    async def step(self, data: bytes | None) -> Step:
        """Process the client's next message. Only a failure is delayed."""
        if (busy := self._busy()) is not None:
            return busy
        step = self._server.step(data)
        match step:
            case Continue():
                return step
            case Proven(user, answer) if self._user in (None, user):
                self._guard.accepted()
                return Done(Identity(user, "scram"), answer)
            case Proven():
                reason = "the user has changed"
            case Disproven(reason):
                pass
        await self._guard.wait_refused(self._address)
        return Failed(reason)
