"""The private attributes of aiokafka that are used, each with its reason. aiokafka 0.14 is pinned for them.

Nothing outside `gateway.kafka.driver` and `kafka_records` uses private attributes. `test_private_parts.py` looks up
each name in the installed aiokafka, so that an upgrade immediately shows which of them no longer exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PRIVATE_PARTS: Final[Mapping[str, Mapping[str, str]]] = {
    "aiokafka.AIOKafkaConsumer": {
        "_closed": "no request is sent for a consumer that was closed meanwhile",
        "_client": "metadata updates, requests to one broker, closing without `stop`, which waits for Kafka",
        "_coordinator": "commits, committed offsets and rejoining, even during a rebalance",
        "_fetcher": "see Fetcher",
        "_subscription": "see SubscriptionState",
    },
    "aiokafka.cluster.ClusterMetadata": {
        "_partitions": "a new object with each metadata update, by which `SessionFetcher` detects one",
    },
    "aiokafka.consumer.fetcher.Fetcher": {
        "_client": "its metadata give `SessionFetcher` the leaders",
        "_client_rack": "a setting of each of `SessionFetcher`'s requests",
        "_create_fetch_waiter": "`fetch` waits for a first record without `getmany`'s pause",
        "_fetch_max_wait_ms": "readers of very many partitions let brokers hold empty fetches longer",
        "_fetch_max_bytes": "a setting of each of `SessionFetcher`'s requests",
        "_fetch_min_bytes": "a setting of each of `SessionFetcher`'s requests",
        "_fetch_task": "a fetcher whose task has ended silently fetches nothing any more",
        "_fetcher_timeout": "a setting of each of `SessionFetcher`'s requests",
        "_get_actions_per_node": "no metadata request every turn; `SessionFetcher` names only changed partitions",
        "_in_flight": "tells `SessionFetcher` which brokers have a fetch to answer",
        "_isolation_level": "a setting of each of `SessionFetcher`'s requests",
        "_max_partition_fetch_bytes": "a setting of each of `SessionFetcher`'s requests",
        "_notify": "`fetch` wakes the fetcher, which may have missed that a reader waits",
        "_proc_offset_request": "metadata are refreshed when the lookup of a position shows that they are outdated",
        "_proc_fetch_request": "an answer that does not fit ends no consumer; `SessionFetcher` sends its own requests",
        "_preferred_read_replica": "replaced by `NearerReplicas`, which counts moves of partitions",
        "_retry_backoff": "the pause after an answer that does not fit its fetch",
        "_select_read_replica": "tells `SessionFetcher` which replica to read",
        "_set_error": "an offset that a follower lacks is no error before the leader was asked",
        "_records": "fetched records become `Received` on arrival, and are freed when the consumer closes",
        "_wait_consume_future": "the argument of `_notify`",
    },
    "aiokafka.consumer.fetcher.FetchResult": {
        "_assignment": "knows the end of the log, which no offset in a fetch can reach",
        "_partition_records": "replaced by an iterator that makes `Received`",
    },
    "aiokafka.consumer.fetcher.PartitionRecords": {
        "_aborted_producers": "records of aborted transactions are left out",
        "_consume_aborted_up_to": "see `_aborted_producers`",
        "_contains_abort_marker": "see `_aborted_producers`",
        "_isolation_level": "see `_aborted_producers`",
        "_records": "the fetched batches",
        "_records_iterator": "dropped: a generator in a reference cycle with the whole fetch",
        "_tp": "the partition",
    },
    "aiokafka.consumer.group_coordinator.GroupCoordinator": {
        "_commit_refresh_task": "cancelled when a consumer is closed while Kafka does not answer",
        "_coordination_task": "cancelled too; and a member whose task has ended is in no group any more",
        "_heartbeat_task": "cancelled too",
        "_send_req": "a commit gets its retention time when it is sent",
        "_do_commit_offsets": "a commit goes on when its caller stops waiting: its failure is not reported as nobody's",
    },
    "aiokafka.protocol.commit.OffsetCommitRequest": {
        "_retention_time": "a commit is kept longer than the brokers' default",
    },
    "aiokafka.consumer.group_coordinator.NoGroupCoordinator": {
        "_reset_committed_task": "cancelled when a consumer without a group is closed while Kafka does not answer",
    },
    "aiokafka.consumer.subscription_state.SubscriptionState": {
        "_notify_assignment_waiters": "ends a wait for an assignment that will not come",
    },
    "aiokafka.consumer.subscription_state.TopicPartitionState": {
        "_position": "the consumer's position, transaction markers included, without waiting",
    },
    "aiokafka.client.AIOKafkaClient": {
        "_conns": "a produce request is sent at once on a connection; closed when `stop` was cancelled twice",
        "_get_conn": "metadata of all topics are requested over a broker's connection",
        "_maybe_wait_metadata": "failed batches are sent again with the leaders of an update in progress",
        "_md_update_fut": "resolved when a client is closed: tasks wait for it",
        "_sync_task": "None when a client was closed while it connected: the connection must be closed too",
        "_metadata_update": "replaced: 15,000 partitions cost 125 ms of the event loop there, 15 ms by `wire`",
    },
    "aiokafka.conn.AIOKafkaConnection": {
        "_client_id": "a half-open connection is detected by a second one with the same settings",
        "_host": "see `_client_id`",
        "_loop": "the clock that timestamps a connection",
        "_next_correlation_id": "produce requests are written without aiokafka's objects for their fields",
        "_port": "see `_client_id`",
        "_request_timeout": "how long `call` waits for an answer",
        "_requests": "unanswered requests: a connection without an answer for seconds is probed",
        "_sasl_mechanism": "see `_client_id`",
        "_sasl_plain_password": "see `_client_id`",
        "_sasl_plain_username": "see `_client_id`",
        "_sasl_oauth_token_provider": "carries the `Login`, from which a connection reads its credentials",
        "_handle_frame": "an expiring connection is closed after the answer to its last request",
        "_security_protocol": "see `_client_id`",
        "_ssl_context": "see `_client_id`",
        "_versions": "which requests the broker knows",
        "_on_close_cb": "a method of the client that owns the connection",
        "_writer": "unwritten data are dropped when a connection is closed",
        "_send_sasl_token": "like `send`: a socket that uvloop has closed is a broken connection",
    },
    "aiokafka.admin.AIOKafkaAdminClient": {
        "_send_request": "requests that the client has no method for",
    },
    "aiokafka.AIOKafkaProducer": {
        "_message_accumulator": "batches are queued without `send_batch`'s checks; by force they are failed",
        "_request_timeout_ms": "how long a batch waits for its predecessor",
        "_max_request_size": "how many batches a request has room for",
        "_sender": "closing by force: its task is cancelled",
        "_txn_manager": "see TransactionManager",
    },
    "aiokafka.producer.message_accumulator.BatchBuilder": {
        "_buffer": "the bytes that were sent, for rebuilding a batch after a failure",
        "_build": "the bytes of a request",
        "_builder": "replaced: our own writer of records",
        "_relative_offset": "the number of records written by our own writer; 0 makes aiokafka drop the batch",
        "_set_producer_state": "replaced: it asserts aiokafka's own writer",
    },
    "aiokafka.producer.message_accumulator.MessageAccumulator": {
        "_batch_ttl": "of a batch in flight that becomes aiokafka's",
        "_batches": "closing by force: queued batches fail",
        "_pending_batches": "closing by force: batches in flight fail",
        "_waiter_future": "metadata requests have pauses: the sender is woken at the end of one",
        "_wakeup": "see `_waiter_future`",
        "_wakeup_handle": "see `_waiter_future`",
    },
    "aiokafka.producer.message_accumulator.MessageBatch": {
        "_builder": "our own batch notes a failed attempt",
        "_drain_waiter": "its exception is retrieved, or asyncio would log it",
    },
    "aiokafka.producer.sender.Sender": {
        "_acks": "a setting of the sender that `PublishSender` replaces",
        "_coordinator_dead": "a transaction commits another group's offsets: the coordinator must be looked up again",
        "_maybe_wait_for_pid": "a producer has its id before its first batch",
        "_message_accumulator": "it has the batches and the fence",
        "_muted_partitions": "one batch of a partition is in flight",
        "_request_timeout_ms": "see `_acks`",
        "_retry_backoff": "see `_acks`",
    },
    "aiokafka.producer.sender.SendProduceReqHandler": {
        "_batches": "the fence must let all of them pass",
        "_can_retry": "called for each batch after a failed attempt",
        "_default_backoff": "the pause before failed batches are sent again",
        "_sender": "see Sender",
        "_to_reenqueue": "batches to send again",
    },
    "aiokafka.producer.transaction_manager.TransactionManager": {
        "_sequence_numbers": "begin again at 0 after 2**31 - 1",
        "_pending_txn_offsets": "exceptions of pending requests are retrieved",
        "_pid_waiter": "see `_pending_txn_offsets`",
        "_transaction_waiter": "see `_pending_txn_offsets`",
        "_txn_consumer_group": "reset, so that a transaction can commit another group's offsets",
    },
}
"""Class -> private name -> why the driver uses it."""
