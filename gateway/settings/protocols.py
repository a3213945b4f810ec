"""Settings of MQTT, AMQP, HTTP, draining, presence and management."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from gateway.settings.values import MEBIBYTE, Address, Origin, Section
from mapping.record import is_topic_name

Share = Annotated[int, Field(ge=1)] | None
"""One client's share of a limit; see `flowcontrol.admission.client_share`."""


class MqttConfig(Section):
    """MQTT 5 and 3.1.1."""

    address: Address = Address("127.0.0.1:1883")
    """the address for MQTT clients"""
    proxy_protocol: bool = False
    """the listener is behind load balancers that send PROXY headers; see [below](#behind-a-load-balancer)"""
    receive_maximum: Annotated[int, Field(ge=1, le=65535)] = 256
    """QoS 1 and 2 messages from a client that may be in flight"""
    enforce_receive_maximum: bool = True
    """`false` tolerates clients that exceed it (some deployed ones do)"""
    max_packet_bytes: Annotated[int, Field(ge=128, le=268_435_460)] = 2 * MEBIBYTE
    """largest packet, announced in CONNACK"""
    max_connect_bytes: Annotated[int, Field(ge=128)] = 65536
    """largest packet before the login, when the client is not yet trusted"""
    topic_alias_maximum: Annotated[int, Field(ge=0, le=65535)] = 64
    """topic aliases that a client may use"""
    max_keep_alive_s: Annotated[int, Field(ge=1, le=65535)] = 1200
    """longest Keep Alive. A longer one, or none, is replaced by this value (MQTT 5: announced in CONNACK; a 3.1.1
    client keeps its own)"""
    connect_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """time within which a client must send CONNECT"""
    outgoing_inflight: Annotated[int, Field(ge=1, le=65535)] = 1000
    """QoS 1 and 2 messages to a client that may be in flight; the client's Receive Maximum applies if lower"""
    outgoing_aliases: Annotated[int, Field(ge=0, le=65535)] = 64
    """topic aliases used for messages to a client, for its most frequent topics; its Topic Alias Maximum applies if
    lower. 0: none"""
    max_subscriptions: Annotated[int, Field(ge=1)] = 10_000
    """subscriptions of one session; further ones get 0x97. Home Assistant has one for each entity"""
    partial_subscriptions: bool = True
    """grant a filter that the [access list](#access-list) denies in part, and deliver only the allowed messages, which
    are checked one by one anyway. `false`: refuse such a filter with 0x87"""
    maximum_qos: Annotated[int, Field(ge=0, le=2)] = 2
    """highest QoS of messages from clients and of granted subscriptions"""
    session_expiry_max_s: Annotated[int, Field(ge=0, le=0xFFFFFFFF)] = 604_800
    """longest Session Expiry Interval; a client that asks for more gets this. Sessions of 3.1.1 clients with clean
    session 0 are kept for this time. `4294967295`: no expiry. The default is a week, like Kafka's default retention"""
    report_no_subscribers: bool = False
    """acknowledge QoS 1 messages with 0x10 (success, no matching subscribers) if no connected MQTT client subscribes to
    the topic; other consumers in Kafka are not known"""
    echo_wait_ms: Annotated[int, Field(ge=0, le=60_000)] = 0
    """if the publisher of a message also subscribes to it: how long PUBACK and PUBCOMP wait for its own copy to be sent
    first ([why this is off by default](adr/0021-self-delivery-before-acknowledgement.md)). 0: they do not wait"""
    check_payload_format: bool = False
    """check that a payload is valid UTF-8 if its Payload Format Indicator says so, and refuse it with 0x99 if not.
    Costs CPU time for every text payload"""
    acknowledge_refused: bool = False
    """how to answer an MQTT 3.1.1 client whose message can never be stored (not authorized, no such topic, topic limit
    reached). The protocol has no error answer, so by default the connection is closed; many clients then send the same
    message again, which is [kept aside](mqtt.md#refused-and-how) and acknowledged. `true` acknowledges the message
    immediately and drops it, counted as refused ([MQTT311-3.3.5-2] allows either). No other message is ever
    acknowledged without being stored"""
    response_information: str | None = "replies/{client}"
    """Response Information for clients that request it"""
    server_reference: str | None = None
    """Server Reference for clients when this gateway stops: they get DISCONNECT 0x9C with it instead of 0x8B"""
    websocket_address: Address | None = None
    """address of a listener for MQTT over WebSocket only, at any path; the HTTP listener has it at `/mqtt` anyway"""
    state_partitions: Annotated[int, Field(ge=1, le=1000)] = 8
    """partitions of `__trivium_sessions`, `__trivium_retained`, `__trivium_requests` and `__trivium_groups` when they
    are created. Existing topics keep their number. Never change it, because the records of one key would then be in two
    partitions"""
    max_sessions: Annotated[int, Field(ge=1)] = 1_000_000
    """sessions that are kept without a connection, and those with a will, of all clients of the Kafka cluster. Every
    gateway holds them in memory. A CONNECT that would make one more gets 0x97 (3.1.1: 3); stored sessions are always
    loaded and given to their clients"""
    max_session_bytes: Annotated[int, Field(ge=MEBIBYTE)] = 512 * MEBIBYTE
    """bytes of their records: subscriptions and wills, plus 500 bytes each. More get 0x97, also a SUBSCRIBE"""
    # Not a quarter: often all devices share one login, and then the share would be the limit.
    max_sessions_per_principal: Annotated[int, Field(ge=0)] = 0
    """the same for the sessions of one principal; all anonymous clients are one. 0: no limit of its own. Set it where
    each device has a login"""
    max_session_bytes_per_principal: Annotated[int, Field(ge=0)] = 0
    """the same for the bytes of one principal's sessions; 0: no limit of its own"""
    max_retained: Annotated[int, Field(ge=1)] = 1_000_000
    """retained messages of all clients; further ones get 0x97. All of them are held in memory"""
    max_retained_bytes: Annotated[int, Field(ge=MEBIBYTE)] = 512 * MEBIBYTE
    """bytes of memory for all retained messages: topic, payload and headers, plus 500 bytes each"""
    max_retained_per_principal: Annotated[int, Field(ge=0)] = 0
    """the same for what one principal has retained; all anonymous clients are one. 0: no limit of its own"""
    max_retained_bytes_per_principal: Annotated[int, Field(ge=0)] = 0
    """the same for their bytes; 0: no limit of its own"""


class AddressRule(Section):
    """One `[[amqp.addresses]]` entry: whether plain addresses are queues or topics; the first match decides."""

    pattern: str  # an MQTT filter over the address: `jobs/#` matches `jobs` and all below
    type: Literal["queue", "topic"]

    @field_validator("pattern")
    @classmethod
    def _is_filter(cls, pattern: str) -> str:
        levels = pattern.split("/")
        if not pattern or any(("#" in level or "+" in level) and level not in ("#", "+") for level in levels):
            raise ValueError("+ and # must be whole levels")
        if "#" in levels[:-1]:
            raise ValueError("# must be the last level")
        return pattern


class AmqpConfig(Section):
    """AMQP 1.0."""

    address: Address = Address("127.0.0.1:5672")
    """the address for AMQP clients"""
    proxy_protocol: bool = False
    """the listener is behind load balancers that send PROXY headers; see [below](#behind-a-load-balancer)"""
    websocket_address: Address | None = None
    """address of a listener for AMQP over WebSocket only, at any path; the HTTP listener has it at `/amqp` anyway"""
    redirect: Address | None = None
    """where clients are redirected when this gateway stops: with `amqp:connection:redirect` instead of
    `amqp:connection:forced`"""
    addresses: tuple[AddressRule, ...] = ()
    """which plain addresses are queues and which are topics; see [below](#addresses-that-are-queues)"""
    max_frame_bytes: Annotated[int, Field(ge=512)] = 65536
    """largest frame"""
    channel_max: Annotated[int, Field(ge=0, le=65535)] = 63
    """highest channel number; the default allows 64 sessions per connection"""
    links_per_session: Annotated[int, Field(ge=1)] = 256
    """links of one session; further ones are detached with `amqp:resource-limit-exceeded`"""
    idle_timeout_s: Annotated[float, Field(ge=0)] = 60.0
    """a client that sends nothing for this time is disconnected; half of it is announced. 0: never"""
    open_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """time within which a client must send open"""
    link_credit: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """largest credit window of a sender's link, in messages. The window grows up to this while Kafka keeps up. A link's
    throughput is at most window / (latency of Kafka + client's network): 1,000 at 5 ms are 200,000 messages/s"""
    # The same as MQTT's Receive Maximum, which is fixed for a connection: next to MQTT clients a link with less would
    # get less than its share.
    link_credit_least: Annotated[int, Field(ge=1, le=100_000)] = 256
    """smallest credit window: the initial one, to which it shrinks again while Kafka falls behind. If it equals
    `amqp.link_credit`, the window is fixed"""
    ordered_by: Literal["connection", "link"] = "connection"
    """whose messages without a key are stored in one partition of a topic, and so in order: those of a `connection`,
    as JMS promises for the producers of a session, or of each `link`, so that the links of one connection use several
    partitions"""
    link_bytes: Annotated[int, Field(ge=65536)] = 4 * MEBIBYTE
    """largest window of a link in bytes; converted to messages by their average size"""
    # The engine announces it in whole frames, however small the transfers are: 128 MiB / 64 KiB = 2,048 frames, twice
    # one link's credit. It buffers none of these bytes: each transfer is taken out when it is read.
    session_window_bytes: Annotated[int, Field(ge=65536)] = 128 * MEBIBYTE
    """a session's incoming window, announced in transfers: `session_window_bytes` / `max_frame_bytes` = 2,048. If the
    links of a session have more credit in total, this window limits them. It reserves no memory"""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 * MEBIBYTE
    """largest body of a message; larger ones are rejected with `amqp:link:message-size-exceeded`"""
    # AMQP announces the size of all sections: 1 MiB is for the sections besides the body.
    max_message_bytes: Annotated[int, Field(ge=1024)] = 5 * MEBIBYTE
    """largest message with all its sections, announced on attach: 4 MiB for the body and 1 MiB for the rest. The
    topic's `max.message.bytes` applies if lower: Kafka's default is 1 MiB, the embedded broker's 10 MiB"""
    max_unsettled: Annotated[int, Field(ge=1)] = 10_000
    """unsettled messages on a receiver's link: credit does not limit their number"""
    dead_letter_topic: str | None = None
    """topic for records that a group's AMQP receivers cannot process, such as `{topic}-dlq`; `{topic}` is replaced by
    the record's topic. It must exist unless `kafka.create_topics` is set. Not set: rejected records are skipped, failed
    ones are delivered again without limit, and those that no receiver may have stay in the log"""
    max_attempts: Annotated[int, Field(ge=1)] = 10
    """how often a record may fail (`modified` with delivery-failed, or its connection closes while it is unsettled)
    before it becomes a dead letter. Counted in memory while the group has receivers at this gateway. Same default as
    Artemis"""
    reply_topic: str = "replies"
    """Kafka topic for temporary queues and topics, which are keys in it. It must exist unless `kafka.create_topics` is
    set; a retention of an hour is enough. Clients that reply need the right to publish to it"""
    max_transactions: Annotated[int, Field(ge=0)] = 1000
    """open transactions; a further declare is rejected with `amqp:resource-limit-exceeded`. An empty transaction costs
    a few hundred bytes; a transacted JMS session always has one open. 0: no transactions"""
    max_transactions_per_client: Share = None
    """how many of them of one client, by login name or anonymous address. Not set: a quarter"""
    transaction_producers: Annotated[int, Field(ge=1, le=1000)] = 16
    """Kafka producers for transactions, started on demand and closed after five idle minutes. As many transactions can
    contain messages at the same time; others wait. Their transactional ids are `trivium-<gateway>-<n>`; with Kafka ACLs
    the gateway needs Write on that prefix. Two producers carry 18,000 messages/s with 100 messages per transaction"""
    transaction_timeout_s: Annotated[float, Field(ge=1, le=880)] = 60.0
    """longest time from a transaction's first message to its discharge; then it is rolled back. An open transaction
    blocks all readers of the partitions that it has written to. This time plus 15 s must not exceed the broker's
    `transaction.max.timeout.ms`"""

    @model_validator(mode="after")
    def _topic_names(self) -> AmqpConfig:
        template = self.dead_letter_topic
        if template is not None and (template == "{topic}" or not is_topic_name(template.replace("{topic}", "t"))):
            raise ValueError(
                "dead_letter_topic: expected another topic's name, which may contain {topic} for the record's"
            )
        if not is_topic_name(self.reply_topic):
            raise ValueError("reply_topic: not the name of a topic that clients may use")
        return self


class ConsumerDefaults(Section):
    """HTTP consumers: what their creation request does not set, with the defaults of Kafka and Strimzi."""

    auto_offset_reset: Literal["earliest", "latest", "none"] = "latest"
    """where a consumer without a committed offset starts, unless its creation request says otherwise: `earliest`,
    `latest` or `none`"""
    enable_auto_commit: bool = True
    """whether a consumer commits automatically, unless its creation request says otherwise"""
    fetch_min_bytes: Annotated[int, Field(ge=0, lt=2**31)] = 1
    """how many bytes Kafka collects before it answers a fetch"""
    isolation_level: Literal["read_committed", "read_uncommitted"] = "read_committed"
    """`read_committed`, or `read_uncommitted`, which includes records of open transactions"""
    session_timeout_s: Annotated[float, Field(ge=1, le=1800)] = 10.0
    """how long the partitions of a consumer wait for it when its gateway was killed, before others of its group get
    them; the broker's `group.min.session.timeout.ms` and `group.max.session.timeout.ms` limit it. Not Kafka's 45 s, but
    that of the gateway's other groups"""


class HttpConfig(Section):
    """HTTP/1.1."""

    address: Address = Address("127.0.0.1:8080")
    """the address for HTTP clients, and for WebSockets at their paths"""
    proxy_protocol: bool = False
    """the listener is behind load balancers that send PROXY headers; see [below](#behind-a-load-balancer)"""
    dialect: Literal["strimzi", "confluent"] = "strimzi"
    """which API answers at the paths that both dialects share (`/topics/T`, `/consumers/G`, ...): `strimzi` or
    `confluent`; Confluent's is always available below `/v2`"""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 8 * MEBIBYTE
    """largest request body"""
    max_records: Annotated[int, Field(ge=1)] = 10_000
    """records in one request"""
    max_concurrent: Annotated[int, Field(ge=1)] = 1024
    """concurrent produce requests; further ones get 503"""
    max_concurrent_per_client: Share = None
    """how many of them from one client, by login name or anonymous address; more get 429. Not set: a quarter"""
    max_uploads: Annotated[int, Field(ge=1)] = 128
    """concurrent [uploads of lines](http.md#uploads); further ones get 503"""
    max_uploads_per_client: Share = None
    """how many of them from one client; more get 429. Not set: a quarter"""
    idempotency_window_s: Annotated[float, Field(gt=0, le=7 * 86400)] = 3600.0
    """how long a response is kept for its [`Idempotency-Key`](http.md#once), in the topic `__trivium_requests`"""
    max_idempotency_keys: Annotated[int, Field(ge=1)] = 100_000
    """idempotency keys that are kept; further ones get 503"""
    max_idempotency_keys_per_client: Share = None
    """how many of them from one client; more get 429. Not set: a quarter"""
    compress_from_bytes: Annotated[int, Field(ge=1)] = 4096
    """smallest response that is compressed (zstd, gzip, deflate) for clients that accept it"""
    max_line_bytes: Annotated[int, Field(ge=1024)] = 2 * MEBIBYTE
    """longest line of an upload; a longer one gives an error for that line"""
    max_upload_errors: Annotated[int, Field(ge=0)] = 1000
    """refused lines after which an upload is broken off, with a last line that says so; 0: never. Each costs far more
    than its bytes"""
    max_consumers: Annotated[int, Field(ge=1)] = 1000
    """consumer instances; further ones get 429"""
    max_consumers_per_client: Share = None
    """how many of them of one client; more get 429. Not set: a quarter"""
    consumer: ConsumerDefaults = ConsumerDefaults()
    consumer_idle_s: Annotated[float, Field(gt=0)] = 300.0
    """a consumer that sends no requests or does not read a poll's response is removed after this time, because it would
    keep its partitions"""
    max_poll_wait_s: Annotated[float, Field(gt=0)] = 300.0
    """largest `timeout` of a poll"""
    default_poll_wait_ms: Annotated[int, Field(ge=0)] = 100
    """default `timeout` of a poll, as in the Strimzi bridge"""
    poll_max_bytes: Annotated[int, Field(ge=1024)] = 64 * MEBIBYTE
    """largest response to a poll"""
    header_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """time limit for a request's head, for the pause between requests, and until a body starts to arrive"""
    max_streams: Annotated[int, Field(ge=1)] = 10_000
    """event streams, and the same number of HTTP WebSockets; further ones get 503"""
    max_streams_per_client: Share = None
    """how many of each from one client; more get 429. Not set: a quarter"""
    stream_heartbeat_s: Annotated[float, Field(gt=0)] = 15.0
    """interval of heartbeats on a stream without events: proxies close connections that are silent for 30 to 60 s"""
    reply_topic: str = "replies"
    """Kafka topic for replies of devices to `POST /requests/{address}`, keyed by reply address; like
    `amqp.reply_topic`"""
    max_requests: Annotated[int, Field(ge=1)] = 1000
    """concurrent requests to devices; further ones get 503"""
    max_requests_per_client: Share = None
    """how many of them from one client; more get 429. Not set: a quarter"""
    max_request_wait_s: Annotated[float, Field(gt=0)] = 300.0
    """largest `timeout` of a request to a device"""
    max_active: Annotated[int, Field(ge=1)] = 20_000
    """concurrent requests, including waiting polls (streams have their own limit); further ones get 503"""
    max_active_per_client: Annotated[int, Field(ge=1)] = 5_000
    """the same for one client, by login name, or by address if anonymous; further ones get 429"""
    max_consumers_per_group: Annotated[int, Field(ge=1)] = 1000
    """consumer instances of one group; further ones get 429"""
    max_header_bytes: Annotated[int, Field(ge=1024, le=MEBIBYTE)] = 16 * 1024
    """longest request line and longest header field; a longer line gets 414, a longer field 431. Proxies send long
    tokens"""
    max_headers: Annotated[int, Field(ge=10, le=1000)] = 100
    """header fields of a request; more get 431"""
    max_head_bytes: Annotated[int, Field(ge=1024)] = 65536
    """total size of a request's head; larger ones get 431"""
    min_upload_rate: Annotated[int, Field(ge=1)] = 16 * 1024
    """minimum average rate of a request body in bytes/s, checked after `http.header_timeout_s`; slower bodies get
    408"""
    cors_origins: tuple[Origin, ...] = ()
    """origins whose pages may call from a browser, such as `https://app.example`; `*` means all"""

    @model_validator(mode="after")
    def _reply_topic(self) -> HttpConfig:
        if not is_topic_name(self.reply_topic):
            raise ValueError("reply_topic: not the name of a topic that clients may use")
        return self


class DrainConfig(Section):
    """How clients are disconnected when the gateway stops by SIGTERM or `trivium drain`."""

    lead_s: Annotated[float | None, Field(ge=0, le=3600)] = None
    """how long clients are still served after `/ready` starts to fail; longer than load balancers need to notice it.
    Not set: 5, or 0 with the embedded Kafka, because there is no other gateway"""
    rate_per_s: Annotated[float, Field(gt=0)] = 500.0
    """connections of all protocols to close per second (at most one more): as many as the other gateways can log in"""
    limit_s: Annotated[float, Field(gt=0)] = 300.0
    """longest time for lead and draining together; then the remaining connections are closed within
    `drain_timeout_s`"""


class PresenceConfig(Section):
    """Presence: connected clients as records in a Kafka topic; see [operations](operations.md#presence)."""

    topic: str | None = None
    """compacted topic, such as `presence`, that gets a record whenever a client connects or disconnects. Clients can
    read but not write it. With it, an MQTT client id has one connection across all gateways, whatever its session. All
    gateways of a Kafka cluster must use the same topic. Not set: off"""
    keep_offline_s: Annotated[int, Field(ge=60)] = 604_800
    """how long the record of a disconnected client is kept"""

    @field_validator("topic")
    @classmethod
    def _legal(cls, topic: str | None) -> str | None:
        if topic and not is_topic_name(topic):
            raise ValueError("not the name of a topic that clients may use")
        return topic or None


class ManagementConfig(Section):
    """The management listener."""

    address: Address = Address("127.0.0.1:8081")
    """the address of `/healthy`, `/ready`, `/metrics`, `/flow`, `/topics`, `/clients`, `/console`, `POST /trace` and
    `POST /drain`. On an address other than loopback, all but the first two need a password and the right `admin`"""
    spark_jobs: Annotated[tuple[Address, ...], Field(max_length=32)] = ()
    """addresses of Spark jobs' metrics (`run.metrics` in a job file). The console shows these jobs too, and queries
    them only while it is open"""
