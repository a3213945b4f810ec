"""The Prometheus alert rules, which `tools.dashboards` writes.

A rule covers a condition that clients notice, or will notice without action. docs/operations.md explains each rule
under its name and says what to do.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

RUNBOOK: Final = "docs/operations.md"
SECONDS: Final = "{{ $value | humanizeDuration }}"
NUMBER: Final = "{{ $value | humanize }}"


def grew(window: str, *counters: str) -> str:
    """Return a query that is true if one of the counters has grown within `window`.

    A labelled counter's series starts with its first event, which Prometheus' `increase` does not see.
    """
    parts = []
    for counter in counters:
        parts.append(f"increase({counter}[{window}]) > 0")
        if "{" in counter or counter in LABELLED:
            parts.append(f"({counter} unless {counter} offset {window}) > 0")
    return " or ".join(parts)


LABELLED: Final = {
    "trivium_failures_contained_total",
    "trivium_listener_refused_total",
    "trivium_scrape_failures_total",
}


class Alert(NamedTuple):
    """A rule. `summary` is a Prometheus template, which the instance's name precedes."""

    name: str
    severity: Literal["critical", "warning"]  # critical: clients notice it now
    expr: str
    lasts: str  # how long the condition must hold
    summary: str


ALERTS: Final[dict[str, tuple[Alert, ...]]] = {
    "trivium-clients": (
        Alert("TriviumDown", "critical", 'up{job="trivium"} == 0', "1m", "does not answer Prometheus"),
        Alert(
            "TriviumKafkaUnreachable",
            "critical",
            'trivium_flow_paused{reason="Kafka unreachable"} > 0',
            "30s",
            "Kafka is unreachable",
        ),
        Alert(
            "TriviumKafkaSilent",
            "critical",
            'trivium_flow_paused{reason="Kafka silent"} > 0',
            "1m",
            "Kafka does not acknowledge records",
        ),
        Alert(
            "TriviumKafkaSlow",
            "warning",
            "histogram_quantile(0.99, sum by (instance, le)"
            " (rate(trivium_publisher_batch_latency_seconds_bucket[5m]))) > 1",
            "5m",
            f"a batch takes {SECONDS} in Kafka (p99)",
        ),
        Alert(
            "TriviumSendersPaused",
            "critical",
            'trivium_flow_paused{reason="process budget"} > 0',
            "30s",
            "no sender is read: budget.process_bytes are in flight to Kafka",
        ),
        Alert(
            "TriviumReceiversWaiting",
            "warning",
            "trivium_budget_outgoing_waiting > 0",
            "5m",
            f"{NUMBER} receivers wait: others use up budget.outgoing_bytes without settling",
        ),
        Alert(
            "TriviumNotStored",
            "critical",
            grew("5m", 'trivium_publisher_records_total{outcome=~"busy|broken|unsafe|full"}'),
            "0m",
            f"has refused {NUMBER} records as {{{{ $labels.outcome }}}}",
        ),
        Alert(
            "TriviumDeletedUnread",
            "critical",
            grew(
                "10m",
                "trivium_mqtt_messages_gaps_total",
                "trivium_live_reader_gaps_total",
                "trivium_live_reader_catch_up_gaps_total",
            ),
            "0m",
            f"Kafka deleted {NUMBER} records before they were delivered",
        ),
        Alert(
            "TriviumUnreadable",
            "critical",
            grew("10m", "trivium_unreadable_batches_total"),
            "0m",
            f"has stepped over {NUMBER} batches or records that nothing can read",
        ),
        Alert(
            "TriviumPartitionsWithoutLeader",
            "critical",
            "trivium_live_reader_leaderless > 0 or trivium_http_consumers_leaderless > 0"
            " or trivium_kafka_group_leaderless > 0",
            "1m",
            f"{NUMBER} partitions that clients read have no leader",
        ),
        Alert(
            "TriviumRefusesRequests",
            "warning",
            grew(
                "5m",
                "trivium_http_load_refused_total",
                "trivium_http_produce_refused_total",
                "trivium_http_streams_refused_total",
            ),
            "5m",
            f"answered {NUMBER} requests with 503: too many at a time",
        ),
        Alert(
            "TriviumListenerFull",
            "critical",
            grew("5m", "trivium_listener_refused_total"),
            "0m",
            f"listener {{{{ $labels.listener }}}} is full and closed {NUMBER} connections",
        ),
    ),
    "trivium-state": (
        Alert("TriviumStateNotLoaded", "critical", "trivium_state_loaded == 0", "2m", "is still loading its sessions"),
        Alert(
            "TriviumStateBehind",
            "warning",
            "sum by (instance, table) (trivium_state_table_lag) > 1000",
            "1m",
            f"is {NUMBER} records behind on {{{{ $labels.table }}}}",
        ),
        Alert(
            "TriviumStateFailed",
            "warning",
            grew("1h", "trivium_state_table_failed_total"),
            "0m",
            f"could not use {NUMBER} records of {{{{ $labels.table }}}}",
        ),
        Alert(
            "TriviumTopicsUnsafe",
            "warning",
            "trivium_replication_unsafe_topics > 0",
            "10m",
            f"{NUMBER} topics may lose acknowledged records with a single broker",
        ),
        Alert(
            "TriviumTopicsRefused",
            "warning",
            grew("15m", "trivium_topics_topics_refused_total"),
            "0m",
            f"refused to create {NUMBER} topics: a limit is reached",
        ),
        Alert(
            "TriviumSessionsFull",
            "warning",
            grew("15m", "trivium_mqtt_sessions_refused_total"),
            "0m",
            f"refused {NUMBER} sessions: mqtt.max_sessions or mqtt.max_session_bytes is reached",
        ),
        Alert(
            "TriviumRetainedFull",
            "warning",
            grew("15m", "trivium_retained_refused_total"),
            "0m",
            f"refused {NUMBER} retained messages: mqtt.max_retained or mqtt.max_retained_bytes is reached",
        ),
    ),
    "trivium-receivers": (
        Alert(
            "TriviumGroupBehind",
            "warning",
            "sum by (instance, group) (trivium_kafka_group_lag) > 10000"
            " and sum by (instance, group) (deriv(trivium_kafka_group_lag[15m])) > 0",
            "15m",
            f"group {{{{ $labels.group }}}} is {NUMBER} records behind and falling further behind",
        ),
        Alert(
            "TriviumGroupStalled",
            "warning",
            "trivium_kafka_group_stalled > 0",
            "5m",
            "group {{ $labels.group }} does not advance: a record is not settled",
        ),
        Alert(
            "TriviumSubscribersBehind",
            "warning",
            "trivium_live_reader_catch_up_subscribers > 0",
            "15m",
            f"{NUMBER} subscribers do not catch up with the log",
        ),
        Alert(
            "TriviumDeadLetters",
            "warning",
            grew("15m", "trivium_amqp_dead_letters_total", "trivium_mqtt_messages_dead_letters_total"),
            "0m",
            f"stored {NUMBER} messages as dead letters",
        ),
        Alert(
            "TriviumDeadLettersFailed",
            "critical",
            grew("15m", "trivium_amqp_dead_letters_failed_total"),
            "0m",
            f"could not store {NUMBER} dead letters",
        ),
    ),
    "trivium-logins": (
        Alert(
            "TriviumKafkaLogin",
            "critical",
            grew("5m", "trivium_kafka_login_refused_total", "trivium_kafka_login_token_failures_total"),
            "1m",
            "Kafka refuses the gateway's login, or no token can be obtained",
        ),
        Alert(
            "TriviumKafkaCertificateEnds",
            "warning",
            "trivium_kafka_login_certificate_ends > 0 and trivium_kafka_login_certificate_ends - time() < 14 * 86400",
            "0m",
            "its client certificate for Kafka expires within 14 days",
        ),
        Alert(
            "TriviumCertificateEnds",
            "warning",
            "trivium_listener_certificate_ends - time() < 14 * 86400",
            "0m",
            "the certificate of listener {{ $labels.listener }} expires within 14 days",
        ),
        Alert(
            "TriviumKafkaCertificateUnusable",
            "warning",
            grew("1h", "trivium_kafka_login_failed_reloads_total"),
            "0m",
            "a new client certificate for Kafka cannot be used",
        ),
        Alert(
            "TriviumLoginsRefused",
            "warning",
            "rate(trivium_authentication_refused_total[5m]) > 5",
            "5m",
            f"refuses {NUMBER} logins a second",
        ),
        Alert(
            "TriviumLoginPluginFails",
            "critical",
            grew("5m", "trivium_authentication_errors_total", "trivium_authentication_key_fetches_failed_total"),
            "5m",
            "cannot check logins: a plugin or the issuer of tokens does not answer",
        ),
        Alert(
            "TriviumProxyRefused",
            "warning",
            grew("5m", "trivium_proxy_protocol_untrusted_total", "trivium_proxy_protocol_broken_total"),
            "5m",
            f"closed {NUMBER} connections without a valid PROXY header",
        ),
    ),
    "trivium-process": (
        Alert(
            "TriviumLate",
            "warning",
            "trivium_event_loop_worst_lag_seconds > 0.5",
            "2m",
            f"the event loop was {SECONDS} late: all clients waited",
        ),
        Alert(
            "TriviumFailures",
            "warning",
            grew("15m", "trivium_failures_contained_total"),
            "0m",
            "unexpected failure in {{ $labels.place }}",
        ),
        Alert(
            "TriviumFilesRunOut",
            "critical",
            "trivium_descriptors_paused > 0 or process_open_fds > 0.9 * trivium_descriptors_limit",
            "0m",
            "has almost reached its limit of open files: connections wait",
        ),
        Alert(
            "TriviumDrainLong",
            "warning",
            "trivium_drain_connections > 0",
            "10m",
            f"is draining, and {NUMBER} connections are still open",
        ),
        Alert(
            "TriviumScrapeFailures",
            "warning",
            grew("15m", "trivium_scrape_failures_total"),
            "0m",
            "the metrics of {{ $labels.source }} cannot be read",
        ),
    ),
    "trivium-spark": (
        Alert("TriviumSparkDown", "critical", 'up{job="trivium-spark"} == 0', "2m", "does not answer Prometheus"),
        Alert(
            "TriviumSparkStopped",
            "critical",
            "time() - max by (job, query) (trivium_spark_last_batch_timestamp_seconds) > 600"
            " and sum by (job, query) (trivium_spark_lag) > 0",
            "1m",
            f"job {{{{ $labels.job }}}} has records to read but finished no batch for {SECONDS}",
        ),
        Alert(
            "TriviumSparkBehind",
            "warning",
            "sum by (job, query) (trivium_spark_lag) > 10000"
            " and sum by (job, query) (deriv(trivium_spark_lag[15m])) > 0",
            "15m",
            f"job {{{{ $labels.job }}}} is {NUMBER} records behind and falling further behind",
        ),
        Alert(
            "TriviumSparkDeadLetters",
            "warning",
            grew("15m", "trivium_spark_dead_letters_total"),
            "0m",
            f"job {{{{ $labels.job }}}} stored {NUMBER} records as dead letters",
        ),
    ),
}
"""The alerts by rule group."""


def rules() -> dict[str, Any]:
    """Return the content of the rules file."""
    return {"groups": [{"name": group, "rules": [rule(alert) for alert in alerts]} for group, alerts in ALERTS.items()]}


def rule(alert: Alert) -> dict[str, Any]:
    """Return a rule in Prometheus' format."""
    subject = "{{ $labels.query }}" if "query" in alert.expr else "{{ $labels.instance }}"
    return {
        "alert": alert.name,
        "expr": alert.expr,
        **({} if alert.lasts == "0m" else {"for": alert.lasts}),
        "labels": {"severity": alert.severity},
        "annotations": {"summary": f"{subject}: {alert.summary}", "runbook_url": f"{RUNBOOK}#{alert.name.lower()}"},
    }
