"""Retained messages: the last message of each topic, in `__trivium_retained` and in memory (section 3.3.1.3).

The key is the MQTT topic, the value is the payload, and the headers are those of the message's own record; a tombstone
deletes. Other Kafka clients may write there too. The offset is the version of a topic's message. A message from this
process counts from Kafka's answer on, so that a subscription after PUBACK finds it; reading its record later changes
nothing.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Final

import msgspec
import structlog

from flowcontrol.budget import ConnectionBudget
from gateway.kafka.contracts import Owner, Result
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.state import StateTopics
from gateway.mqtt.routing.retained_entry import ENTRY_BYTES, RetainedEntry, content_bytes
from gateway.runtime.spawn import Spawn, keep_running
from mapping.mqtt.outgoing import MqttDelivery, from_record
from mapping.outcomes import Outcome
from mapping.record import GW_OWNER, MQTT_EXCHANGE, MQTT_RETAIN, MQTT_TOPIC, Headers, Received, Record, text_of
from mapping.rules import Rules
from protocols.mqtt.retained_names import NameTrie
from protocols.mqtt.topics import is_valid_name
from telemetry.statistics import counter, gauge

log = structlog.get_logger(__name__)

RETAINED: Final = "__trivium_retained"
SWEEP_S: Final = 1.0
SWEEP_MOST: Final = 1000
"""Maximum number of messages expired in one event loop iteration, and of tombstones written per sweep."""
GRACE_MS: Final = 60_000
"""Delay before an expired message gets its tombstone: clocks differ, and messages are often refreshed at expiry."""
NOTICED_MS: Final = 60_000
"""Time within which the deletion and recreation of the topic is noticed: twice the usual age of metadata."""
STALE_DEADLINES: Final = 1000
"""Extra deadlines of replaced messages in the heap, beyond twice the number of messages, before it is rebuilt."""

_RETAIN_SET: Final = (MQTT_RETAIN, b"1")
_OWN, _COPY = "own", "copy"  # tokens of a message's two records

_MIRRORED: Final = 1 << 20  # added to the partition numbers of another topic, to keep them apart

Position = tuple[int, int]
"""Partition and offset in the topic of retained messages."""


class Kept(msgspec.Struct, frozen=True):
    """A retained message for delivery, and its version: the position of its record in `__trivium_retained`."""

    delivery: MqttDelivery
    partition: int
    offset: int


class RetainedStatistics(msgspec.Struct, frozen=True):
    """A snapshot of the retained messages, for the metrics."""

    messages: Annotated[int, gauge("retained messages")]
    bytes: Annotated[int, gauge("bytes counted for retained messages in memory")]
    invalid_total: Annotated[int, counter("records of retained messages whose key is not an MQTT topic name")]
    expired_total: Annotated[int, counter("retained messages that expired")]
    refused_total: Annotated[int, counter("retained messages refused because there are too many")]


class _Owned(msgspec.Struct, gc=False):
    """What one principal has retained."""

    messages: int = 0
    bytes: int = 0


class _Put(Owner, msgspec.Struct, eq=False):
    """One retained PUBLISH: owns its own record and the retained copy, and settles the client's token once."""

    retained: Retained
    record: Record  # the message's own record
    topic: str  # MQTT topic
    owner: Owner | None  # the client's owner
    token: Any
    budget: ConnectionBudget | None  # the client's; counts both records (see `Publisher.submit`)
    principal: str | None  # the client's
    own: Result | None = None  # result of the own record; None: not known yet
    offset: int = -1  # of the own record
    copy: Result | None = None  # result of the copy
    is_written: bool = False  # whether the copy was submitted
    # `Retained._restarts`, and the offset up to which the copy's partition was read when the copy was written; the
    # copy must get a higher offset, unless the topic was recreated
    read: tuple[int, int] = (0, -1)

    @property
    def acts_for(self) -> Owner | None:
        """The client's owner."""
        return self.owner

    def settle(self, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        """Take the result of one record, or of both if they were refused together (contract: `Owner`)."""
        offset = offsets[0] if offsets else -1
        if _OWN in tokens:
            self.own, self.offset = result, offset
        if _COPY in tokens:
            self.copy = result
            if result.outcome is Outcome.STORED:
                self.retained.stored(self, result.partition, offset)
        self.retained.settled(self)

    def finish(self) -> None:
        """Settle the client's token with the worse of both results and the offset of the own record."""
        own, copy = self.own, self.copy
        assert own is not None
        if self.owner is None:
            return
        if own.outcome is not Outcome.STORED:
            self.owner.settle((self.token,), (), own)
        elif copy is None or copy.outcome is Outcome.STORED:
            self.owner.settle((self.token,), (self.offset,), own)
        else:
            reason = f"the message was stored, but could not be retained: {copy.reason}"
            self.owner.settle((self.token,), (), Result(copy.outcome, -1, reason))


class Retained:
    """The retained messages, shared by all gateways of this Kafka."""

    def __init__(
        self,
        state: StateTopics,
        publisher: Publisher,
        rules: Rules,
        *,
        limit: int,
        limit_bytes: int,
        limits_of_principal: tuple[int, int] = (0, 0),
        spawn: Spawn,
        wall_clock: Callable[[], int],
        name: str = RETAINED,
    ) -> None:
        """`limit` and `limit_bytes` bound what clients may have retained, `limits_of_principal` what one may (0: any).

        `wall_clock` returns epoch milliseconds.
        """
        self.name = name  # Kafka topic
        self._state = state
        self._publisher = publisher
        self._rules = rules
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._limits_of_principal = limits_of_principal
        self._owners: dict[str, _Owned] = {}  # what each principal has retained
        self._spawn = spawn
        self._wall_clock = wall_clock
        self._table = state.open(name, self._apply, self._restarted, self._reread)
        self._kept: dict[str, RetainedEntry] = {}
        self._names = NameTrie()
        self._bytes = 0
        self._applied: dict[int, int] = {}  # partition -> offset of the last record read
        self._ahead: dict[str, tuple[int, int]] = {}  # topic -> version known from Kafka's answer but not read yet
        self._restarts = 0  # number of times that a partition was read again from its beginning
        self._stale: dict[int, set[str]] = {}  # partition -> topics of messages from before it was recreated
        self._known_recreated: set[int] = set()  # those revealed by an own message's offset before reading
        self._writing: dict[str, int] = {}  # topic -> number of messages in flight to Kafka
        self._deadlines: list[tuple[int, str]] = []
        self._tombstones: dict[str, tuple[int, int]] = {}  # expired topic -> when its tombstone is due, its partition
        self._sweeping: asyncio.Task[None] | None = None
        self._invalid = self._expired = self._refused = 0

    async def start(self) -> None:
        """Start removing expired messages."""
        self._sweeping = self._spawn(keep_running(self._run, "retained"))

    async def stop(self) -> None:
        """Stop removing expired messages."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)

    def statistics(self) -> RetainedStatistics:
        """Return a snapshot for the metrics."""
        return RetainedStatistics(len(self._kept), self._bytes, self._invalid, self._expired, self._refused)

    # Reading

    def search(self, topic_filter: str, after: Position = (-1, -1)) -> Iterator[list[tuple[str, Position]]]:
        """Find the topics that match a valid, not shared filter, and the positions of their messages.

        Results above `after` come in unordered pieces; each is a short step of the search, and may be empty. A message
        that stays retained during the search is found. Wildcards at the first level match no topic that starts with `$`
        [MQTT-4.7.2-1]. The cost grows with the results and with the branches below a wildcard in the middle, not with
        the number of topics.
        """
        kept = self._kept
        for piece in self._names.search(topic_filter):
            now = self._wall_clock()
            messages = []
            for name in piece:
                entry = kept.get(name)
                if entry is not None and not entry.is_over(now):
                    position = entry.partition, entry.offset
                    if position > after:
                        messages.append((name, position))
            yield messages

    def may_match(self, topic_filter: str) -> bool:
        """Whether a filter matches messages; also True if one step of the search does not suffice to decide."""
        pieces = self.search(topic_filter)
        return bool(next(pieces)) or next(pieces, None) is not None

    def get(self, topic: str) -> Kept | None:
        """Return the message of a topic, or None if there is none or it has expired."""
        entry = self._kept.get(topic)
        if entry is None or entry.is_over(self._wall_clock()):
            return None
        value, headers = entry.content()
        key = topic.encode()
        headers = ((MQTT_TOPIC, key), _RETAIN_SET, *headers)
        record = Received(self.name, key, value, headers, entry.timestamp, entry.partition, entry.offset)
        delivery = from_record(record, self._rules)
        return None if delivery is None else Kept(delivery, entry.partition, entry.offset)

    # Writing

    def put(self, record: Record, topic: str, owner: Owner | None, token: Any) -> None:
        """Publish a message to be retained; an empty payload deletes [MQTT-3.3.1-6, MQTT-3.3.1-7].

        The message's own record and the retained copy are submitted together. If the own record may be refused (its
        topic is unknown, it is large), the copy waits for it, so that a refused message is not retained. One client's
        messages to one topic keep their order. `owner` is settled once, when both are answered, with the worse result
        and the offset of the own record.
        """
        budget, principal = (None, None) if owner is None else (owner.budget, owner.principal)
        put = _Put(self, record, topic, owner, token, budget, principal)
        if self._is_full(topic, record, principal or ""):
            self._refused += 1
            put.own = Result(Outcome.BUSY, -1, "too many messages are retained")  # "Quota exceeded" in MQTT 5
            asyncio.get_running_loop().call_soon(put.finish)
            return
        self._writing[topic] = self._writing.get(topic, 0) + 1
        self._publisher.submit(record, put, _OWN)
        if self._is_safe(record):
            self._write(put)

    def _is_full(self, topic: str, record: Record, principal: str) -> bool:
        if not record.value:
            return False
        entry = self._kept.get(topic)
        if entry is None and len(self._kept) >= self._limit:
            return True
        more = ENTRY_BYTES + len(topic) + content_bytes(record) - (0 if entry is None else entry.size(topic))
        if more > 0 and self._bytes + more > self._limit_bytes:
            return True
        most, most_bytes = self._limits_of_principal
        owned, mine = self._owners.get(principal) or _Owned(), entry is not None and entry.owner == principal
        if most and not mine and owned.messages >= most:
            return True
        added = more if mine or entry is None else more + entry.size(topic)
        return bool(most_bytes) and added > 0 and owned.bytes + added > most_bytes

    def _is_safe(self, record: Record) -> bool:
        """Whether, as far as is known, the topic will not refuse the own record."""
        info = self._publisher.known_topic(record.topic)
        if info is None or (info.needs_key and record.key is None):
            return False
        return content_bytes(record) < info.max_message_bytes // 2

    def _write(self, put: _Put) -> None:
        """Write the copy to the partition of the topic's last version, which another client may have chosen."""
        put.is_written = True
        record, key = put.record, put.topic.encode()
        partition = self._partition_of(put.topic)
        put.read = (self._restarts, self._applied.get(partition, -1))
        headers = tuple(header for header in _owned_headers(put) if header[0] != MQTT_EXCHANGE)
        self._table.write(key, record.value or None, headers, owner=put, token=_COPY, partition=partition)

    def _partition_of(self, topic: str) -> int:
        """Return the partition of the topic's last version, so that the next one is ordered behind it."""
        entry = self._kept.get(topic)
        if entry is not None and entry.partition < self._table.partitions:
            return entry.partition
        return self._table.partition_of(topic.encode())

    def stored(self, put: _Put, partition: int, offset: int) -> None:
        """Apply a copy that Kafka has stored, unless a later record was read already."""
        if 0 <= offset <= put.read[1] and put.read[0] == self._restarts:  # only possible in a recreated topic
            self._applied.pop(partition, None)
            if partition not in self._known_recreated:
                self._mark_stale(partition)
                self._known_recreated.add(partition)
            self._state.suspect_deletion()
        if offset >= 0 and self._applied.get(partition, -1) < offset:
            record = put.record
            self._ahead[put.topic] = (partition, offset)
            self._change(put.topic, partition, offset, self._wall_clock(), record.value, _owned_headers(put))

    def settled(self, put: _Put) -> None:
        """Continue after Kafka has answered for one of a message's records, or both."""
        if put.own is None:
            return
        if put.own.outcome is Outcome.STORED and not put.is_written:
            self._write(put)
        elif put.copy is not None or not put.is_written:
            left = self._writing.pop(put.topic) - 1
            if left:
                self._writing[put.topic] = left
            put.finish()

    # Reading the log

    def _apply(self, record: Received) -> None:
        """Process a record of the topic (contract: `gateway.kafka.state.Apply`)."""
        self._applied[record.partition] = record.offset
        name = text_of(record.key)
        if name is None or not is_valid_name(name):
            self._invalid += 1
            if self._invalid == 1:
                log.warning(
                    "a key is not an MQTT topic name; such records are ignored",
                    topic=self.name,
                    partition=record.partition,
                    offset=record.offset,
                )
            return
        ahead = self._ahead.get(name)
        if ahead is not None and ahead[0] == record.partition:
            if record.offset <= ahead[1]:
                if record.offset == ahead[1]:
                    del self._ahead[name]
                return
            del self._ahead[name]
        self._change(name, record.partition, record.offset, record.timestamp, record.value, record.headers)

    def _change(  # noqa: PLR0917 - a record's parts
        self, name: str, partition: int, offset: int, timestamp: int, value: bytes | None, headers: Headers
    ) -> None:
        """Set the last version of a topic's message."""
        former = self._kept.get(name)
        if former is not None and former.partition != partition and former.timestamp > timestamp:
            return  # in the partition of another partitioner: offsets cannot be compared
        self._tombstones.pop(name, None)
        for stale in self._stale.values():
            stale.discard(name)
        entry: RetainedEntry | None = None
        if value:
            entry = RetainedEntry.of(partition, offset, timestamp, value, headers)
            if entry.is_over(self._wall_clock()):
                self._plan_tombstone(name, entry)
                entry = None
        if entry is None:
            if former is not None:
                self._remove(name, former)
            return
        if entry.expires is not None:
            heapq.heappush(self._deadlines, (entry.expires, name))
        if former is None:
            self._names.add(name)
        else:
            self._count(name, former, -1)
        self._kept[name] = entry
        self._count(name, entry, 1)

    def _count(self, name: str, entry: RetainedEntry, sign: int) -> None:
        """Count an entry that is added (1) or removed (-1)."""
        size = sign * entry.size(name)
        self._bytes += size
        owned = self._owners.setdefault(entry.owner, _Owned())
        owned.messages += sign
        owned.bytes += size
        if not owned.messages:
            del self._owners[entry.owner]

    def _remove(self, name: str, entry: RetainedEntry) -> None:
        del self._kept[name]
        for stale in self._stale.values():
            stale.discard(name)
        self._names.remove(name)
        self._count(name, entry, -1)

    # The topic was deleted and created again. Older messages were deleted on purpose. A message acknowledged just
    # before this was noticed may have been stored in the former topic, and must not be lost.

    def _restarted(self, partition: int) -> None:
        """Note that a partition is read again from its beginning (contract: `gateway.kafka.state.Restarted`)."""
        self._restarts += 1
        if partition in self._known_recreated:
            self._known_recreated.remove(partition)
        else:
            self._mark_stale(partition)
        self._applied.pop(partition, None)

    def _mark_stale(self, partition: int) -> None:
        """Mark the messages of a partition as stale until their records are read again."""
        for name, ahead in list(self._ahead.items()):
            if ahead[0] == partition:
                del self._ahead[name]
        self._stale[partition] = {name for name, entry in self._kept.items() if entry.partition == partition}

    def _reread(self, partition: int) -> None:
        """Remove or rewrite stale messages after the log was read again (contract: `gateway.kafka.state.Reread`)."""
        since = self._wall_clock() - NOTICED_MS
        for name in self._stale.pop(partition, ()):
            entry = self._kept[name]
            if entry.timestamp < since:
                self._remove(name, entry)
            elif name not in self._writing:
                value, headers = entry.content()
                self._table.write(name.encode(), value, headers, owner=None, partition=self._partition_of(name))

    # Messages from another topic

    def mirror(self, record: Received) -> None:
        """Retain the last record of a key in another compacted topic, under its MQTT topic; a None value deletes."""
        name = self._rules.mqtt_topic(record.topic, record.key, record.headers)
        if name is not None and is_valid_name(name):
            position = record.partition + _MIRRORED, record.offset
            self._change(name, *position, record.timestamp, record.value, record.headers)

    # Expiry

    async def _run(self) -> None:
        await self._state.loaded.wait()
        while True:
            now = self._wall_clock()
            for _ in self._expire(now):
                await asyncio.sleep(0)
            self._delete(now)
            await asyncio.sleep(SWEEP_S)

    def _expire(self, now: int) -> Iterator[None]:
        """Remove expired messages from memory, in steps [MQTT-3.3.2-5]."""
        expired = 0
        while self._deadlines and self._deadlines[0][0] <= now:
            expires, name = heapq.heappop(self._deadlines)
            entry = self._kept.get(name)
            if entry is not None and entry.expires == expires:
                self._expired += 1
                self._remove(name, entry)
                self._plan_tombstone(name, entry)
            expired += 1
            if expired % SWEEP_MOST == 0:
                yield
        if len(self._deadlines) > 2 * len(self._kept) + STALE_DEADLINES:
            self._deadlines = [(entry.expires, name) for name, entry in self._kept.items() if entry.expires is not None]
            heapq.heapify(self._deadlines)

    def _delete(self, now: int) -> None:
        """Write tombstones for messages that expired some time ago.

        Every gateway writes tombstones for the messages that it has read. A message that another gateway stores at the
        same moment is deleted too; one that this gateway is writing is not.
        """
        due: list[tuple[str, int]] = []
        for name, (at, partition) in self._tombstones.items():
            if at > now or len(due) == SWEEP_MOST:
                break
            due.append((name, partition))
        for name, partition in due:
            del self._tombstones[name]
            if name not in self._writing:
                # Without an owner: a message that is not deleted now is found again at the next start.
                self._table.write(name.encode(), None, owner=None, partition=partition)

    def _plan_tombstone(self, name: str, entry: RetainedEntry) -> None:
        assert entry.expires is not None
        self._tombstones[name] = (entry.expires + GRACE_MS, entry.partition)


def _owned_headers(put: _Put) -> Headers:
    """Return the headers of a retained copy, which says whose it is."""
    return put.record.headers if put.principal is None else (*put.record.headers, (GW_OWNER, put.principal.encode()))
