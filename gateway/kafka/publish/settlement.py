"""Report records' outcomes to their owners, and count them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from gateway.kafka.contracts import Owner, Result
from gateway.kafka.publish.batch import Batch
from gateway.runtime.failures import failures
from gateway.views.clients import PROTOCOLS
from mapping.outcomes import Outcome
from mapping.record import INTERNAL_TOPIC_PREFIX
from telemetry.statistics import Histogram, counter, gauge, histogram

LATENCY_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)


class SettlementStatistics(msgspec.Struct, frozen=True):
    """Records in flight, and outcomes so far."""

    records_in_flight: Annotated[int, gauge("records in flight to Kafka")]
    bytes_in_flight: Annotated[int, gauge("bytes in flight to Kafka")]
    records: Annotated[dict[Outcome, int], counter("settled records of clients", "outcome")]
    state_records: Annotated[
        dict[Outcome, int],
        counter("settled records of the gateway's own topics", "outcome"),
    ]
    unowned: Annotated[
        dict[Outcome, int],
        counter("records that were not stored and whose sender expects no answer (MQTT QoS 0)", "outcome"),
    ]
    stored: Annotated[
        dict[str, dict[int, int]],
        counter("records stored in the partitions of clients' topics", "topic", "partition"),
    ]
    first_offset: Annotated[dict[str, dict[int, int]], gauge("offset of the first record stored", "topic", "partition")]
    next_offset: Annotated[
        dict[str, dict[int, int]], gauge("offset after the last record stored", "topic", "partition")
    ]
    batches: Annotated[int, counter("batches stored")]
    batch_latency_s: Annotated[Histogram, histogram("from a batch's first record to Kafka's answer")]
    acknowledged_s: Annotated[
        dict[str, Histogram],
        histogram(
            "from a message's arrival to its acknowledgement (PUBACK or PUBREC, disposition, answer), counted from the"
            " first of its batch",
            "protocol",
        ),
    ]
    request_waits: Annotated[int, counter("waits of requests to Kafka for more records (kafka.linger_ms)")]
    producers: Annotated[int, counter("producers started; each after the first replaced one whose sequence had a gap")]


class Settlement:
    """Reports outcomes to the owners of tokens, and counts them."""

    def __init__(self) -> None:
        self.answered = float("-inf")  # when Kafka stored the last batch (monotonic seconds)
        self._records = dict.fromkeys(Outcome, 0)
        self._state_records = dict.fromkeys(Outcome, 0)
        self._unowned = dict.fromkeys(Outcome, 0)
        # by topic and partition: number of records, offset of the first, and offset after the last
        self._places: dict[str, dict[int, tuple[int, int, int]]] = {}
        self._batches = 0
        self._latency_s = Histogram(LATENCY_S)
        self._acknowledged_s = {protocol: Histogram(LATENCY_S) for protocol in PROTOCOLS}

    def forget(self, topic: str) -> None:
        """Forget a deleted topic: the counts of a re-created one start at zero."""
        self._places.pop(topic, None)

    def settle(self, batch: Batch, topic: str, result: Result, base: int, now: float) -> None:
        """Report a batch's result to its owners, and release its budgets.

        `base` is its first offset, if stored; -1 when Kafka returned none.
        """
        is_state = topic.startswith(INTERNAL_TOPIC_PREFIX)
        counts = self._state_records if is_state else self._records
        stored = result.outcome is Outcome.STORED
        if stored:
            self.answered = now
            self._batches += 1
            self._latency_s.observe(now - batch.born)
            if base >= 0 and not is_state:
                places, behind = self._places.setdefault(topic, {}), base + batch.count
                count, first, _ = places.get(result.partition, (0, base, base))
                places[result.partition] = count + batch.count, first, behind
        acknowledged = dict.fromkeys(PROTOCOLS, 0)
        for share in batch.shares.values():
            count = len(share.tokens)
            counts[result.outcome] += count
            if stored and share.protocol:
                acknowledged[share.protocol] += count
            self._tell(share.owner, share.tokens, share.offsets(base) if stored else (), result)
        for protocol, count in acknowledged.items():
            if count:
                self._acknowledged_s[protocol].observe(now - batch.born, count)
        batch.release()

    def refuse(self, owner: Owner | None, tokens: Sequence[Any], result: Result) -> None:
        """Report the result of records that were not sent to Kafka."""
        self._records[result.outcome] += len(tokens)
        self._tell(owner, tokens, (), result)

    def _tell(self, owner: Owner | None, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        if owner is None:
            if result.outcome is not Outcome.STORED:
                self._unowned[result.outcome] += len(tokens)
            return
        try:
            owner.settle(tokens, offsets, result)
        except Exception as error:  # a bug in one session must not affect the batch's other owners
            failures.report("session", error, f"{type(owner).__name__}: {len(tokens)} tokens not settled")
            failures.guard("session", owner.broken, error, tokens)

    def statistics(self, in_flight: tuple[int, int], producers: int, request_waits: int) -> SettlementStatistics:
        """Return the statistics. `in_flight` is records and bytes, `producers` how many were started."""
        records, size = in_flight
        return SettlementStatistics(
            records_in_flight=records,
            bytes_in_flight=size,
            records=dict(self._records),
            state_records=dict(self._state_records),
            unowned=dict(self._unowned),
            stored=self._place_figures(0),
            first_offset=self._place_figures(1),
            next_offset=self._place_figures(2),
            batches=self._batches,
            batch_latency_s=self._latency_s,
            acknowledged_s=self._acknowledged_s,
            request_waits=request_waits,
            producers=producers,
        )

    def _place_figures(self, which: int) -> dict[str, dict[int, int]]:
        return {
            topic: {number: figures[which] for number, figures in each.items()} for topic, each in self._places.items()
        }
