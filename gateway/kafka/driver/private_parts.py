"""The private attributes of aiokafka that the driver uses, each with its reason. aiokafka 0.14 is pinned for them.

Nothing outside `gateway.kafka.driver` uses private attributes. A test looks up each name in the installed aiokafka, so
that an upgrade immediately shows which of them no longer exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PRIVATE_PARTS: Final[Mapping[str, Mapping[str, str]]] = {
    "aiokafka.AIOKafkaConsumer": {
        "_closed": "nothing is asked for a consumer that was closed meanwhile",
        "_client": "metadata updates; requests to one broker; closed without `stop`, which waits for Kafka",
        "_coordinator": "commits, committed offsets and rejoining, also during a rebalance",
        "_fetcher": "see Fetcher",
        "_subscription": "see SubscriptionState",
    },
    "aiokafka.cluster.ClusterMetadata": {
        "_partitions": "`SessionFetcher` sees that metadata are new: it is another object with each answer",
    },
    "aiokafka.consumer.fetcher.Fetcher": {
        "_check_crcs": "a setting that `SessionFetcher` takes over",
        "_client": "`SessionFetcher` asks its metadata who leads",
        "_client_rack": "a setting that `SessionFetcher` takes over",
        "_create_fetch_waiter": "`fetch` waits for a first record without `getmany`'s pause",
        "_fetch_max_wait_ms": "readers of very many partitions let the broker hold empty fetches longer",
        "_fetch_max_bytes": "a setting that `SessionFetcher` takes over",
        "_fetch_min_bytes": "a setting that `SessionFetcher` takes over",
        "_fetch_task": "a fetcher whose task has ended never brings anything again, and says nothing",
        "_fetcher_timeout": "a setting that `SessionFetcher` takes over",
        "_get_actions_per_node": "who leads is asked once a second; `SessionFetcher` names only what has changed",
        "_in_flight": "`SessionFetcher` asks which brokers have a fetch to answer",
        "_isolation_level": "a setting that `SessionFetcher` takes over",
        "_max_partition_fetch_bytes": "a setting that `SessionFetcher` takes over",
        "_notify": "`fetch` wakes the fetcher, which may have missed that somebody waits",
        "_proc_offset_request": "metadata that a position's look-up has found to be old are asked for anew",
        "_proc_fetch_request": "`SessionFetcher` sends its own requests, and keeps what the answer says of the session",
        "_preferred_read_replica": "replaced by `NearerCopies`, which count when a partition moves",
        "_select_read_replica": "`SessionFetcher` asks where to read a partition",
        "_set_error": "what a copy does not have is no error before the leader was asked",
        "_records": "fetched records become `Received` at once, and are freed when the consumer closes",
        "_wait_consume_future": "what `_notify` is called with",
    },
    "aiokafka.consumer.fetcher.FetchResult": {
        "_partition_records": "replaced by what makes `Received`",
    },
    "aiokafka.consumer.fetcher.PartitionRecords": {
        "_aborted_producers": "records of aborted transactions are left out",
        "_consume_aborted_up_to": "as `_aborted_producers`",
        "_contains_abort_marker": "as `_aborted_producers`",
        "_isolation_level": "as `_aborted_producers`",
        "_records": "the fetched batches",
        "_records_iterator": "dropped: a generator that makes a reference cycle around the whole fetch",
        "_tp": "the partition",
    },
    "aiokafka.consumer.group_coordinator.GroupCoordinator": {
        "_commit_refresh_task": "cancelled when a consumer is given up while Kafka does not answer",
        "_coordination_task": "likewise; and a member whose task has ended is in no group any more",
        "_heartbeat_task": "likewise",
    },
    "aiokafka.consumer.group_coordinator.NoGroupCoordinator": {
        "_reset_committed_task": "cancelled when a consumer without a group is given up",
    },
    "aiokafka.consumer.subscription_state.SubscriptionState": {
        "_notify_assignment_waiters": "ends a wait for an assignment that will not come",
    },
    "aiokafka.consumer.subscription_state.TopicPartitionState": {
        "_position": "how far a consumer has read, transaction markers included, without waiting",
    },
    "aiokafka.client.AIOKafkaClient": {
        "_get_conn": "metadata of all topics are asked for over a broker's connection",
        "_md_update_fut": "ended when a producer is closed by force: its tasks wait for it",
        "_sync_task": "there is none any more when a client was closed while it connects: the connection is closed too",
        "_metadata_update": "replaced: 15,000 partitions cost 125 ms of the event loop there, 15 ms by `wire`",
    },
    "aiokafka.conn.AIOKafkaConnection": {
        "_client_id": "a half-open connection is found out by a second one, made alike",
        "_host": "likewise",
        "_loop": "the clock by which a connection was made",
        "_port": "likewise",
        "_requests": "what is unanswered: a connection on which nothing is answered for seconds is doubted",
        "_sasl_mechanism": "as `_client_id`",
        "_sasl_plain_password": "likewise",
        "_sasl_plain_username": "likewise",
        "_sasl_oauth_token_provider": "carries the `Login`, from which a connection takes what it shows",
        "_handle_frame": "after an answer nothing may be unanswered, and a connection whose login ends be closed",
        "_security_protocol": "likewise",
        "_ssl_context": "likewise",
        "_on_close_cb": "the client's method: tells whose connection it is",
        "_writer": "what is not written yet is dropped when a connection is closed",
        "_send_sasl_token": "as `send`: a socket that uvloop has closed is a broken connection",
    },
    "aiokafka.admin.AIOKafkaAdminClient": {
        "_send_request": "requests that the client has no verb for",
    },
    "aiokafka.AIOKafkaProducer": {
        "_message_accumulator": "closed by force: what is in flight fails",
        "_sender": "closed by force: its task is cancelled",
        "_txn_manager": "see TransactionManager",
    },
    "aiokafka.producer.message_accumulator.BatchBuilder": {
        "_buffer": "the bytes that were sent, for building a batch anew after a failure",
        "_builder": "replaced: our own writer of records",
        "_relative_offset": "how many records our own writer has written; none of a batch that is to be dropped",
        "_set_producer_state": "replaced: it asserts aiokafka's own writer",
    },
    "aiokafka.producer.message_accumulator.MessageAccumulator": {
        "_batches": "closed by force: what is queued fails",
        "_pending_batches": "closed by force: what is in flight fails",
        "_waiter_future": "who leads is asked with pauses: the sender is woken when one is over",
        "_wakeup": "likewise",
        "_wakeup_handle": "likewise",
    },
    "aiokafka.producer.message_accumulator.MessageBatch": {
        "_builder": "our own batch is told that a try has failed",
        "_drain_waiter": "its error is looked at, or asyncio would complain that nobody has",
    },
    "aiokafka.producer.sender.Sender": {
        "_coordinator_dead": "a transaction takes another group's offsets: that group's coordinator is looked up",
        "_message_accumulator": "has the fence",
    },
    "aiokafka.producer.sender.SendProduceReqHandler": {
        "_batches": "whether a fence lets them all pass",
        "_can_retry": "called for each batch of which a try has failed",
        "_sender": "see Sender",
    },
    "aiokafka.producer.transaction_manager.TransactionManager": {
        "_pending_txn_offsets": "errors of what still waited are looked at",
        "_pid_waiter": "likewise",
        "_transaction_waiter": "likewise",
        "_txn_consumer_group": "forgotten, so that a transaction can take another group's offsets",
    },
}
"""Class -> private name -> why the driver uses it."""
