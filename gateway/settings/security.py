"""Settings of security, logs, audit and spans."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, IPvAnyNetwork, field_validator, model_validator

from gateway.runtime.secret import SecretUrl, SecretValue
from gateway.settings.listeners import TlsConfig
from gateway.settings.values import BootstrapServers, HostName, LoginMethod, Origin, Section, check_url


class AccessRule(Section):
    """One rule of the access list; the first match decides."""

    principal: str = "*"  # a name, group:NAME, or * for everyone
    action: Literal["publish", "subscribe", "admin", "read", "delete", "*"] = "*"
    topic: str = "#"  # a filter over MQTT topics (MQTT) or `topic/key` (AMQP, HTTP); a single level includes all below
    kafka: str | None = None  # instead of topic: a filter over Kafka's `topic/key` in every protocol
    group: str | None = None  # instead of topic: a consumer group, or a prefix and a final *
    allow: bool = True


Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""Signature algorithms of tokens (RFC 7518, RFC 8037). None with a shared secret: every verifier could sign tokens."""


class OauthConfig(Section):
    """Bearer tokens: JSON Web Tokens of one issuer. Enabled if the location of the issuer's keys is set."""

    jwks_file: Path | None = None
    """file with the keys that verify bearer tokens (a JSON Web Key Set). This or `jwks_url` enables tokens; see
    [below](#tokens)"""
    jwks_url: SecretUrl | None = None
    """URL from which the keys are fetched: `https://`, or `http://` on this machine"""
    jwks_cafile: Path | None = None
    """CA certificates (PEM) that verify the server of `jwks_url`. Not set: the system's"""
    issuer: str | None = None
    """required value of the claim `iss`; must be set"""
    audience: tuple[str, ...] = ()
    """the claim `aud` must contain one of these; must be set, because a token that was issued for another service must
    not be valid here"""
    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)] = get_args(Algorithm)
    """accepted signature algorithms. None with a shared secret: every verifier could sign tokens"""
    name_claim: str = "sub"
    """claim with the client's name; `a.b` is the claim `b` inside `a`"""
    groups_claim: str | None = None
    """claim with the client's groups or roles: a list, or space-separated text like `scope`"""
    leeway_s: Annotated[float, Field(ge=0, le=600)] = 30.0
    """tolerated difference between clocks"""
    refresh_s: Annotated[float, Field(ge=1)] = 300.0
    """interval of fetching the keys. A key that the issuer has withdrawn stays valid for this time plus a minute"""
    retry_s: Annotated[float, Field(ge=0.1)] = 10.0
    """minimum interval between fetches after a failure or a token with an unknown key id, which any client can
    invent"""

    @model_validator(mode="after")
    def _whole(self) -> OauthConfig:
        if self.jwks_file is not None and self.jwks_url is not None:
            raise ValueError("jwks_file and jwks_url exclude each other")
        if self.enabled and (self.issuer is None or not self.audience):
            raise ValueError("issuer and audience are needed: otherwise tokens for other services would be valid here")
        if self.jwks_url is not None:
            check_url(self.jwks_url, "jwks_url")
        return self

    @property
    def enabled(self) -> bool:
        """Whether tokens are accepted."""
        return self.jwks_file is not None or self.jwks_url is not None


_SOURCE = re.compile(r"claim:.+|certificate:(?:O|OU|CN)|group:[^*]*\*|listener|user")


def _tenant_source(text: str) -> str:
    if _SOURCE.fullmatch(text) is None:
        raise ValueError(
            "expected claim:NAME, certificate:O, certificate:OU, certificate:CN, group:PREFIX*, listener or user"
        )
    return text


class TenantsConfig(Section):
    """Tenants: clients with separate topics, groups and sessions in a shared Kafka."""

    sources: tuple[Annotated[str, AfterValidator(_tenant_source)], ...] = ()
    """where a client's tenant is found; the first source that gives one decides: `claim:NAME` of a bearer token,
    `certificate:O` (or `OU`, `CN`) of a verified certificate, `group:PREFIX*` (a token's group without the prefix),
    `listener` (its name), `user` (a login `tenant/name`); see [below](#tenants). Empty: no tenants"""
    required: bool = True
    """refuse clients without a tenant. `false`: they use the topics and groups that belong to no tenant"""

    @property
    def enabled(self) -> bool:
        """Whether there are tenants."""
        return bool(self.sources)

    @property
    def claims(self) -> tuple[str, ...]:
        """The claims that are sources of tenants."""
        return tuple(source.removeprefix("claim:") for source in self.sources if source.startswith("claim:"))


class SecurityConfig(Section):
    """Authentication and authorization for the three protocols."""

    reload_s: Annotated[float, Field(ge=0)] = 15.0
    """how often the files of certificates, passwords and token keys are looked at. Changed ones are loaded, as by
    SIGHUP, when none has changed for this time. 0: only by SIGHUP"""
    allow_anonymous: bool = True
    """allow clients without credentials; their principal is `anonymous`"""
    password_file: Path | None = None
    """password file, one `name:hash` per line, for users and devices; see [below](#passwords)"""
    scram_file: Path | None = None
    """file of SCRAM users, one `name:SCRAM-SHA-256$...` per line; see [below](#scram)"""
    plugins: Mapping[str, Mapping[str, SecretValue]] = Field(default_factory=dict)
    """amqtt authentication plugins: class path -> the plugin's configuration"""
    password_source: Literal["files", "kafka"] = "files"  # noqa: S105 - a source of passwords
    """what checks passwords: `files` (with plugins), or `kafka`: its SCRAM or PLAIN users, each password with a short
    SASL connection; see [Kafka's passwords](operations.md#kafkas-acls-and-passwords)"""
    password_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"  # noqa: S105 - its name
    """SASL mechanism for checking passwords with Kafka: `PLAIN`, `SCRAM-SHA-256` or `SCRAM-SHA-512`"""
    password_protocol: Literal["SASL_PLAINTEXT", "SASL_SSL"] | None = None
    """security protocol of the Kafka listener that checks passwords. Not set: `kafka.security_protocol`"""
    password_servers: BootstrapServers | None = None
    """`host:port,host:port` of the Kafka listener that checks passwords. Not set: `kafka.bootstrap_servers`"""
    password_cache_entries: Annotated[int, Field(ge=0, le=10_000_000)] = 100_000
    """passwords that are cached once they were right (as a keyed hash, 200 bytes each), so that only the first login of
    a client is slow. The secrets of devices need no cache. 0: none is cached"""
    password_cache_s: Annotated[float, Field(ge=0)] | None = None
    """how long a password is cached after its check, so how long a withdrawn one stays valid. Not set: 60 s if a plugin
    or Kafka has checked it; for the file until it is reloaded"""
    oauth: OauthConfig = OauthConfig()
    tls_cert: Path | None = None
    """certificate chain (PEM); with this and `tls_key` every listener uses TLS"""
    tls_key: Path | None = None
    """private key (PEM)"""
    tls_client_ca: Path | None = None
    """CA certificates (PEM) that verify client certificates. If set, clients are asked for a certificate, and its
    common name (or first alternative name) is the principal"""
    tls_require_client_cert: bool = False
    """refuse connections without a client certificate"""
    trusted_proxies: tuple[IPvAnyNetwork, ...] = ()
    """networks of the load balancers whose PROXY headers are trusted, such as `["10.0.0.0/8"]`"""
    proxy_common_names: bool = False
    """trust the common name of a client certificate that the load balancer has verified (`PP2_SUBTYPE_SSL_CN`), as if
    the client had presented the certificate here"""
    failed_attempt_delay_s: Annotated[float, Field(ge=0)] = 1.0
    """minimum delay of the answer to a failed login; doubles with each failure from an address, up to 5 s. 0: no
    delay"""
    access: tuple[AccessRule, ...] = ()
    """the access list; see [below](#access-list)"""
    tenants: TenantsConfig = TenantsConfig()
    access_source: Literal["list", "kafka"] = "list"
    """where access rules come from: `list` (`security.access`), or `kafka`: the cluster's ACLs, for every protocol; see
    [Kafka's ACLs](operations.md#kafkas-acls-and-passwords)"""
    access_refresh_s: Annotated[float, Field(ge=0.1, le=3600)] = 5.0
    """interval of reading Kafka's ACLs; a withdrawn right stays valid for this time"""
    access_principal: str = "User:{name}"
    """a client's principal in Kafka's ACLs, with one of `{name}`, `{cn}` and `{claim:NAME}`, such as `User:CN={cn}`;
    anonymous clients are `User:ANONYMOUS`"""
    allow_everyone_if_no_acl_found: bool = False
    """like Kafka's `allow.everyone.if.no.acl.found`: everyone may access a resource that has no ACL"""
    origins: tuple[Origin, ...] | None = None
    """origins of web pages that may use HTTP and WebSockets, such as `["https://example.com"]`; `["*"]`: all; HTTP also
    accepts `http.cors_origins`. Not set: only pages of this machine, because any page that a user visits could
    otherwise use the rights of his machine, of a password that his browser remembers, or of its client certificate. The
    gateway's own pages (same name as in `Host`) are always allowed. If nothing is set and every client must log in, any
    page may open MQTT or AMQP WebSockets, because no browser remembers their login. Clients that are not browsers, and
    requests with a bearer token, are not checked. Other pages get 403"""
    hosts: tuple[HostName, ...] | None = None
    """host names that HTTP requests may use (`Host`), without ports, such as `["gateway.example.com"]`; `["*"]`: all.
    Always allowed: IP addresses, names without a dot, the machine's own name, and suffixes that cannot be registered
    (`.localhost`, `.local`, `.internal`, `.home.arpa`, `.test`). Not set: any other name too, over TLS or if every
    client must log in; otherwise other names get 421, because the owner of a web page could point his name at this
    machine (DNS rebinding)"""
    insecure: bool = False
    """allow listeners on other addresses than loopback without authentication"""

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
        """The TLS of management and of each listener without its own."""
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
        return self.password_source == "kafka"  # noqa: S105 - a source of passwords

    @property
    def logins(self) -> frozenset[LoginMethod]:
        """The configured login methods, except certificates, which depend on the listener's TLS or PROXY headers."""
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
    """`debug`, `info`, `warning` or `error`"""
    format: Literal["auto", "console", "json"] = "auto"
    """`console`, `json`, or `auto`: `console` if standard error is a terminal, else `json`"""
    connections: bool = True
    """whether clients that connect and disconnect, links that are detached and HTTP consumers are logged, a line each
    at `info`; a large fleet may rather use the [audit trail](operations.md#audit), which stays whole"""


class AuditConfig(Section):
    """The audit trail: one line for each login, refusal and administrative action."""

    file: Path | None = None
    """file to which the audit trail is appended as JSON lines; reopened on SIGHUP, for logrotate"""
    topic: Annotated[str | None, Field(pattern="^__trivium_[a-zA-Z0-9._-]{1,200}$")] = None
    """Kafka topic for the audit trail, such as `__trivium_audit`. Clients can neither read nor write `__trivium_`
    topics"""


class ObserveConfig(Section):
    """Spans for an OpenTelemetry collector."""

    otlp_endpoint: SecretUrl | None = None
    """OpenTelemetry collector (OTLP over HTTP), such as `http://127.0.0.1:4318`. HTTP requests and their publishing
    become spans. Needs the extra `otel` (`pip install trivium[otel]`). OpenTelemetry's own variables
    (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_TRACES_SAMPLER`, `OTEL_SERVICE_NAME`, ...) apply too"""

    @field_validator("otlp_endpoint")
    @classmethod
    def _url(cls, endpoint: SecretUrl | None) -> SecretUrl | None:
        if endpoint is not None and not endpoint.get_secret_value().startswith(("http://", "https://")):
            raise ValueError("not the URL of a collector, such as http://127.0.0.1:4318")
        return endpoint
