"""Who may do what, logs and spans."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, IPvAnyNetwork, field_validator, model_validator

from gateway.secret import SecretUrl, SecretValue
from gateway.settings.listeners import TlsConfig
from gateway.settings.values import Address, BootstrapServers, HostName, LoginMethod, Origin, Section


class AccessRule(Section):
    """One rule of the access list: first match decides."""

    principal: str = "*"  # a name, group:NAME, or * for everyone
    action: Literal["publish", "subscribe", "admin", "read", "delete", "*"] = "*"
    topic: str = "#"  # an MQTT filter over MQTT topics (MQTT) or `topic/key` (AMQP, HTTP), or the begin of such names
    kafka: str | None = None  # instead: the same over Kafka's `topic/key` in every protocol
    group: str | None = None  # instead of a topic: a consumer group, or the beginning of names and a final *
    allow: bool = True


Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""What a token may be signed by (RFC 7518, RFC 8037): not by a shared secret, with which whoever checks could sign."""


class OauthConfig(Section):
    """Bearer tokens: JSON Web Tokens of one issuer. In force when it is known where the issuer's keys are."""

    jwks_file: Path | None = None
    """the keys that sign bearer tokens (a JSON Web Key Set); with it or `jwks_url` tokens are believed; see
    [below](#tokens)"""
    jwks_url: SecretUrl | None = None
    """the same, fetched: `https://`, or `http://` on this machine"""
    jwks_cafile: Path | None = None
    """authorities (PEM) of that server; not set: the system's"""
    issuer: str | None = None
    """claim `iss` of a good token; needed"""
    audience: tuple[str, ...] = ()
    """one of these is in claim `aud` of a good token; needed, for a token that was given for another service must not
    be good here"""
    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)] = get_args(Algorithm)
    """what may have signed it. There are none with a shared secret: who could check could sign"""
    name_claim: str = "sub"
    """the claim with the client's name; `a.b` is claim `b` inside of `a`"""
    groups_claim: str | None = None
    """the claim with its groups or roles: a list, or text with spaces such as `scope`"""
    leeway_s: Annotated[float, Field(ge=0, le=600)] = 30.0
    """by how much clocks may differ"""
    refresh_s: Annotated[float, Field(ge=1)] = 300.0
    """time between two fetches: a key that the issuer has withdrawn is believed for so long, and a minute"""
    retry_s: Annotated[float, Field(ge=0.1)] = 10.0
    """least time between two fetches, when one failed or a token names an unknown key: anybody can make one up"""

    @model_validator(mode="after")
    def _whole(self) -> OauthConfig:
        if self.jwks_file is not None and self.jwks_url is not None:
            raise ValueError("jwks_file and jwks_url exclude each other")
        if self.enabled and (self.issuer is None or not self.audience):
            raise ValueError("issuer and audience are needed: else tokens for others would be good here")
        if self.jwks_url is not None:
            parts = urlsplit(self.jwks_url.get_secret_value())
            near = parts.scheme == "http" and Address(f"{parts.hostname}:0").is_loopback
            if not parts.hostname or not (parts.scheme == "https" or near):
                raise ValueError("jwks_url: expected https://..., or http:// on this machine")
        return self

    @property
    def enabled(self) -> bool:
        """Whether tokens mean anything here."""
        return self.jwks_file is not None or self.jwks_url is not None


_SOURCE = re.compile(r"claim:.+|certificate:(?:O|OU|CN)|group:[^*]*\*|listener|user")


def _tenant_source(text: str) -> str:
    if _SOURCE.fullmatch(text) is None:
        raise ValueError(
            "expected claim:NAME, certificate:O, certificate:OU, certificate:CN, group:PREFIX*, listener or user"
        )
    return text


class TenantsConfig(Section):
    """Tenants: clients whose topics, groups and sessions are their own, in a Kafka that others use too."""

    sources: tuple[Annotated[str, AfterValidator(_tenant_source)], ...] = ()
    """where a client's tenant comes from, the first that says one: `claim:NAME` of a bearer token, `certificate:O`
    (`OU`, `CN`) of a verified certificate, `group:PREFIX*` (a token's group, without the prefix), `listener` (its
    name), `user` (a login `tenant/name`); see [below](#tenants). Empty: there are no tenants"""
    required: bool = True
    """whether a client without a tenant is refused. Not so: it has the topics and groups that are no tenant's"""

    @property
    def enabled(self) -> bool:
        """Whether there are tenants."""
        return bool(self.sources)

    @property
    def claims(self) -> tuple[str, ...]:
        """The claims that say a tenant."""
        return tuple(source.removeprefix("claim:") for source in self.sources if source.startswith("claim:"))


class SecurityConfig(Section):
    """One identity and one access list for the three protocols."""

    allow_anonymous: bool = True
    """whether a client may say nothing about itself; it is then the principal `anonymous`"""
    password_file: Path | None = None
    """one `name:hash` a line; see [below](#passwords)"""
    scram_file: Path | None = None
    """SCRAM users, one `name:SCRAM-SHA-256$...` a line; see [below](#scram)"""
    plugins: Mapping[str, Mapping[str, SecretValue]] = Field(default_factory=dict)
    """amqtt authentication plugins: class path -> its configuration"""
    password_source: Literal["files", "kafka"] = "files"  # noqa: S105 - where they are
    """who checks passwords: `files` (and plugins), or `kafka`: its own users, each password by a short SASL connection;
    see [Kafka's passwords](operations.md#kafkas-acls-and-passwords)"""
    password_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"  # noqa: S105 - its name
    """how passwords are shown to Kafka: `PLAIN`, `SCRAM-SHA-256`, `SCRAM-SHA-512`"""
    password_protocol: Literal["SASL_PLAINTEXT", "SASL_SSL"] | None = None
    """of Kafka's listener for that; not set: `kafka.security_protocol`"""
    password_servers: BootstrapServers | None = None
    """`host:port,host:port` of that listener, where it is another one than the gateway's own; not set:
    `kafka.bootstrap_servers`"""
    oauth: OauthConfig = OauthConfig()
    tls_cert: Path | None = None
    """certificate chain (PEM); with `tls_key` every listener speaks TLS"""
    tls_key: Path | None = None
    """its key (PEM)"""
    tls_client_ca: Path | None = None
    """authorities of client certificates; set: clients are asked for one, and its common name (or first alternative
    name) is the principal"""
    tls_require_client_cert: bool = False
    """no connection without one"""
    trusted_proxies: tuple[IPvAnyNetwork, ...] = ()
    """networks of the load balancers that listeners with `proxy_protocol` are behind, such as `["10.0.0.0/8"]`"""
    proxy_common_names: bool = False
    """believe the common name of the certificate that a client showed to the balancer (`PP2_SUBTYPE_SSL_CN`), where the
    balancer has verified it: it is then as one that was shown here"""
    failed_attempt_delay_s: Annotated[float, Field(ge=0)] = 1.0
    """least delay of a refusal; doubles with each failure from one address, up to 5 s; 0: no delay"""
    access: tuple[AccessRule, ...] = ()
    """the access list; see [below](#access-list)"""
    tenants: TenantsConfig = TenantsConfig()
    access_source: Literal["list", "kafka"] = "list"
    """whose rules say who may do what: `list` (`access`), or `kafka`: the cluster's own ACLs, for every protocol; see
    [Kafka's ACLs](operations.md#kafkas-acls-and-passwords)"""
    access_refresh_s: Annotated[float, Field(ge=0.1, le=3600)] = 5.0
    """time between two looks at Kafka's ACLs: a right that was withdrawn is good for so long"""
    access_principal: str = "User:{name}"
    """who a client is in Kafka's ACLs, with one of `{name}`, `{cn}` and `{claim:NAME}`, such as `User:CN={cn}`;
    anonymous clients are `User:ANONYMOUS`"""
    allow_everyone_if_no_acl_found: bool = False
    """as Kafka's setting `allow.everyone.if.no.acl.found`: what no ACL is about, everybody may do"""
    origins: tuple[Origin, ...] | None = None
    """web pages that may use HTTP and WebSockets, such as `["https://example.com"]`, `["*"]`: all; for HTTP those of
    `http.cors_origins` too. Not set: those of this machine, because any page that a user visits could use what his
    machine, a remembered password or his browser's certificate may do. The gateway's own pages (the same name as in
    `Host`) always may; where every client must log in, and nothing is set, any page may open a WebSocket of MQTT or
    AMQP, whose login no browser remembers. Clients that are no browsers, and requests with a bearer token, are not
    asked. Others get 403"""
    hosts: tuple[HostName, ...] | None = None
    """names that HTTP requests may be for (`Host`), without ports, such as `["gateway.example.com"]`, `["*"]`: all.
    Always allowed: addresses, names without a dot, the machine's own, and those that nobody can register
    (`.localhost`, `.local`, `.internal`, `.home.arpa`, `.test`). Not set: any other name too over TLS and where
    every client must log in; on an anonymous listener it is 421, because a page's owner could have pointed it here
    (DNS rebinding)"""
    insecure: bool = False
    """allow a listener beyond loopback without authentication"""

    @model_validator(mode="after")
    def _pairs(self) -> SecurityConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        if self.tls_require_client_cert and self.tls_client_ca is None:
            raise ValueError("tls_require_client_cert needs tls_client_ca")
        if self.access_source == "kafka" and self.access:
            raise ValueError('access is not used with access_source = "kafka": leave one of them out')
        if self.asks_kafka_for_passwords and (self.password_file is not None or self.plugins):
            raise ValueError('password_file and plugins are not used with password_source = "kafka": leave them out')
        return self

    @property
    def tls(self) -> TlsConfig | None:
        """TLS of management, and of each listener that does not say otherwise."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return TlsConfig(
            cert=self.tls_cert,
            key=self.tls_key,
            client_ca=self.tls_client_ca,
            require_client_cert=self.tls_require_client_cert,
        )

    @property
    def takes_passwords(self) -> bool:
        """Whether anything checks passwords."""
        return self.password_file is not None or bool(self.plugins) or self.asks_kafka_for_passwords

    @property
    def asks_kafka_for_passwords(self) -> bool:
        """Whether Kafka checks passwords."""
        return self.password_source == "kafka"  # noqa: S105 - where they are

    @property
    def logins(self) -> frozenset[LoginMethod]:
        """The ways to log in that are configured, but for certificates: for these TLS or a balancer asks."""
        configured: dict[LoginMethod, bool] = {
            "anonymous": self.allow_anonymous,
            "password": self.takes_passwords,
            "scram": self.scram_file is not None,
            "token": self.oauth.enabled,
        }
        return frozenset(method for method, is_configured in configured.items() if is_configured)


class LogConfig(Section):
    """Structured logs on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """`debug`, `info`, `warning`, `error`"""
    format: Literal["auto", "console", "json"] = "auto"
    """`console`, `json`, or by whether standard error is a terminal"""


class AuditConfig(Section):
    """A line for each login, refusal and administrator's act."""

    file: Path | None = None
    """where the audit trail is appended, in JSON lines; opened again on SIGHUP, after logrotate has renamed it"""
    topic: Annotated[str | None, Field(pattern="^__trivium_[a-zA-Z0-9._-]{1,200}$")] = None
    """a Kafka topic for it, such as `__trivium_audit`. No client can read or write a topic whose name begins so"""


class ObserveConfig(Section):
    """Spans for a collector of OpenTelemetry."""

    otlp_endpoint: SecretUrl | None = None
    """a collector of OpenTelemetry (OTLP over HTTP), such as `http://127.0.0.1:4318`: requests over HTTP and what they
    publish become spans. Needs the packages of the extra `otel` (`pip install trivium[otel]`). OpenTelemetry's own
    variables (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_TRACES_SAMPLER`, `OTEL_SERVICE_NAME`, ...) hold too"""

    @field_validator("otlp_endpoint")
    @classmethod
    def _url(cls, endpoint: SecretUrl | None) -> SecretUrl | None:
        if endpoint is not None and not endpoint.get_secret_value().startswith(("http://", "https://")):
            raise ValueError("not the address of a collector, such as http://127.0.0.1:4318")
        return endpoint
