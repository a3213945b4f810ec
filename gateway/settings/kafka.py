"""Kafka, the embedded broker, budgets, and the mapping onto topics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, model_validator

from gateway.secret import SecretUrl
from gateway.settings.values import LARGEST_PORT, MEBIBYTE, Address, BootstrapServers, Section


class KafkaOauthConfig(Section):
    """Where the token for Kafka comes from, with `kafka.sasl_mechanism = "OAUTHBEARER"`: one of three places."""

    token_file: Path | None = None
    """a file with the token alone, such as one that Kubernetes writes; read again for each connection"""
    token_url: SecretUrl | None = None
    """the issuer's token endpoint (client credentials, RFC 6749 part 4.4): `https://`, or `http://` on this machine"""
    client_id: str | None = None
    """for the token endpoint"""
    client_secret: SecretStr | None = None
    """for the token endpoint; better in the environment than in a file"""
    client_secret_file: Path | None = None
    """a file with it, read again for each token"""
    scope: str | None = None
    """what to ask the token endpoint for, if it must be said"""
    cafile: Path | None = None
    """authorities of the token endpoint's certificate; not set: the system's"""
    msk_region: str | None = None
    """AWS's region of an MSK cluster with IAM: tokens are signed with the credentials that AWS's own library finds.
    Needs the package of the extra `msk` (`pip install trivium[msk]`)"""
    extensions: Mapping[str, str] = {}
    """extensions of the SASL message (KIP-342), such as Confluent Cloud's `logicalCluster` and `identityPoolId`"""

    @model_validator(mode="after")
    def _whole(self) -> KafkaOauthConfig:
        places = [self.token_file, self.token_url, self.msk_region]
        if sum(place is not None for place in places) > 1:
            raise ValueError("token_file, token_url and msk_region exclude each other")
        if self.client_secret is not None and self.client_secret_file is not None:
            raise ValueError("client_secret and client_secret_file exclude each other")
        if self.token_url is not None:
            parts = urlsplit(self.token_url.get_secret_value())
            near = parts.scheme == "http" and Address(f"{parts.hostname}:0").is_loopback
            if not parts.hostname or not (parts.scheme == "https" or near):
                raise ValueError("token_url: expected https://..., or http:// on this machine")
            if self.client_id is None or (self.client_secret is None and self.client_secret_file is None):
                raise ValueError("token_url needs client_id, and client_secret or client_secret_file")
        for name, value in self.extensions.items():
            if not name.isalpha() or not name.isascii() or name == "auth" or "\x01" in value:
                raise ValueError(f"extensions: {name} is no name of an extension, or has no value for one")
        return self


class KafkaConfig(Section):
    """How the gateway talks to Kafka."""

    bootstrap_servers: BootstrapServers | None = None
    """your Kafka, `host:port,host:port`; not set: the embedded one is started"""
    client_id: str = "trivium"
    """prefix of the client ids that brokers see"""
    linger_ms: Annotated[int, Field(ge=0, le=1000)] = 0
    """wait for a fuller batch. 0: the open batch fills while its predecessor is answered, which needs no timer"""
    batch_bytes: Annotated[int, Field(ge=1024, le=16 * MEBIBYTE)] = 65536
    """largest batch per partition; larger ones brought no more in measurements; 505,000 records a second at 64 KiB"""
    compression: Literal["none", "lz4", "zstd"] = "none"
    """of batches: `none`, `lz4`, `zstd`; see [compression](#compression)"""
    max_request_bytes: Annotated[int, Field(ge=1024)] = 10 * MEBIBYTE
    """largest request to a broker, so also the largest record"""
    delivery_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """how long a record may wait for its acknowledgement before its sender is told BUSY; as the Java client, so that a
    broker may restart in it"""
    request_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """of a single request"""
    metadata_max_age_s: Annotated[float, Field(gt=0)] = 30.0
    """how old the knowledge of topics and leaders may become"""
    rack: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    """where the gateway runs, as the brokers' `broker.rack` names it, such as an availability zone: records are fetched
    from the nearest copy, if the brokers have a `replica.selector.class` for that"""
    create_topics: bool | None = None
    """create a topic at its first use. Not set: yes on the embedded Kafka, no on yours"""
    topic_partitions: Annotated[int, Field(ge=1)] = 3
    """partitions of created topics"""
    # Not 1: whoever runs a cluster has said there how many copies his data are worth.
    topic_replication: Annotated[int, Field(ge=1)] | None = None
    """replicas of created topics, those of the gateway's own state included. Not set: the cluster's
    `default.replication.factor`. Brokers before Kafka 2.4 need a number here"""
    # False: a cluster that was set up otherwise is its operator's choice, and is told of.
    require_safe_topics: bool = False
    """write to no topic of which one broker alone may hold what is acknowledged, the gateway's own included: each needs
    two copies and `min.insync.replicas=2` at least. Not set: such topics are warned of where there are several brokers.
    See [replication](#replication)"""
    # A topic stays, and costs the cluster memory and descriptors for good: what clients make has an end (ADR 0035).
    max_topics: Annotated[int, Field(ge=1)] = 5000
    """how many topics there may be, whoever made them, for clients to make another one. A topic stays, and costs the
    cluster memory and open files for good. Kafka's own count decides, so no restart forgets it; a subscription to
    `#` is made for so many. See [topics that clients make](#topics-that-clients-make)"""
    max_partitions: Annotated[int, Field(ge=1)] = 20_000
    """the same for partitions, those of Kafka's own topics included; some thousands a broker are usual"""
    max_topics_per_principal: Annotated[int, Field(ge=1)] = 1000
    """how many topics one principal may make at this gateway, counted since its start, less those that were deleted;
    anonymous clients are one principal. A fifth of all: one client that has gone wrong leaves some for the others"""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """`PLAINTEXT`, `SSL`, `SASL_PLAINTEXT`, `SASL_SSL`"""
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] | None = None
    """`PLAIN` (as if not set), `SCRAM-SHA-256`, `SCRAM-SHA-512`, `OAUTHBEARER`;
    see [logging in to Kafka](operations.md#logging-in-to-kafka)"""
    sasl_username: str | None = None
    """for PLAIN and SCRAM"""
    sasl_password: SecretStr | None = None
    """for PLAIN and SCRAM; better in the environment than in a file"""
    sasl_password_file: Path | None = None
    """a file with it, read again for each connection"""
    ssl_cafile: Path | None = None
    """authorities of the brokers' certificates, read again when it changes; not set: the system's"""
    ssl_certfile: Path | None = None
    """a client certificate (PEM, with its chain) for brokers that ask for one; read again when it changes"""
    ssl_keyfile: Path | None = None
    """its key; not set: in the same file"""
    ssl_key_password: SecretStr | None = None
    """of the key, if it is encrypted"""
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
    """0: a free one"""
    controller_port: Annotated[int, Field(ge=0, le=LARGEST_PORT)] = 0
    """of the KRaft controller, loopback only"""
    heap: Annotated[str, Field(pattern=r"^\d+[mg]$")] = "1g"
    """Java heap, such as `512m`"""


class BudgetConfig(Section):
    """Bounds on what is on its way: to Kafka and not answered yet, and to clients and not read or settled yet."""

    process_bytes: Annotated[int, Field(ge=MEBIBYTE)] = 256 * MEBIBYTE
    """of the process: the main bound on memory"""
    process_records: Annotated[int, Field(ge=1)] = 1_000_000
    """of the process: small records cost more in objects than in bytes"""
    connection_bytes: Annotated[int, Field(ge=65536)] = 32 * MEBIBYTE
    """of one connection, so that one client cannot take the whole budget; and as much for parts of its AMQP messages"""
    topic_bytes: Annotated[int, Field(ge=MEBIBYTE)] = 128 * MEBIBYTE
    """of one Kafka topic, so that one slow topic slows its own senders first"""
    # A connection that reads nothing costs little; thousands that have credit for everything would cost the process.
    outgoing_bytes: Annotated[int, Field(ge=MEBIBYTE)] = 256 * MEBIBYTE
    """of all receivers of all protocols: what they were sent and have neither read nor settled, 512 bytes for each
    unsettled message beside its own, and answers of HTTP that are not read. Nobody may have more than is free; 16 KiB
    of each socket and of each AMQP link are not counted"""
    login_bytes: Annotated[int, Field(ge=MEBIBYTE)] = 64 * MEBIBYTE
    """of all connections that have not logged in: what they have sent, and 48 KiB for each TLS handshake under way (so
    some 1,300 at once). Beyond it the oldest connection of the address that holds the most is cut off"""


class RuleConfig(Section):
    """One `[[mapping.rules]]` entry; see `mapping.rules`."""

    mqtt: str
    topic: str
    key: str | None = None


class MappingConfig(Section):
    """From addresses to Kafka topics and keys."""

    rules: tuple[RuleConfig, ...] = ()
    """from MQTT topics to Kafka topics and keys; see [below](#mapping-rules)"""
    catch_all_topic: str = "mqtt"
    """the Kafka topic of MQTT topics whose first level is no Kafka topic name"""
    # None: all where the gateway makes no topics, none where it does: Kafka takes a.b and a_b for one name (ADR 0035).
    dotted_topics: tuple[str, ...] | None = None
    """first levels with a dot that are Kafka topics of their own, such as `["orders.v1"]`; see
    [below](#mapping-rules). Not set: all of them where the gateway makes no topics, none where it does"""
