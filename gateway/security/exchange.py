"""An authentication that takes several messages, whatever protocol carries them: MQTT's AUTH, AMQP's SASL frames."""

from __future__ import annotations

import abc
from typing import Protocol

import msgspec

from gateway.security.identity import Identity
from gateway.security.scram import Continue, Disproven, Proven, ScramServer
from gateway.security.turns import Busy


class Done(msgspec.Struct, frozen=True, gc=False):
    """The client is who it says."""

    identity: Identity  # who that is
    data: bytes  # the last word to it
    expires_ms: int | None = None  # wall clock, epoch milliseconds, until when that is proven; None: without an end


class Failed(msgspec.Struct, frozen=True, gc=False):
    """The client is refused; the reason is for the log, for it tells what was wrong."""

    reason: str  # see above
    busy: bool = False  # nothing was wrong: it was not looked at, and the client may come again


Step = Continue | Done | Failed


class Judge(Protocol):
    """`gateway.security.authentication.Authenticator`; a Protocol, because that module needs this one."""

    def check_busy(self, address: str) -> None:
        """Raise Busy where an exchange of this address is refused unchecked."""

    def accepted(self) -> None:
        """An exchange proved an identity."""

    async def wait_refused(self, address: str) -> None:
        """An exchange failed: count it, and wait until that may be told."""


class Exchange(abc.ABC):
    """One exchange, on one connection."""

    __slots__ = ("_address", "_judge", "_user")

    def __init__(self, judge: Judge, address: str, user: str | None) -> None:
        """`address` is what failures are counted for, `user` as of `Authenticator.exchange`."""
        self._judge = judge
        self._address = address
        self._user = user

    @abc.abstractmethod
    async def step(self, data: bytes | None) -> Step:
        """Take the client's next message, None where it began without one; a failure waits, by intention."""

    def _busy(self) -> Failed | None:
        """The refusal where nothing of this address is looked at now."""
        try:
            self._judge.check_busy(self._address)
        except Busy as busy:
            return Failed(str(busy), busy=True)
        return None


class ScramExchange(Exchange):
    """An exchange of SCRAM."""

    __slots__ = ("_server",)

    def __init__(self, server: ScramServer, judge: Judge, address: str, user: str | None) -> None:
        super().__init__(judge, address, user)
        self._server = server

    async def step(self, data: bytes | None) -> Step:
        """Take the client's next message; only a failure waits."""
        if (busy := self._busy()) is not None:
            return busy
        step = self._server.step(data)
        match step:
            case Continue():
                return step
            case Proven(user, answer) if self._user in (None, user):
                self._judge.accepted()
                return Done(Identity(user, "scram"), answer)
            case Proven():
                reason = "another user than before"
            case Disproven(reason):
                pass
        await self._judge.wait_refused(self._address)
        return Failed(reason)
