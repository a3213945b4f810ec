"""Settings of a listener: its address, its TLS and its login methods."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from pydantic import Field, model_validator

from gateway.settings.values import Address, LoginMethod, Section

ListenerProtocol = Literal["mqtt", "mqtt_websocket", "amqp", "amqp_websocket", "http"]


class TlsConfig(Section):
    """TLS of a listener."""

    cert: Path
    """certificate chain (PEM)"""
    key: Path
    """private key (PEM)"""
    client_ca: Path | None = None
    """CA certificates (PEM) that verify client certificates. If set, clients are asked for a certificate"""
    require_client_cert: bool = False
    """refuse connections without a client certificate"""

    @model_validator(mode="after")
    def _authority(self) -> TlsConfig:
        if self.require_client_cert and self.client_ca is None:
            raise ValueError("require_client_cert needs client_ca")
        return self


class ListenerConfig(Section):
    """One `[[listeners]]` entry."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,62}$")]
    """the listener's name in logs, metrics, `/ready`, the ready file and limits: lower-case letters, digits, `-` and
    `_`"""
    protocol: ListenerProtocol
    """`mqtt`, `amqp`, `http` (which includes WebSockets at `/mqtt` and `/amqp`), `mqtt_websocket` or `amqp_websocket`
    (only WebSockets, at any path)"""
    address: Address
    """the address to listen on"""
    tls: TlsConfig | None = None
    """the listener's own TLS, a table with the keys below. Not set: the TLS of `security.tls_cert`, if that is set"""
    plain: bool = False
    """no TLS, even if `security.tls_cert` is set"""
    proxy_protocol: bool = False
    """the listener is behind load balancers that send PROXY headers; see [below](#behind-a-load-balancer)"""
    logins: Annotated[tuple[LoginMethod, ...], Field(min_length=1)] | None = None
    """login methods accepted here: `anonymous`, `password`, `scram`, `token`, `certificate`. Each must be configured in
    `security` (`certificate` by a client CA). Not set: all configured methods"""
    max_connections: Annotated[int, Field(ge=1)] | None = None
    """open connections, including those that have not logged in; further ones are closed immediately"""

    @model_validator(mode="after")
    def _one_tls(self) -> ListenerConfig:
        if self.plain and self.tls is not None:
            raise ValueError("plain and tls exclude each other")
        return self


class ListenerSettings(msgspec.Struct, frozen=True):
    """A listener's settings, in whichever form they were configured (`gateway.process.ports`)."""

    name: str
    protocol: ListenerProtocol
    address: Address
    key: str  # the setting of its address, for errors
    tls_key: str = "security.tls_"  # prefix of its TLS settings, for errors
    tls: TlsConfig | None = None  # None: no TLS
    proxy_protocol: bool = False  # whether load balancers send PROXY headers
    logins: frozenset[LoginMethod] = frozenset(get_args(LoginMethod))  # accepted login methods
    max_connections: int | None = None  # None: unlimited

    @property
    def authenticates(self) -> bool:
        """Whether every client must authenticate."""
        return "anonymous" not in self.logins or (self.tls is not None and self.tls.require_client_cert)
