"""The listeners and limits of MQTT, AMQP, HTTP and management."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from gateway.settings.values import MEBIBYTE, Address, Origin, Section
from mapping.record import is_topic_name


class MqttConfig(Section):
    """MQTT 5 and 3.1.1."""

    address: Address = Address("127.0.0.1:1883")
    """where MQTT clients connect"""
    proxy_protocol: bool = False
    """it is behind load balancers that say whose a connection is; see [below](#behind-a-load-balancer)"""
    receive_maximum: Annotated[int, Field(ge=1, le=65535)] = 256
    """QoS 1 messages of a client that wait for their PUBACK"""
    enforce_receive_maximum: bool = True
    """`false` tolerates clients that send more (some deployed ones do)"""
    max_packet_bytes: Annotated[int, Field(ge=128, le=268_435_460)] = 2 * MEBIBYTE
    """largest packet, announced in CONNACK"""
    max_connect_bytes: Annotated[int, Field(ge=128)] = 65536
    """largest packet before login: a peer is a stranger then"""
    topic_alias_maximum: Annotated[int, Field(ge=0, le=65535)] = 64
    """topic aliases that a client may set"""
    max_keep_alive_s: Annotated[int, Field(ge=1, le=65535)] = 1200
    """longer ones, and none, are replaced by this (5: told so in CONNACK; a 3.1.1 client keeps its own)"""
    connect_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """time for CONNECT"""
    outgoing_inflight: Annotated[int, Field(ge=1, le=65535)] = 1000
    """QoS 1 messages to a client that wait for its PUBACK; the client's Receive Maximum, if lower"""
    outgoing_aliases: Annotated[int, Field(ge=0, le=65535)] = 64
    """topic aliases that a client is given, for the topics it is sent most; its Topic Alias Maximum, if lower. `0`:
    none"""
    max_subscriptions: Annotated[int, Field(ge=1)] = 1000
    """filters of one session; more get 0x97"""
    partial_subscriptions: bool = True
    """grant a filter of which the [access list](#access-list) denies a part, and deliver the rest: messages are judged
    one by one anyway. `false`: refuse it with 0x87"""
    maximum_qos: Annotated[int, Field(ge=0, le=2)] = 2
    """highest QoS of messages from clients, and granted to subscriptions"""
    session_expiry_max_s: Annotated[int, Field(ge=0, le=0xFFFFFFFF)] = 604_800
    """longest Session Expiry Interval; asked for more, a client is told this one. Sessions of 3.1.1 clients with clean
    session 0 are kept for so long. `4294967295`: no end. The default is a week, as long as Kafka keeps records"""
    report_no_subscribers: bool = False
    """answer QoS 1 with 0x10 (success, no matching subscribers) when no connected MQTT client subscribes to a topic;
    who else reads it from Kafka is not known"""
    echo_wait_ms: Annotated[int, Field(ge=0, le=60_000)] = 0
    """longest time in milliseconds that PUBACK and PUBCOMP of a message wait until the client that published it, and
    is subscribed to it, was sent its own copy ([why not always](adr/0021-own-messages-first.md)); `0`: they do not
    wait"""
    check_payload_format: bool = False
    """check that a payload is UTF-8 text if its Payload Format Indicator says so; it gets 0x99 if not. It reads every
    text payload, which costs"""
    acknowledge_refused: bool = False
    """what a client of MQTT 3.1.1 is told of a message that can never be stored (no right, no such topic, a limit of
    topics): the protocol has no word for it but closing the connection, after which many clients send the same
    again; then it is [kept aside](mqtt.md#refused-and-how) and acknowledged. `true` acknowledges it at once and drops
    it, counted as refused ([MQTT311-3.3.5-2] allows either); nothing else that is not stored is ever acknowledged"""
    response_information: str | None = "replies/{client}"
    """Response Information for clients that ask for it"""
    server_reference: str | None = None
    """where clients shall go when this gateway stops: DISCONNECT 0x9C with this Server Reference instead of 0x8B"""
    websocket_address: Address | None = None
    """a listener for MQTT over WebSocket alone, at any path; the HTTP port has it at `/mqtt` anyway"""
    state_partitions: Annotated[int, Field(ge=1, le=1000)] = 8
    """partitions of `__trivium_sessions`, `__trivium_retained`, `__trivium_requests` and `__trivium_groups` when they
    are created. An existing topic keeps its own; never change the number of an existing one, since a key's versions
    would then lie in two partitions"""
    max_retained: Annotated[int, Field(ge=1)] = 1_000_000
    """retained messages of all clients; a further topic gets 0x97; all of them are in memory"""
    max_retained_bytes: Annotated[int, Field(ge=MEBIBYTE)] = 512 * MEBIBYTE
    """what they may be counted for in memory: topic, payload and headers, and 500 bytes each"""


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
    """where AMQP peers connect"""
    proxy_protocol: bool = False
    """it is behind load balancers that say whose a connection is; see [below](#behind-a-load-balancer)"""
    websocket_address: Address | None = None
    """a listener for AMQP over WebSocket alone, at any path; the HTTP port has it at `/amqp` anyway"""
    redirect: Address | None = None
    """where peers shall go when this gateway stops: they are closed with `amqp:connection:redirect` to it instead of
    `amqp:connection:forced`"""
    addresses: tuple[AddressRule, ...] = ()
    """which plain addresses are queues; see [below](#addresses-that-are-queues)"""
    max_frame_bytes: Annotated[int, Field(ge=512)] = 65536
    """largest frame"""
    channel_max: Annotated[int, Field(ge=0, le=65535)] = 63
    """highest channel: 64 sessions on one connection"""
    links_per_session: Annotated[int, Field(ge=1)] = 256
    """more are detached with `amqp:resource-limit-exceeded`"""
    idle_timeout_s: Annotated[float, Field(ge=0)] = 60.0
    """silence after which a peer is gone; half of it is announced; 0: never"""
    open_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """time from connecting to open"""
    link_credit: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """largest window of a sender's link in messages: what it grows to while no more waits than keeps Kafka busy.
    Throughput of a link is at most its window / (Kafka's latency + that of the client's network): 1,000 at 5 ms are
    200,000 a second"""
    # What an MQTT client may have on the way, which cannot be changed while it is connected: beside such clients a link
    # with less would get less than its share.
    link_credit_least: Annotated[int, Field(ge=1, le=100_000)] = 256
    """smallest window, with which each link begins, and to which it shrinks while more waits than keeps Kafka busy; as
    large as `amqp.link_credit`: the window stays as it is"""
    link_bytes: Annotated[int, Field(ge=65536)] = 4 * MEBIBYTE
    """the window in bytes, by the average message size"""
    # The engine announces it in whole frames, however small the transfers are: 128 MiB / 64 KiB = 2,048 of them, twice
    # one link's credit. It holds none of those bytes: each transfer is taken out of it as it is read.
    session_window_bytes: Annotated[int, Field(ge=65536)] = 128 * MEBIBYTE
    """a session's incoming window, announced in transfers: these bytes / `max_frame_bytes` = 2,048. Below the credit
    of all links of a session it is the window that slows them; it reserves no memory"""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 * MEBIBYTE
    """largest body of a message; above it `rejected`, `amqp:link:message-size-exceeded`"""
    # What is announced: AMQP counts all sections. 1 MiB of it is for those beside the body.
    max_message_bytes: Annotated[int, Field(ge=1024)] = 5 * MEBIBYTE
    """largest message with all its sections, announced on attach: 4 MiB of body and 1 MiB beside it; or the topic's
    own limit (`max.message.bytes`), if lower. Kafka's default is 1 MiB, the embedded broker's 10 MiB"""
    max_unsettled: Annotated[int, Field(ge=1)] = 10_000
    """messages sent on a receiver's link without an outcome: credit alone does not bound them"""
    dead_letter_topic: str | None = None
    """where records go that a group's AMQP receivers cannot take, such as `{topic}-dlq`: `{topic}` stands for the
    record's own topic. It must be there, or `kafka.create_topics` be set. Not set: what is rejected is done with,
    and what fails is offered on and on"""
    max_attempts: Annotated[int, Field(ge=1)] = 10
    """how often a record may fail (`modified` with delivery-failed, or the connection breaks while it is unsettled)
    before it is a dead letter; counted in memory while the group has receivers at this gateway; the default is that
    of Artemis"""
    reply_topic: str = "replies"
    """the Kafka topic of temporary queues and topics, which are keys of it. It must be there, or `kafka.create_topics`
    be set; a retention of an hour is plenty. Who answers needs the right to publish to it"""
    max_transactions: Annotated[int, Field(ge=0)] = 1000
    """transactions that may be open; a further declare is rejected with `amqp:resource-limit-exceeded`. An empty one
    costs some hundred bytes; 0: none; a JMS session has one open all the time"""
    transaction_producers: Annotated[int, Field(ge=1, le=1000)] = 16
    """Kafka producers for them, each started when it is needed and closed after five idle minutes: so many
    transactions can have something in them at a time, the others wait. Their transactional ids are
    `trivium-<gateway>-<n>`: where Kafka has ACLs, the gateway needs Write for that prefix. Two already carry 18,000
    messages a second, 100 in a transaction"""
    transaction_timeout_s: Annotated[float, Field(ge=1, le=880)] = 60.0
    """from a transaction's first message to its discharge; then it is rolled back. While it is open it holds back
    every reader of the partitions that it has written to. 15 s more must not be over the broker's
    `transaction.max.timeout.ms`"""

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
    """where a consumer begins that has no committed offset, and does not say it when it is created: `earliest`,
    `latest` or `none`"""
    enable_auto_commit: bool = True
    """whether it commits by itself, where it does not say it"""
    fetch_min_bytes: Annotated[int, Field(ge=0, lt=2**31)] = 1
    """how much Kafka gathers for it before it answers"""
    isolation_level: Literal["read_committed", "read_uncommitted"] = "read_committed"
    """or `read_uncommitted`: records of open transactions too"""


class HttpConfig(Section):
    """HTTP/1.1."""

    address: Address = Address("127.0.0.1:8080")
    """where HTTP clients connect, and WebSockets at their paths"""
    proxy_protocol: bool = False
    """it is behind load balancers that say whose a connection is; see [below](#behind-a-load-balancer)"""
    dialect: Literal["strimzi", "confluent"] = "strimzi"
    """whose operations stand at the paths that both dialects have (`/topics/T`, `/consumers/G`, ...): `"strimzi"` or
    `"confluent"`; Confluent's are always below `/v2`"""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 8 * MEBIBYTE
    """largest request body"""
    max_records: Annotated[int, Field(ge=1)] = 10_000
    """records in one request"""
    max_concurrent: Annotated[int, Field(ge=1)] = 1024
    """produce requests that wait for Kafka at once; more get 503"""
    max_uploads: Annotated[int, Field(ge=1)] = 128
    """[uploads of lines](http.md#uploads) at once; more get 503"""
    idempotency_window_s: Annotated[float, Field(gt=0, le=7 * 86400)] = 3600.0
    """how long a request's answer is kept for its [`Idempotency-Key`](http.md#once); the topic `__trivium_requests` is
    created for it"""
    max_idempotency_keys: Annotated[int, Field(ge=1)] = 100_000
    """keys that are kept at once; more get 503"""
    compress_from_bytes: Annotated[int, Field(ge=1)] = 4096
    """answers of this size and more are compressed (zstd, gzip, deflate) for clients that accept it"""
    max_line_bytes: Annotated[int, Field(ge=1024)] = 2 * MEBIBYTE
    """the longest line of an upload; a longer one is an error in its place"""
    max_consumers: Annotated[int, Field(ge=1)] = 1000
    """consumer instances; more get 429"""
    consumer: ConsumerDefaults = ConsumerDefaults()
    consumer_idle_s: Annotated[float, Field(gt=0)] = 300.0
    """a consumer that nobody uses, or that has not read a poll's answer, is removed after this: it would keep its
    partitions"""
    max_poll_wait_s: Annotated[float, Field(gt=0)] = 300.0
    """largest `timeout` of a poll"""
    default_poll_wait_ms: Annotated[int, Field(ge=0)] = 100
    """a poll's `timeout` where none is given, as in the Strimzi bridge"""
    poll_max_bytes: Annotated[int, Field(ge=1024)] = 64 * MEBIBYTE
    """largest answer of a poll"""
    header_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """time for a request's head, between requests, and for a body to begin to flow"""
    max_streams: Annotated[int, Field(ge=1)] = 10_000
    """streams of events, and as many WebSockets of HTTP; more are answered 503"""
    stream_heartbeat_s: Annotated[float, Field(gt=0)] = 15.0
    """a stream without events says so often that it is alive: proxies close what is silent for 30 to 60 s"""
    reply_topic: str = "replies"
    """the Kafka topic of devices' answers (`POST /requests/{address}`), which are keys of it; as `amqp.reply_topic`"""
    max_requests: Annotated[int, Field(ge=1)] = 1000
    """requests that wait for a device at once; more are answered 503"""
    max_request_wait_s: Annotated[float, Field(gt=0)] = 300.0
    """largest `timeout` of a request to a device"""
    max_active: Annotated[int, Field(ge=1)] = 20_000
    """requests in work at once, waiting polls among them (streams have their own limit); more are answered 503"""
    max_active_per_client: Annotated[int, Field(ge=1)] = 5_000
    """the same of one client: its login's name, or the address of an anonymous one; more are answered 429"""
    max_consumers_per_group: Annotated[int, Field(ge=1)] = 1000
    """consumer instances of one group; more get 429"""
    max_header_bytes: Annotated[int, Field(ge=1024, le=MEBIBYTE)] = 16 * 1024
    """a request's line, and each field of its head; longer is a 431 (a 414 for the line); proxies send long tokens"""
    max_headers: Annotated[int, Field(ge=10, le=1000)] = 100
    """fields of a request's head; more are a 431"""
    max_head_bytes: Annotated[int, Field(ge=1024)] = 65536
    """a request's head altogether; larger is a 431"""
    min_upload_rate: Annotated[int, Field(ge=1)] = 16 * 1024
    """bytes a second that a body must make on average after `http.header_timeout_s`; slower is a 408"""
    cors_origins: tuple[Origin, ...] = ()
    """whose pages may call from a browser, such as `https://app.example`; `*` is everybody's"""

    @model_validator(mode="after")
    def _reply_topic(self) -> HttpConfig:
        if not is_topic_name(self.reply_topic):
            raise ValueError("reply_topic: no name of a topic that clients may use")
        return self


class DrainConfig(Section):
    """How clients leave a gateway that stops: SIGTERM, `trivium drain`."""

    lead_s: Annotated[float | None, Field(ge=0, le=3600)] = None
    """how long clients are served as ever after `/ready` has said no: longer than balancers need to see it. Without it
    5; 0 with the embedded Kafka, where no other gateway is"""
    rate_per_s: Annotated[float, Field(gt=0)] = 500.0
    """in no second more connections than this, and one, are sent away, of all protocols: what the other gateways can
    log in"""
    limit_s: Annotated[float, Field(gt=0)] = 300.0
    """the lead and the leaving end after this at the latest; then everybody who is left is closed within
    `drain_timeout_s`"""


class PresenceConfig(Section):
    """Who is connected, as a Kafka topic; see [operations](operations.md#presence)."""

    topic: str | None = None
    """the compacted topic, such as `presence`, with a record for every client that connects or leaves. Clients read it
    as any topic and cannot write it. With it an MQTT client id has one connection over all gateways, whatever its
    session. All gateways of a Kafka must have the same. Without it: off"""
    keep_offline_s: Annotated[int, Field(ge=60)] = 604_800
    """how long a client that is gone keeps its record; then it is deleted"""

    @field_validator("topic")
    @classmethod
    def _legal(cls, topic: str | None) -> str | None:
        if topic and not is_topic_name(topic):
            raise ValueError("no name of a topic that clients may use")
        return topic or None


class ManagementConfig(Section):
    """`/healthy`, `/ready` and `/metrics`."""

    address: Address = Address("127.0.0.1:8081")
    """`/healthy`, `/ready`, `/metrics`, `/flow`, `/topics`, `/clients`, `/console`, `POST /trace` and `POST /drain`.
    Beyond loopback all but the first two need a password with the right `admin` when clients need one"""
    spark_jobs: Annotated[tuple[Address, ...], Field(max_length=32)] = ()
    """where Spark jobs tell their metrics (`run.metrics` of a job file). The console shows those jobs too, and asks
    them only while somebody looks"""
