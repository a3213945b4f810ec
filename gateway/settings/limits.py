"""How much clients may have, send and be sent a second."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from gateway.settings.values import Section

Per = Literal["connection", "principal", "tenant", "listener"]
Messages = Annotated[float, Field(ge=0, le=1e9)]
Bytes = Annotated[float, Field(ge=0, le=1e12)]


class LimitRule(Section):
    """One `[[limits.rules]]` entry: for whom it is, what they share, and how much that is; 0: any."""

    per: Per
    """what has the limit to itself: each `connection`, each `principal` on all its connections (each address of
    anonymous clients is one), each `tenant`, or each `listener`"""
    principal: Annotated[str, Field(min_length=1)] = "*"
    """whom it is for, as in the access list: a name, `group:NAME`, `anonymous`, or `*` for everybody"""
    tenant: Annotated[str, Field(min_length=1)] | None = None
    """only clients of this tenant"""
    listener: Annotated[str, Field(min_length=1)] | None = None
    """only clients that came to this listener, by its name in `[[listeners]]`; without these it is `mqtt`, `amqp`,
    `http`, `mqtt_websocket` or `amqp_websocket`"""
    connections: Annotated[int, Field(ge=0)] = 0
    """connections at a time that have logged in"""
    connects_per_s: Annotated[float, Field(ge=0, le=1e6)] = 0
    """logins a second that begin a connection"""
    in_messages_per_s: Messages = 0
    """messages that they publish"""
    in_bytes_per_s: Bytes = 0
    """bytes that they publish: payloads of MQTT, messages of AMQP, bodies of HTTP"""
    out_messages_per_s: Messages = 0
    """messages that they are sent"""
    out_bytes_per_s: Bytes = 0
    """bytes of them, likewise"""
    disconnect: bool = False
    """an MQTT client that publishes more is sent away with DISCONNECT 0x96 (5.0; others are cut off), and not made to
    wait"""

    @model_validator(mode="after")
    def _makes_sense(self) -> LimitRule:
        if self.per == "connection" and (self.connections or self.connects_per_s):
            raise ValueError("connections and connects_per_s cannot be per connection: it is one")
        if self.disconnect and self.per not in {"connection", "principal"}:
            raise ValueError(f"disconnect cannot be per {self.per}: it would meet who did not send too much")
        if self.disconnect and not (self.in_messages_per_s or self.in_bytes_per_s):
            raise ValueError("disconnect needs in_messages_per_s or in_bytes_per_s")
        return self

    def covers(self, other: LimitRule) -> bool:
        """Whether it is for everybody whom `other` is for, so that a later `other` would never hold."""
        return (
            self.per == other.per
            and self.principal in {"*", other.principal}
            and self.tenant in {None, other.tenant}
            and self.listener in {None, other.listener}
        )


class LimitsConfig(Section):
    """How much clients may have, send and be sent. Who has more waits, and loses nothing that was to be kept."""

    # None: the budgets share fairly what there is. A limit is for whoever shall have less than there is.
    rules: tuple[LimitRule, ...] = ()
    """for whom there are which limits; see [below](#limits-of-clients)"""
    burst_s: Annotated[float, Field(gt=0, le=3600)] = 1.0
    """who has sent or received nothing for a while may do at once what comes in so many seconds"""

    @model_validator(mode="after")
    def _reached(self) -> LimitsConfig:
        for number, rule in enumerate(self.rules):
            for before, earlier in enumerate(self.rules[:number]):
                if earlier.covers(rule):
                    raise ValueError(f"rules.{number} is never reached: rules.{before} is for all of its clients")
        return self
