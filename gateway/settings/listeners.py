"""One listener: where it is, its TLS, who may log in there and how."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from pydantic import Field, model_validator

from gateway.settings.values import Address, LoginMethod, Section

ListenerProtocol = Literal["mqtt", "mqtt_websocket", "amqp", "amqp_websocket", "http"]


class TlsConfig(Section):
    """TLS as a server speaks it."""

    cert: Path
    """certificate chain (PEM)"""
    key: Path
    """its key (PEM)"""
    client_ca: Path | None = None
    """authorities of client certificates; set: clients are asked for one"""
    require_client_cert: bool = False
    """no connection without one"""

    @model_validator(mode="after")
    def _authority(self) -> TlsConfig:
        if self.require_client_cert and self.client_ca is None:
            raise ValueError("require_client_cert needs client_ca")
        return self


class ListenerConfig(Section):
    """One `[[listeners]]` entry."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,62}$")]
    """what logs, metrics, `/ready`, the ready file and limits call it: small letters, digits, `-` and `_`"""
    protocol: ListenerProtocol
    """`mqtt`, `amqp`, `http` (which has WebSockets at `/mqtt` and `/amqp`), `mqtt_websocket`, `amqp_websocket` (a
    WebSocket at any path and nothing else)"""
    address: Address
    """where it listens"""
    tls: TlsConfig | None = None
    """its own TLS, a table of the keys below. Not set: that of `security.tls_cert`, if there is one"""
    plain: bool = False
    """no TLS, whatever `security.tls_cert` says"""
    proxy_protocol: bool = False
    """it is behind load balancers that say whose a connection is; see [below](#behind-a-load-balancer)"""
    logins: Annotated[tuple[LoginMethod, ...], Field(min_length=1)] | None = None
    """how clients may log in here: `anonymous`, `password`, `scram`, `token`, `certificate`; each must be configured in
    `security`, or for a certificate by a client CA. Not set: in every way that is configured"""
    max_connections: Annotated[int, Field(ge=1)] | None = None
    """open connections, those that have not logged in among them; more are closed at once"""

    @model_validator(mode="after")
    def _one_tls(self) -> ListenerConfig:
        if self.plain and self.tls is not None:
            raise ValueError("plain and tls exclude each other")
        return self


class ListenerSettings(msgspec.Struct, frozen=True):
    """One listener, whichever way it was written (`gateway.ports`)."""

    name: str
    protocol: ListenerProtocol
    address: Address
    key: str  # of its address in the configuration, for errors
    tls_key: str = "security.tls_"  # what the keys of its TLS begin with, likewise
    tls: TlsConfig | None = None  # None: plain text
    proxy_protocol: bool = False  # whether a balancer says whose a connection is
    logins: frozenset[LoginMethod] = frozenset(get_args(LoginMethod))  # how clients may log in
    max_connections: int | None = None  # None: as many as come

    @property
    def authenticates(self) -> bool:
        """Whether every client must prove who it is."""
        return "anonymous" not in self.logins or (self.tls is not None and self.tls.require_client_cert)
