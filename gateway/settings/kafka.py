"""Settings of Kafka, the embedded broker, budgets, and the mapping onto topics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, model_validator

from gateway.runtime.secret import SecretUrl
from gateway.settings.values import LARGEST_PORT, MEBIBYTE, BootstrapServers, Section, check_url


class KafkaOauthConfig(Section):
    """Source of the token for Kafka with `kafka.sasl_mechanism = "OAUTHBEARER"`: one of file, URL and AWS."""

    token_file: Path | None = None
    """file that contains only the token, for example written by Kubernetes; read again for each connection"""
    token_url: SecretUrl | None = None
    """the issuer's token endpoint (client credentials, RFC 6749 part 4.4): `https://`, or `http://` on this machine"""
    client_id: str | None = None
    """client id for the token endpoint"""
    client_secret: SecretStr | None = None
    """client secret for the token endpoint; better set in the environment than in the file"""
    client_secret_file: Path | None = None
    """file with the client secret; read again for each token"""
    scope: str | None = None
    """scope to request from the token endpoint, if it needs one"""
    cafile: Path | None = None
    """CA certificates (PEM) that verify the token endpoint. Not set: the system's"""
    msk_region: str | None = None
    """AWS region of an MSK cluster with IAM. Tokens are signed with the credentials that AWS's library finds. Needs the
    extra `msk` (`pip install trivium[msk]`)"""
    extensions: Mapping[str, str] = {}
    """SASL extensions (KIP-342), such as Confluent Cloud's `logicalCluster` and `identityPoolId`"""

    @model_validator(mode="after")
    def _whole(self) -> KafkaOauthConfig:
        places = [self.token_file, self.token_url, self.msk_region]
        if sum(given is not None for given in places) > 1:
            raise ValueError("token_file, token_url and msk_region exclude each other")
        if self.client_secret is not None and self.client_secret_file is not None:
            raise ValueError("client_secret and client_secret_file exclude each other")
        if self.token_url is not None:
            check_url(self.token_url, "token_url")
            if self.client_id is None or (self.client_secret is None and self.client_secret_file is None):
                raise ValueError("token_url needs client_id, and client_secret or client_secret_file")
        for name, value in self.extensions.items():
            if not name.isalpha() or not name.isascii() or name == "auth" or "\x01" in value:
                raise ValueError(f"extensions: {name} is not a valid extension name, or its value is not valid")
        return self


class KafkaConfig(Section):
    """The connection to Kafka."""

    bootstrap_servers: BootstrapServers | None = None
    """brokers of your Kafka, `host:port,host:port`. Not set: an embedded Kafka is started"""
    client_id: str = "trivium"
    """prefix of the gateway's client ids at the brokers"""
    linger_ms: Annotated[int, Field(ge=0, le=1000)] | None = None
    """longest wait of a request to a broker for more records. It waits only while a processor is busy with many clients
    that each send now and then. Not set: 3. 0: a request never waits"""
    batch_bytes: Annotated[int, Field(ge=1024, le=16 * MEBIBYTE)] = 65536
    """largest batch per partition. Larger batches were not faster in measurements: 505,000 records/s at 64 KiB"""
    compression: Literal["none", "lz4", "zstd"] = "none"
    """compression of batches: `none`, `lz4` or `zstd`; see [compression](#compression)"""
    max_request_bytes: Annotated[int, Field(ge=1024)] = 10 * MEBIBYTE
    """largest request to a broker, and therefore the largest record"""
    delivery_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """how long a record may wait for Kafka's acknowledgement before its sender gets BUSY. The same as in the Java
    client; long enough for a broker's restart"""
    request_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """time-out of a single request to a broker"""
    metadata_max_age_s: Annotated[float, Field(gt=0)] = 30.0
    """maximum age of metadata about topics and partition leaders"""
    group_retention_days: Annotated[int, Field(ge=0, le=36_500)] = 365
    """how long Kafka keeps the position of a group without members (a queue, a subscription or a share name whose
    clients are away), counted from its last commit. 0: as long as the brokers' `offsets.retention.minutes`, usually 7
    days. Afterwards a queue begins anew, and a subscription where it was made. HTTP consumers have the brokers' time"""
    rack: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    """the gateway's rack, as in the brokers' `broker.rack`, for example an availability zone. Records are fetched from
    the nearest replica if the brokers have a suitable `replica.selector.class`"""
    create_topics: bool | None = None
    """whether a topic is created when it is first used. Not set: yes with the embedded Kafka, no with yours"""
    topic_partitions: Annotated[int, Field(ge=1)] = 3
    """partitions of created topics"""
    # Not 1: the cluster's own default says how many replicas the data are worth.
    topic_replication: Annotated[int, Field(ge=1)] | None = None
    """replication factor of created topics, including those of the gateway's own state. Not set: the cluster's
    `default.replication.factor`; brokers before Kafka 2.4 need a number here"""
    # False: a cluster with less replication is its operator's choice, and causes a warning.
    require_safe_topics: bool = False
    """refuse to write to topics whose acknowledged records may be on one broker only, including the gateway's own
    topics: each topic needs at least two replicas and `min.insync.replicas=2`. `false`: only a warning, if there are
    several brokers. See [replication](#replication)"""
    # A topic costs the cluster memory and descriptors permanently, so clients can create only so many (ADR 0109).
    max_topics: Annotated[int, Field(ge=1)] = 5000
    """clients can create topics while the cluster has fewer than this many, whoever created them. A topic costs the
    cluster memory and open files permanently. Kafka's own count decides, so it survives restarts; a subscription to `#`
    is designed for this number. See [topics that clients make](#topics-that-clients-make)"""
    max_partitions: Annotated[int, Field(ge=1)] = 20_000
    """the same limit for partitions, including those of Kafka's internal topics; a few thousand per broker are
    common"""
    max_topics_per_principal: Annotated[int, Field(ge=1)] = 1000
    """how many topics one principal may create at this gateway, counted since its start, minus deleted ones. All
    anonymous clients are one principal. A fifth of `kafka.max_topics`, so that one faulty client leaves topics for the
    others"""
    max_groups: Annotated[int, Field(ge=1)] = 1000
    """consumer groups with connected members at this gateway: share names of MQTT, queues and durable subscriptions of
    AMQP, streams in a group. Each has a Kafka consumer, with two connections. More are refused: SUBACK 0x97,
    `amqp:resource-limit-exceeded`, 429"""
    max_groups_per_client: Annotated[int, Field(ge=1)] | None = None
    """how many of them one client may open, by login name or anonymous address. Not set: a quarter"""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """`PLAINTEXT`, `SSL`, `SASL_PLAINTEXT` or `SASL_SSL`"""
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] | None = None
    """`PLAIN` (the default with SASL), `SCRAM-SHA-256`, `SCRAM-SHA-512` or `OAUTHBEARER`;
    see [logging in to Kafka](operations.md#logging-in-to-kafka)"""
    sasl_username: str | None = None
    """user name for PLAIN and SCRAM"""
    sasl_password: SecretStr | None = None
    """password for PLAIN and SCRAM; better set in the environment than in the file"""
    sasl_password_file: Path | None = None
    """file with the password; read again for each connection"""
    ssl_cafile: Path | None = None
    """CA certificates (PEM) that verify the brokers; read again when the file changes. Not set: the system's"""
    ssl_certfile: Path | None = None
    """client certificate (PEM, with its chain) for brokers that require one; read again when the file changes"""
    ssl_keyfile: Path | None = None
    """private key of the client certificate. Not set: in the same file"""
    ssl_key_password: SecretStr | None = None
    """password of the private key, if it is encrypted"""
    oauth: KafkaOauthConfig = KafkaOauthConfig()

    @model_validator(mode="after")
    def _login(self) -> KafkaConfig:
        if self.sasl_password is not None and self.sasl_password_file is not None:
            raise ValueError("sasl_password and sasl_password_file exclude each other")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile needs ssl_certfile")
        return self


class EmbeddedConfig(Section):
    """The embedded broker: used when `kafka.bootstrap_servers` is not set."""

    port: Annotated[int, Field(ge=0, le=LARGEST_PORT)] = 9092
    """the broker's port; 0: any free port"""
    controller_port: Annotated[int, Field(ge=0, le=LARGEST_PORT)] = 0
    """port of the KRaft controller, on loopback only; 0: any free port"""
    heap: Annotated[str, Field(pattern=r"^\d+[mg]$")] = "1g"
    """Java heap of the broker, such as `512m`"""


class BudgetConfig(Section):
    """Bounds on data in flight: to Kafka until it is answered, and to clients until it is read and settled."""

    process_bytes: Annotated[int, Field(ge=MEBIBYTE)] = 256 * MEBIBYTE
    """bytes in flight to Kafka from the whole process: the main bound on memory"""
    process_records: Annotated[int, Field(ge=1)] = 1_000_000
    """records in flight to Kafka from the whole process: small records cost more memory in objects than in bytes"""
    connection_bytes: Annotated[int, Field(ge=65536)] = 32 * MEBIBYTE
    """bytes in flight to Kafka from one connection, so that one client cannot use up the whole budget; the same amount
    again for incomplete AMQP messages"""
    topic_bytes: Annotated[int, Field(ge=MEBIBYTE)] = 128 * MEBIBYTE
    """bytes in flight to one Kafka topic, so that a slow topic slows its own senders first"""
    # A connection that reads nothing costs little; thousands that have credit for everything would cost the process.
    outgoing_bytes: Annotated[int, Field(ge=MEBIBYTE)] = 256 * MEBIBYTE
    """bytes in flight to all receivers of all protocols: messages that are sent but not yet read or settled, plus 512
    bytes for each unsettled message, and HTTP responses that are not yet read. No receiver gets more than is free. The
    first 16 KiB of each socket and of each AMQP link do not count"""
    login_bytes: Annotated[int, Field(ge=MEBIBYTE)] = 64 * MEBIBYTE
    """bytes for all connections that have not logged in: data received from them, and 48 KiB for each TLS handshake in
    progress (about 1,300 at a time). Above it, the oldest connection of the address with the most bytes is closed"""


class RuleConfig(Section):
    """One `[[mapping.rules]]` entry; see `mapping.rules`."""

    mqtt: str
    topic: str
    key: str | None = None


class MappingConfig(Section):
    """The mapping from addresses to Kafka topics and keys."""

    rules: tuple[RuleConfig, ...] = ()
    """rules from MQTT topics to Kafka topics and keys; see [below](#mapping-rules)"""
    presets: tuple[Literal["sparkplug"], ...] = ()
    """rules that come with the gateway, behind those of `mapping.rules`; see [below](#presets)"""
    catch_all_topic: str = "mqtt"
    """Kafka topic for MQTT topics whose first level is not a valid Kafka topic name"""
    max_headers: Annotated[int, Field(ge=100, le=100_000)] = 1000
    """the most headers of a message: user properties, application properties, headers. One with more is refused: 0x97,
    `amqp:resource-limit-exceeded`, 422. Hundreds of thousands, which fit into a message, would hold up all clients.
    Readers step over a record of a native producer with more, as over one that nothing can read. Up to 64 of the
    gateway's own come on top"""
    dotted_topics: tuple[str, ...] | None = None
    """the names with a dot that may be Kafka topics of clients: names, and patterns with `*` for any characters, such
    as `["orders.*", "plant.v1"]`; see [below](#names-with-dots). Not set: all; `[]`: none"""
