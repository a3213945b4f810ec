"""Settings of the limits of clients."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from gateway.settings.values import Section

Per = Literal["connection", "principal", "tenant", "listener"]
Messages = Annotated[float, Field(ge=0, le=1e9)]
Bytes = Annotated[float, Field(ge=0, le=1e12)]


class LimitRule(Section):
    """One `[[limits.rules]]` entry: which clients it applies to, what shares it, and the limits; 0 means no limit."""

    per: Per
    """what the limits are counted for: each `connection`, each `principal` over all its connections (anonymous clients
    count by address), each `tenant`, or each `listener`"""
    principal: Annotated[str, Field(min_length=1)] = "*"
    """which clients the rule applies to, as in the access list: a name, `group:NAME`, `anonymous`, or `*` for all"""
    tenant: Annotated[str, Field(min_length=1)] | None = None
    """only clients of this tenant"""
    listener: Annotated[str, Field(min_length=1)] | None = None
    """only clients of the listener with this name, as in `[[listeners]]`; without those the names are `mqtt`, `amqp`,
    `http`, `mqtt_websocket` and `amqp_websocket`"""
    connections: Annotated[int, Field(ge=0)] = 0
    """concurrent connections that have logged in"""
    connects_per_s: Annotated[float, Field(ge=0, le=1e6)] = 0
    """logins of new connections per second"""
    in_messages_per_s: Messages = 0
    """messages per second from the clients"""
    in_bytes_per_s: Bytes = 0
    """bytes per second from the clients: MQTT payloads, AMQP messages, HTTP bodies"""
    out_messages_per_s: Messages = 0
    """messages per second to the clients"""
    out_bytes_per_s: Bytes = 0
    """bytes per second to the clients, counted in the same way"""
    disconnect: bool = False
    """disconnect an MQTT client that publishes more, instead of making it wait: with DISCONNECT 0x96 (MQTT 5; older
    clients are disconnected without a reason)"""

    @model_validator(mode="after")
    def _makes_sense(self) -> LimitRule:
        if self.per == "connection" and (self.connections or self.connects_per_s):
            raise ValueError("connections and connects_per_s cannot be per connection: that is always one")
        if self.disconnect and self.per not in {"connection", "principal"}:
            raise ValueError(
                f"disconnect cannot be per {self.per}: it would disconnect clients that did not exceed the limit"
            )
        if self.disconnect and not (self.in_messages_per_s or self.in_bytes_per_s):
            raise ValueError("disconnect needs in_messages_per_s or in_bytes_per_s")
        return self

    def covers(self, other: LimitRule) -> bool:
        """Return whether the rule applies to every client of `other`, so that a later `other` would never apply."""
        return (
            self.per == other.per
            and self.principal in {"*", other.principal}
            and self.tenant in {None, other.tenant}
            and self.listener in {None, other.listener}
        )


class LimitsConfig(Section):
    """Limits of clients. A client above its rate waits; no message that must be kept is lost."""

    # Empty by default: the budgets share the capacity fairly. A limit gives a client less than its fair share.
    rules: tuple[LimitRule, ...] = ()
    """the limits and the clients that they apply to; see [below](#limits-of-clients)"""
    burst_s: Annotated[float, Field(gt=0, le=3600)] = 1.0
    """size of a burst, in seconds of the rate: what a client may send or receive at once after being idle"""

    @model_validator(mode="after")
    def _reached(self) -> LimitsConfig:
        for number, rule in enumerate(self.rules, 1):
            for before, earlier in enumerate(self.rules[: number - 1], 1):
                if earlier.covers(rule):
                    raise ValueError(f"rules[{number}] is never reached: rules[{before}] applies to all of its clients")
        return self
