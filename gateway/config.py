"""The configuration: one frozen object, read in one place, checked at the start.

Sources in rising precedence: defaults, `trivium.toml`, environment (`TRIVIUM_<SECTION>__<KEY>`), flags.
A bad value stops the start with the key's name. Every limit stands here with its reason.
"""

from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from gateway.config_keys import unknown_key, unknown_variables
from gateway.secret import SecretUrl, SecretValue, is_secret_name
from mapping.record import is_topic_name

MEBIBYTE = 1024 * 1024
LARGEST_PORT = 65535


class ConfigError(Exception):
    """The configuration cannot be used; the text names each key and what is wrong with it."""


class Address(str):
    """`HOST:PORT` (`[::1]:1883` for IPv6). Port 0 asks for a free one."""

    __slots__ = ()

    @property
    def host(self) -> str:
        """The host part, without brackets."""
        return self.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port part."""
        return int(self.rpartition(":")[2])

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @classmethod
    def parse(cls, text: str) -> Address:
        """Check `text`; ValueError when it is no `HOST:PORT`."""
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or int(port) > LARGEST_PORT:
            raise ValueError("expected HOST:PORT")
        return cls(text)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(
            cls.parse, core_schema.str_schema(), serialization=core_schema.to_string_ser_schema()
        )


def _origin(text: str) -> str:
    scheme, mark, place = text.partition("://")
    if text != "*" and (not scheme or not mark or not place or "/" in place):
        raise ValueError('expected SCHEME://HOST[:PORT] or "*"')
    return text


Origin = Annotated[str, AfterValidator(_origin)]
"""Where a page of a browser came from, as the browser says it."""


def _host_name(text: str) -> str:
    if text != "*" and (not text or set(text) & set("/:@[]* ")):
        raise ValueError('expected a name without a port, such as gateway.example, or "*"')
    return text


HostName = Annotated[str, AfterValidator(_host_name)]
"""A name that clients call the gateway by."""


def _bootstrap_servers(text: str) -> str:
    for server in text.split(","):
        try:
            good = Address.parse(server.strip()).port > 0
        except ValueError:
            good = False
        if not good:
            raise ValueError("expected HOST:PORT, or several with commas between, such as kafka-1:9092,kafka-2:9092")
    return text


BootstrapServers = Annotated[str, AfterValidator(_bootstrap_servers)]
"""`HOST:PORT,HOST:PORT`."""


class Section(BaseModel):
    """A part of the configuration: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class KafkaConfig(Section):
    """How the gateway talks to Kafka."""

    bootstrap_servers: BootstrapServers | None = None  # None: start the embedded broker
    client_id: str = "trivium"
    linger_ms: Annotated[int, Field(ge=0, le=1000)] = 0  # the open batch fills while its predecessor is answered
    batch_bytes: Annotated[int, Field(ge=1024, le=16 * MEBIBYTE)] = 65536  # 505,000 records/s measured at 64 KiB
    max_request_bytes: Annotated[int, Field(ge=1024)] = 10 * MEBIBYTE  # an HTTP body or an AMQP message, and headers
    delivery_timeout_s: Annotated[float, Field(gt=0)] = 120.0  # as the Java client: a broker may restart in it
    request_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    metadata_max_age_s: Annotated[float, Field(gt=0)] = 30.0
    create_topics: bool | None = None  # None: yes with the embedded broker, no otherwise
    topic_partitions: Annotated[int, Field(ge=1)] = 3
    topic_replication: Annotated[int, Field(ge=1)] = 1
    # A topic stays, and costs the cluster memory and descriptors for good: what clients make has an end (ADR 0035).
    max_topics: Annotated[int, Field(ge=1)] = 5000  # in all; so many a subscription to `#` is made for
    max_partitions: Annotated[int, Field(ge=1)] = 20_000  # in all; some thousands a broker are usual
    max_topics_per_principal: Annotated[int, Field(ge=1)] = 1000  # five clients gone wrong before all are stopped
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = None
    sasl_username: str | None = None
    sasl_password: SecretStr | None = None
    ssl_cafile: Path | None = None


class EmbeddedConfig(Section):
    """The embedded broker: used when `kafka.bootstrap_servers` is not set."""

    port: Annotated[int, Field(ge=0, le=LARGEST_PORT)] = 9092  # 0: a free one
    controller_port: Annotated[int, Field(ge=0, le=LARGEST_PORT)] = 0
    heap: Annotated[str, Field(pattern=r"^\d+[mg]$")] = "1g"


class BudgetConfig(Section):
    """Bounds on what was submitted to Kafka and is not answered yet (flow control, part 1)."""

    process_bytes: Annotated[int, Field(ge=MEBIBYTE)] = 256 * MEBIBYTE
    process_records: Annotated[int, Field(ge=1)] = 1_000_000
    connection_bytes: Annotated[int, Field(ge=65536)] = 32 * MEBIBYTE
    topic_bytes: Annotated[int, Field(ge=MEBIBYTE)] = 128 * MEBIBYTE
    login_bytes: Annotated[int, Field(ge=MEBIBYTE)] = 64 * MEBIBYTE  # of all who have not logged in yet


class MqttConfig(Section):
    """MQTT 5 and 3.1.1."""

    address: Address = Address("127.0.0.1:1883")
    receive_maximum: Annotated[int, Field(ge=1, le=65535)] = 256
    enforce_receive_maximum: bool = True  # False tolerates clients that overrun it (mosquitto#3471)
    max_packet_bytes: Annotated[int, Field(ge=128, le=268_435_460)] = 2 * MEBIBYTE
    max_connect_bytes: Annotated[int, Field(ge=128)] = 65536  # before login a peer is a stranger
    topic_alias_maximum: Annotated[int, Field(ge=0, le=65535)] = 64
    max_keep_alive_s: Annotated[int, Field(ge=1, le=65535)] = 1200
    connect_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    outgoing_inflight: Annotated[int, Field(ge=1, le=65535)] = 1000  # min with the client's Receive Maximum
    outgoing_aliases: Annotated[int, Field(ge=0, le=65535)] = 64  # min with the client's Topic Alias Maximum
    max_subscriptions: Annotated[int, Field(ge=1)] = 1000
    partial_subscriptions: bool = True  # a filter that is denied in part: each message is judged anyway
    maximum_qos: Annotated[int, Field(ge=0, le=2)] = 2
    session_expiry_max_s: Annotated[int, Field(ge=0, le=0xFFFFFFFF)] = 604_800  # a week, as Kafka keeps records
    report_no_subscribers: bool = False  # Kafka's readers are not known: 0x10 is about connected MQTT clients only
    echo_wait_ms: Annotated[int, Field(ge=0, le=60_000)] = 0  # a client's own copy before its PUBACK: ADR 0021
    check_payload_format: bool = False  # reading every text payload costs
    acknowledge_refused: bool = False  # to 3.1.1, which has no word for it: True ends resending, and loses the message
    response_information: str | None = "replies/{client}"  # for those who ask; the base of response topics
    server_reference: str | None = None  # where clients shall go when the gateway stops
    websocket_address: Address | None = None  # besides `/mqtt` on the HTTP port
    state_partitions: Annotated[int, Field(ge=1, le=1000)] = 8  # of a state topic; it must not change afterwards
    max_retained: Annotated[int, Field(ge=1)] = 1_000_000  # all of them are in memory
    max_retained_bytes: Annotated[int, Field(ge=MEBIBYTE)] = 512 * MEBIBYTE


class AddressRule(Section):
    """One `[[amqp.addresses]]` entry: what addresses are that do not say it; the first match decides."""

    pattern: str  # an MQTT filter over the address: `jobs/#` is `jobs` and all below
    type: Literal["queue", "topic"]

    @field_validator("pattern")
    @classmethod
    def _is_filter(cls, pattern: str) -> str:
        levels = pattern.split("/")
        if not pattern or any(("#" in one or "+" in one) and one not in ("#", "+") for one in levels):
            raise ValueError("a + or # is a level of its own")
        if "#" in levels[:-1]:
            raise ValueError("a # is the last level")
        return pattern


class AmqpConfig(Section):
    """AMQP 1.0."""

    address: Address = Address("127.0.0.1:5672")
    websocket_address: Address | None = None  # besides `/amqp` on the HTTP port
    addresses: tuple[AddressRule, ...] = ()  # none: a plain address is a topic
    max_frame_bytes: Annotated[int, Field(ge=512)] = 65536
    channel_max: Annotated[int, Field(ge=0, le=65535)] = 63
    links_per_session: Annotated[int, Field(ge=1)] = 256
    idle_timeout_s: Annotated[float, Field(ge=0)] = 60.0  # the half of it is announced
    open_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    link_credit: Annotated[int, Field(ge=1, le=100_000)] = 1000  # 1,000 credits at 5 ms = 180,000 messages/s
    link_bytes: Annotated[int, Field(ge=65536)] = 4 * MEBIBYTE
    # The engine announces it in whole frames, however small the transfers are: 128 MiB / 64 KiB = 2,048 of them, twice
    # one link's credit. It holds none of those bytes: each transfer is taken out of it as it is read.
    session_window_bytes: Annotated[int, Field(ge=65536)] = 128 * MEBIBYTE
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 * MEBIBYTE
    # What is announced: AMQP counts all sections. 1 MiB of it is for those beside the body.
    max_message_bytes: Annotated[int, Field(ge=1024)] = 5 * MEBIBYTE
    max_unsettled: Annotated[int, Field(ge=1)] = 10_000  # per receiver link: credit does not bound it
    dead_letter_topic: str | None = None  # such as {topic}-dlq; None: what is rejected is done with
    max_attempts: Annotated[int, Field(ge=1)] = 10  # Artemis's; then a record that fails is a dead letter
    reply_topic: str = "replies"  # temporary queues and topics are keys of it
    max_transactions: Annotated[int, Field(ge=0)] = 1000  # a JMS session has one open all the time, mostly empty
    transaction_producers: Annotated[int, Field(ge=1, le=1000)] = 16  # 2 already do 18,000 messages/s, 100 at a time
    transaction_timeout_s: Annotated[float, Field(ge=1, le=880)] = 60.0  # Kafka's own allows 15 minutes at most

    @model_validator(mode="after")
    def _topic_names(self) -> AmqpConfig:
        template = self.dead_letter_topic
        if template is not None and (template == "{topic}" or not is_topic_name(template.replace("{topic}", "t"))):
            raise ValueError("dead_letter_topic: not another topic's name, in which {topic} may stand for the record's")
        if not is_topic_name(self.reply_topic):
            raise ValueError("reply_topic: no name of a topic that clients may use")
        return self


class ConsumerDefaults(Section):
    """What holds for an HTTP consumer whose creation does not say it; the defaults are Kafka's and Strimzi's."""

    auto_offset_reset: Literal["earliest", "latest", "none"] = "latest"
    enable_auto_commit: bool = True
    fetch_min_bytes: Annotated[int, Field(ge=0, lt=2**31)] = 1
    isolation_level: Literal["read_committed", "read_uncommitted"] = "read_committed"


class HttpConfig(Section):
    """HTTP/1.1."""

    address: Address = Address("127.0.0.1:8080")
    dialect: Literal["strimzi", "confluent"] = "strimzi"  # of the paths that both have
    max_body_bytes: Annotated[int, Field(ge=1024)] = 8 * MEBIBYTE
    max_records: Annotated[int, Field(ge=1)] = 10_000  # per request
    max_concurrent: Annotated[int, Field(ge=1)] = 1024  # requests that wait for Kafka at once
    max_uploads: Annotated[int, Field(ge=1)] = 128  # of lines, at once
    idempotency_window_s: Annotated[float, Field(gt=0, le=7 * 86400)] = 3600.0  # how long an answer is kept for its key
    max_idempotency_keys: Annotated[int, Field(ge=1)] = 100_000
    compress_from_bytes: Annotated[int, Field(ge=1)] = 4096  # of an answer, where the client accepts it
    max_line_bytes: Annotated[int, Field(ge=1024)] = 2 * MEBIBYTE
    max_consumers: Annotated[int, Field(ge=1)] = 1000
    consumer: ConsumerDefaults = ConsumerDefaults()
    consumer_idle_s: Annotated[float, Field(gt=0)] = 300.0  # abandoned consumers keep partitions
    max_poll_wait_s: Annotated[float, Field(gt=0)] = 300.0
    default_poll_wait_ms: Annotated[int, Field(ge=0)] = 100  # Strimzi's
    poll_max_bytes: Annotated[int, Field(ge=1024)] = 64 * MEBIBYTE
    header_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    max_streams: Annotated[int, Field(ge=1)] = 10_000  # of server-sent events, and as many WebSockets
    stream_heartbeat_s: Annotated[float, Field(gt=0)] = 15.0  # proxies close what is silent for 30 to 60 s
    reply_topic: str = "replies"  # answers of devices are keys of it
    max_requests: Annotated[int, Field(ge=1)] = 1000  # that wait for a device at once
    max_request_wait_s: Annotated[float, Field(gt=0)] = 300.0
    max_active: Annotated[int, Field(ge=1)] = 20_000  # requests in work at once, waiting polls among them
    max_active_per_client: Annotated[int, Field(ge=1)] = 5_000
    max_consumers_per_group: Annotated[int, Field(ge=1)] = 1000
    max_header_bytes: Annotated[int, Field(ge=1024, le=MEBIBYTE)] = 16 * 1024  # of one field; proxies send long tokens
    max_headers: Annotated[int, Field(ge=10, le=1000)] = 100
    max_head_bytes: Annotated[int, Field(ge=1024)] = 65536  # a request's head altogether
    min_upload_rate: Annotated[int, Field(ge=1)] = 16 * 1024  # bytes a second, after header_timeout_s
    cors_origins: tuple[Origin, ...] = ()  # of pages that may call from a browser

    @model_validator(mode="after")
    def _reply_topic(self) -> HttpConfig:
        if not is_topic_name(self.reply_topic):
            raise ValueError("reply_topic: no name of a topic that clients may use")
        return self


class ManagementConfig(Section):
    """`/healthy`, `/ready` and `/metrics`."""

    address: Address = Address("127.0.0.1:8081")


class RuleConfig(Section):
    """One `[[mapping.rules]]` entry; see `mapping.rules`."""

    mqtt: str
    topic: str
    key: str | None = None


class MappingConfig(Section):
    """From addresses to Kafka topics and keys."""

    rules: tuple[RuleConfig, ...] = ()
    catch_all_topic: str = "mqtt"
    # None: all where the gateway makes no topics, none where it does: Kafka takes a.b and a_b for one name (ADR 0035).
    dotted_topics: tuple[str, ...] | None = None


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
    jwks_url: SecretUrl | None = None
    jwks_cafile: Path | None = None  # None: the system's authorities
    issuer: str | None = None
    audience: tuple[str, ...] = ()  # one of them must be in the token: it was given to be shown here
    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)] = get_args(Algorithm)
    name_claim: str = "sub"
    groups_claim: str | None = None
    leeway_s: Annotated[float, Field(ge=0, le=600)] = 30.0  # for the clocks of two machines
    refresh_s: Annotated[float, Field(ge=1)] = 300.0  # what the issuer has withdrawn counts no longer than that
    retry_s: Annotated[float, Field(ge=0.1)] = 10.0  # anybody can name an unknown key: least time between two fetches

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


class SecurityConfig(Section):
    """One identity and one access list for the three protocols."""

    allow_anonymous: bool = True
    password_file: Path | None = None  # amqtt's format: one `name:hash` a line
    scram_file: Path | None = None  # RFC 5803's form: one `name:SCRAM-SHA-256$4096:salt$StoredKey:ServerKey` a line
    plugins: Mapping[str, Mapping[str, SecretValue]] = Field(default_factory=dict)  # amqtt plugin class -> its options
    oauth: OauthConfig = OauthConfig()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None  # set: client certificates are asked for and checked
    tls_require_client_cert: bool = False
    failed_attempt_delay_s: Annotated[float, Field(ge=0)] = 1.0
    access: tuple[AccessRule, ...] = ()
    origins: tuple[Origin, ...] | None = None  # None: pages of this machine, and the gateway's own
    hosts: tuple[HostName, ...] | None = None  # None: any where a login is needed, else names of this network
    insecure: bool = False  # a listener beyond loopback without authentication

    @model_validator(mode="after")
    def _pairs(self) -> SecurityConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        if self.tls_require_client_cert and self.tls_client_ca is None:
            raise ValueError("tls_require_client_cert needs tls_client_ca")
        return self

    @property
    def authenticates(self) -> bool:
        """Whether every client must prove who it is."""
        if self.tls_require_client_cert:
            return True
        files = self.password_file is not None or self.scram_file is not None
        proofs = files or bool(self.plugins) or self.oauth.enabled
        return not self.allow_anonymous and proofs


class LogConfig(Section):
    """Structured logs on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"  # auto: console on a terminal, JSON lines otherwise


class ObserveConfig(Section):
    """Spans for a collector of OpenTelemetry."""

    otlp_endpoint: SecretUrl | None = None

    @field_validator("otlp_endpoint")
    @classmethod
    def _url(cls, endpoint: SecretUrl | None) -> SecretUrl | None:
        if endpoint is not None and not endpoint.get_secret_value().startswith(("http://", "https://")):
            raise ValueError("not the address of a collector, such as http://127.0.0.1:4318")
        return endpoint


class Config(BaseSettings):
    """The whole configuration."""

    model_config = SettingsConfigDict(
        env_prefix="TRIVIUM_",
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        nested_model_default_partial_update=True,
    )

    data_dir: Path = Path(".trivium")
    drain_timeout_s: Annotated[float, Field(gt=0, le=10)] = 8.0  # SIGTERM to exit stays under 10 s
    kafka: KafkaConfig = KafkaConfig()
    embedded: EmbeddedConfig = EmbeddedConfig()
    budget: BudgetConfig = BudgetConfig()
    mqtt: MqttConfig = MqttConfig()
    amqp: AmqpConfig = AmqpConfig()
    http: HttpConfig = HttpConfig()
    management: ManagementConfig = ManagementConfig()
    mapping: MappingConfig = MappingConfig()
    security: SecurityConfig = SecurityConfig()
    log: LogConfig = LogConfig()
    observe: ObserveConfig = ObserveConfig()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment wins over what `load` read from the file; flags are laid over both afterwards."""
        return env_settings, init_settings

    @property
    def creates_topics(self) -> bool:
        """Whether an unknown topic is created: as set, else only on the embedded broker."""
        if self.kafka.create_topics is not None:
            return self.kafka.create_topics
        return self.kafka.bootstrap_servers is None


class _Laid(Config):
    """A configuration whose sources were already laid over each other."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *_: PydanticBaseSettingsSource,
        **__: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is given."""
        return (init_settings,)


def load(file: Path | None = None, flags: Mapping[str, Any] | None = None) -> Config:
    """Read the configuration: `file` (else `trivium.toml` where it exists), environment, then `flags`.

    Args:
        file: a TOML file; ConfigError when it cannot be read or parsed.
        flags: nested values such as `{"mqtt": {"address": "127.0.0.1:0"}}`; None values are left out.

    Raises:
        ConfigError: with one line per bad key.
    """
    path = file if file is not None else Path("trivium.toml")
    data: dict[str, Any] = {}
    if file is not None or path.is_file():
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from error
    misspelled = unknown_variables(Config, os.environ)
    if misspelled:
        raise ConfigError("\n".join(misspelled))
    try:
        config = Config(**data)
        given = _without_none(flags or {})
        if given:
            config = _Laid.model_validate(_merge(config.model_dump(), given))
    except ValidationError as error:
        raise ConfigError(_describe(error)) from None  # its own text repeats what it was given
    except SettingsError as error:  # names the section
        raise ConfigError(f"environment, TRIVIUM_...: not valid JSON: {error}") from None
    return config


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: _without_none(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    return {key: value for key, value in kept.items() if value is not None and value != {}}


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def _describe(error: ValidationError) -> str:
    lines = []
    for fault in error.errors(include_url=False):
        key = ".".join(str(part) for part in fault["loc"])
        # What was given is not repeated where it may be a secret: by the key's type, or under a name that nobody knows.
        hidden = fault["type"] == "extra_forbidden" or is_secret_name(key) or _is_secret(fault["loc"])
        plain = isinstance(fault["input"], str | int | float) and not hidden
        text = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            text += unknown_key(Config, tuple(str(part) for part in fault["loc"]))
        lines.append(f"{key}: {text}, got {fault['input']!r}" if plain else f"{key}: {text}")
    return "\n".join(lines)


def _is_secret(place: tuple[int | str, ...]) -> bool:
    """Whether the key at `place` has one of the types of secrets."""
    model: Any = Config
    for part in place:
        field = model.model_fields.get(str(part)) if isinstance(model, type) and issubclass(model, BaseModel) else None
        if field is None:
            return False
        if "Secret" in repr(field.annotation):
            return True
        model = field.annotation
    return False
