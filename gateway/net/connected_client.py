"""The client behind a pump in one form for all protocols: for operators, limits on clients, and draining."""

from __future__ import annotations

import abc
import time
from collections.abc import Awaitable
from typing import Any, ClassVar

from flowcontrol.budget import ConnectionBudget
from gateway.limits.limits import ClientLimits, Limits
from gateway.limits.rate_pauses import SendingPause
from gateway.net.pump import Pump
from gateway.security.identity import Identity, share_of
from gateway.security.throttle import address_of
from gateway.views.clients import ClientView, Kind, ProtocolName, SubscriptionView
from gateway.views.flow import ConnectionFlow, FlowWindow, shown, subject
from gateway.views.pauses import PROCESS, PROCESS_BUDGET, pauses


class ConnectedClient(abc.ABC):
    """A pump's handler, which operators list, inspect and close, and which a stopping gateway drains.

    It implements `clients.Connected`, `flow.Flowing` and `drain.Departing` of `gateway.views`.
    """

    __slots__ = ("budget", "client_id", "identity", "limits", "principal", "pump", "sending")

    protocol: ClassVar[ProtocolName]
    kind: ClassVar[Kind] = "connection"
    pump: Pump  # from `connected` on

    def __init__(self) -> None:
        self.client_id = ""  # MQTT's client id, or AMQP's container-id, from the login on; HTTP has none
        self.identity: Identity | None = None  # None before the login
        self.principal: str | None = None  # the authenticated name; None before the login
        self.budget: ConnectionBudget | None = None  # counts what is in flight to Kafka; None: not counted
        self.limits: ClientLimits | None = None  # None before the login and if no limits apply
        self.sending: SendingPause | None = None  # the rate limit of messages to the client; None: unlimited

    # the pump's handler

    def connected(self, pump: Pump) -> None:
        """Remember the pump of the open socket."""
        self.pump = pump

    @abc.abstractmethod
    def handle(self, events: list[Any]) -> Awaitable[None] | None:
        """Act on events in order; the awaitable holds back those behind them."""

    @abc.abstractmethod
    def writable(self) -> None:
        """Go on sending: the socket has capacity again."""

    @abc.abstractmethod
    def disconnected(self, reason: str) -> None:
        """Release everything: the socket is closed."""

    # limits

    @property
    def share(self) -> str:
        """What the client is counted by in limits that clients share; see `share_of`."""
        assert self.identity is not None
        return share_of(self.identity, address_of(self.pump.peer))

    @property
    def can_send(self) -> bool:
        """Whether the socket's buffer is below its mark, and no rate limit delays sending."""
        return self.pump.writable and (self.sending is None or not self.sending.must_wait())

    def enter_limits(self, limits: Limits, identity: Identity, former: ClientLimits | None = None) -> None:
        """Count the connection for the limits; see `Limits.enter`, which raises LimitExceeded."""
        self.limits = limits.enter(identity, address_of(self.pump.peer), self.pump.entrance.name, former)

    def limit_sending(self) -> None:
        """Apply the rate limits to messages to the client."""
        if self.limits is not None and self.limits.outgoing is not None:
            self.sending = SendingPause(self.limits.outgoing, self.subject, self.writable)

    def leave_limits(self) -> None:
        """Stop counting the connection for the limits; later calls do nothing."""
        if self.sending is not None:
            self.sending.end()
            self.sending = None
        if self.limits is not None:
            self.limits.leave()

    # for operators

    @property
    @abc.abstractmethod
    def identifier(self) -> str:
        """The client's id in `gateway.views.clients`; "" before the login and after `kick`."""

    @property
    def subject(self) -> str:
        """The name of the connection in reports of pauses."""
        return subject(self.protocol, self.client_id or self.principal or "", self.pump.peer)

    @property
    def socket(self) -> Pump:
        """The pump, for a trace."""
        return self.pump

    @property
    def load(self) -> int:
        """Bytes in flight to Kafka."""
        return 0 if self.budget is None else self.budget.bytes

    @property
    def protocol_version(self) -> str:
        """The version of the protocol to show; "" if there is only one."""
        return ""

    @abc.abstractmethod
    def windows(self) -> tuple[list[FlowWindow], int]:
        """Return the windows with the most in flight, and the number of all."""

    @abc.abstractmethod
    def subscriptions(self) -> tuple[list[SubscriptionView], int]:
        """Return the subscriptions to show, at most `SUBSCRIPTIONS`, and the number of all."""

    @abc.abstractmethod
    def kick(self) -> None:
        """Close the connection with the protocol's reason for an administrative action."""

    def flow(self) -> ConnectionFlow | None:
        """Return what is granted, in flight and paused; None before the login."""
        if self.principal is None:
            return None
        pump, budget = self.pump, self.budget
        windows, total = self.windows()
        shared = pauses.since(PROCESS_BUDGET, PROCESS) if pump.is_paused_for(PROCESS_BUDGET) else None
        flow = ConnectionFlow(
            protocol=self.protocol,
            client=shown(self.client_id),
            peer=pump.peer,
            principal=shown(self.principal),
            subject=self.subject,
            unwritten=pump.unwritten,
            windows=windows,
            windows_total=total,
            paused=[] if shared is None else [shared],
        )
        if budget is not None:
            flow.bytes, flow.bytes_limit, flow.records = budget.bytes, budget.bytes_limit, budget.records
        return flow

    def view(self, *, whole: bool) -> ClientView:
        """Return the entry of the list of clients; `whole` adds the details that the list does not show."""
        view = ClientView(
            id=self.identifier,
            protocol=self.protocol,
            kind=self.kind,
            principal=self.principal or "",
            address=self.pump.peer,
            since=time.time() - self.pump.age_s,
        )
        if whole:
            view.version = self.protocol_version
            view.flow = self.flow()
            view.subscriptions, view.subscriptions_total = self.subscriptions()
        return view

    # draining

    @property
    def left(self) -> bool:
        """Whether the socket is closed, or about to be."""
        return self.pump.closed or self.pump.connection.closing

    @abc.abstractmethod
    def prepare_to_leave(self) -> bool:
        """Accept no more messages from the client; see `gateway.views.drain.Departing`."""

    @property
    @abc.abstractmethod
    def may_leave(self) -> bool:
        """Whether Kafka has answered all of the client's messages."""

    @abc.abstractmethod
    def leave(self) -> None:
        """Close the connection with the protocol's message that the gateway stops."""
