"""Retained messages: the last one of each topic, in `__trivium_retained` and in memory (MQTT 5.0 section 3.3.1.3).

The key is the MQTT topic, the value the payload, the headers are those of the message's own record; a deletion is a
tombstone. Any Kafka client may write there too. Order per topic is Kafka's: the offset is the version. What this
process wrote counts from Kafka's answer on, so that a subscription after PUBACK finds it; the copy that the follower
brings later changes nothing.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Final

import msgspec

from gateway.kafka.contracts import Owner, Result
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.state import StateTopics
from gateway.mqtt.routing.retained_entry import ENTRY_BYTES, Entry, content_bytes
from gateway.spawn import Spawn, keep_on
from gateway.statistics import counter, gauge
from mapping.mqtt.outgoing import Delivery, from_record
from mapping.outcomes import Outcome
from mapping.record import MQTT_EXCHANGE, MQTT_RETAIN, MQTT_TOPIC, Headers, Received, Record, text_of
from mapping.rules import Rules
from protocols.mqtt.retained_names import NameTrie
from protocols.mqtt.topics import is_valid_name

log = logging.getLogger(__name__)

RETAINED: Final = "__trivium_retained"
SWEEP_S: Final = 1.0
SWEEP_MOST: Final = 1000
"""Messages that expire in one turn of the loop, and tombstones per sweep: there may be very many of both."""
GRACE_MS: Final = 60_000
"""Expired messages stay in the log for so long: clocks differ, and topics are often refreshed just as they expire."""
NOTICED_MS: Final = 60_000
"""Twice the usual age of metadata: it is noticed within this time that the topic was deleted and made again."""
STALE_DEADLINES: Final = 1000
"""The heap of deadlines may hold so many of replaced messages, beside as many as there are messages in it."""

_RETAIN_SET: Final = (MQTT_RETAIN, b"1")
_OWN, _COPY = "own", "copy"  # the tokens of a message's two records

_SHOWN: Final = 1 << 20  # is added to the partitions of another topic, so that their places are places of their own

Place = tuple[int, int]
"""Partition and offset in the topic of retained messages."""


class Kept(msgspec.Struct, frozen=True):
    """A retained message as it is delivered, and its version: the place of its record in `__trivium_retained`."""

    delivery: Delivery
    partition: int
    offset: int


class RetainedStatistics(msgspec.Struct, frozen=True):
    """A snapshot."""

    messages: Annotated[int, gauge("retained messages")]
    bytes: Annotated[int, gauge("bytes that retained messages count for in memory")]
    invalid_total: Annotated[int, counter("records of their topic whose key is no MQTT topic name")]
    expired_total: Annotated[int, counter("retained messages that ran out")]
    refused_total: Annotated[int, counter("retained messages refused because there are too many")]


class _Put:
    """One retained PUBLISH: owner of its own record and of the copy, which settles the client's token once."""

    __slots__ = (
        "_offset", "_retained", "_token", "budget", "copy", "is_written", "own", "owner", "principal", "read",
        "record", "topic",
    )  # fmt: skip

    def __init__(self, retained: Retained, record: Record, topic: str, owner: Owner | None, token: Any) -> None:
        self.record = record  # the own record
        self.topic = topic  # its MQTT topic
        self.budget = getattr(owner, "budget", None)  # the client's, which counts both records (see `Publisher.submit`)
        self.principal = getattr(owner, "principal", None)  # the client's
        self.own: Result | None = None  # own, copy: what became of each; None: not known yet
        self.copy: Result | None = None
        self.is_written = False  # whether the copy was given to the publisher
        # to which offset the copy's partition was read when it was written, and in which of the topics of the name (see
        # `Retained._restarts`): the copy lies behind that
        self.read = (0, -1)
        self._retained = retained
        self.owner = owner  # for whom it stands
        self._token = token
        self._offset = -1

    def settle(self, tokens: Sequence[Any], offsets: Sequence[int], result: Result) -> None:
        """Learn the fate of one record, or of both when both were refused alike (contract: `Owner`)."""
        offset = offsets[0] if offsets else -1
        if _OWN in tokens:
            self.own, self._offset = result, offset
        if _COPY in tokens:
            self.copy = result
            if result.outcome is Outcome.STORED:
                self._retained.stored(self, result.partition, offset)
        self._retained.settled(self)

    def finish(self) -> None:
        """Tell the client's side: the worse of both results, with the place of the own record."""
        own, copy = self.own, self.copy
        assert own is not None
        if self.owner is None:
            return
        if own.outcome is not Outcome.STORED:
            self.owner.settle((self._token,), (), own)
        elif copy is None or copy.outcome is Outcome.STORED:
            self.owner.settle((self._token,), (self._offset,), own)
        else:
            reason = f"the message was stored, but could not be retained: {copy.reason}"
            self.owner.settle((self._token,), (), Result(copy.outcome, -1, reason))


class Retained:
    """The retained messages of all gateways of this Kafka."""

    def __init__(
        self,
        state: StateTopics,
        publisher: Publisher,
        rules: Rules,
        *,
        limit: int,
        limit_bytes: int,
        spawn: Spawn,
        wall_clock: Callable[[], int],
        name: str = RETAINED,
    ) -> None:
        """Nothing is known before `state` is loaded.

        Clients may have `limit` messages retained, which may be counted for `limit_bytes`. `wall_clock` gives epoch
        milliseconds.
        """
        self.name = name  # the topic in which they are
        self._state = state
        self._publisher = publisher
        self._rules = rules
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._spawn = spawn
        self._wall_clock = wall_clock
        self._table = state.open(name, self._apply, self._restarted, self._reread)
        self._kept: dict[str, Entry] = {}
        self._names = NameTrie()
        self._bytes = 0
        self._applied: dict[int, int] = {}  # partition -> the offset up to which the follower has come
        self._ahead: dict[str, tuple[int, int]] = {}  # topic -> version that Kafka's answer told before the follower
        self._restarts = 0  # how often a partition was read from its beginning once more
        self._stale: dict[int, set[str]] = {}  # partition -> topics of messages that were in it before it was made anew
        self._known_anew: set[int] = set()  # of these, where an own message told so before the follower
        self._writing: dict[str, int] = {}  # topic -> messages on their way to Kafka
        self._deadlines: list[tuple[int, str]] = []
        self._tombstones: dict[str, tuple[int, int]] = {}  # expired topic -> when its tombstone is due, its partition
        self._sweeping: asyncio.Task[None] | None = None
        self._invalid = self._expired = self._refused = 0

    async def start(self) -> None:
        """Begin to remove what expires."""
        self._sweeping = self._spawn(keep_on(self._run, "retained"))

    async def stop(self) -> None:
        """Stop that."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)

    def __len__(self) -> int:
        """How many messages are retained."""
        return len(self._kept)

    def statistics(self) -> RetainedStatistics:
        """See `RetainedStatistics`."""
        return RetainedStatistics(len(self._kept), self._bytes, self._invalid, self._expired, self._refused)

    # Reading

    def search(self, topic_filter: str, after: Place = (-1, -1)) -> Iterator[list[tuple[str, Place]]]:
        """The topics with a message that a valid filter (not a shared one) matches, and the places of the messages.

        They come in pieces, in no order, those behind `after` only; each piece is a short step of the search, and may
        be empty. A message that is retained from begin to end is found. Wildcards at the first level match no topic
        that begins with `$` [MQTT-4.7.2-1]. The search costs what it finds, and what a wildcard in the middle has to
        try; it does not look at all topics.
        """
        is_name = "+" not in topic_filter and "#" not in topic_filter
        kept = self._kept
        for piece in ([topic_filter],) if is_name else self._names.search(topic_filter):
            now = self._wall_clock()
            found = []
            for name in piece:
                entry = kept.get(name)
                if entry is not None and not entry.is_over(now):
                    place = entry.partition, entry.offset
                    if place > after:
                        found.append((name, place))
            yield found

    def may_match(self, topic_filter: str) -> bool:
        """Whether a filter matches messages; True also when that takes more than a step of the search to find out."""
        pieces = self.search(topic_filter)
        return bool(next(pieces)) or next(pieces, None) is not None

    def get(self, topic: str) -> Kept | None:
        """The message of a topic; None when there is none (any more)."""
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
        """Publish a message that is to be retained; an empty payload deletes [MQTT-3.3.1-6, MQTT-3.3.1-7].

        Both records are written at once, the message's own and the one that is retained. Where the own record may be
        refused (its topic is not known yet, it is too large) it goes first, so that a refused message is not retained.
        Two messages of one client to one topic keep their order. `owner` is told once, when both are answered: the
        worse result, with the offset of the own record.
        """
        put = _Put(self, record, topic, owner, token)
        if self._is_full(topic, record):
            self._refused += 1
            put.own = Result(Outcome.BUSY, -1, "too many messages are retained")  # "Quota exceeded" in MQTT 5
            asyncio.get_running_loop().call_soon(put.finish)
            return
        self._writing[topic] = self._writing.get(topic, 0) + 1
        self._publisher.submit(record, put, _OWN)
        if self._is_safe(record):
            self._write(put)

    def _is_full(self, topic: str, record: Record) -> bool:
        if not record.value:
            return False
        entry = self._kept.get(topic)
        if entry is None and len(self._kept) >= self._limit:
            return True
        more = ENTRY_BYTES + len(topic) + content_bytes(record) - (0 if entry is None else entry.size(topic))
        return more > 0 and self._bytes + more > self._limit_bytes

    def _is_safe(self, record: Record) -> bool:
        """Whether the own record will not be refused for its topic's sake, as far as is known."""
        info = self._publisher.known_topic(record.topic)
        if info is None or (info.needs_key and record.key is None):
            return False
        return content_bytes(record) < info.max_message_bytes // 2

    def _write(self, put: _Put) -> None:
        """The copy goes to the partition where the topic's last version is: another client may have put it there."""
        put.is_written = True
        record, key = put.record, put.topic.encode()
        partition = self._partition_of(put.topic)
        put.read = (self._restarts, self._applied.get(partition, -1))
        headers = tuple(header for header in record.headers if header[0] != MQTT_EXCHANGE)
        self._table.write(key, record.value or None, headers, owner=put, token=_COPY, partition=partition)

    def _partition_of(self, topic: str) -> int:
        """Where the last version of a message is, so that the next one is behind it."""
        entry = self._kept.get(topic)
        if entry is not None and entry.partition < self._table.partitions:
            return entry.partition
        return self._table.partition_of(topic.encode())

    def stored(self, put: _Put, partition: int, offset: int) -> None:
        """Kafka has a message's copy: it counts from now on, unless the follower has come further already."""
        if 0 <= offset <= put.read[1] and put.read[0] == self._restarts:  # so it is in another topic
            self._applied.pop(partition, None)
            if partition not in self._known_anew:
                self._doubt(partition)
                self._known_anew.add(partition)
            self._state.doubt()
        if offset >= 0 and self._applied.get(partition, -1) < offset:
            record = put.record
            self._ahead[put.topic] = (partition, offset)
            self._change(put.topic, partition, offset, self._wall_clock(), record.value, record.headers)

    def settled(self, put: _Put) -> None:
        """One of a message's records was answered, or both."""
        if put.own is None:
            return
        if put.own.outcome is Outcome.STORED and not put.is_written:
            self._write(put)
        elif put.copy is not None or not put.is_written:
            left = self._writing.pop(put.topic) - 1
            if left:
                self._writing[put.topic] = left
            put.finish()

    # What the log says

    def _apply(self, record: Received) -> None:
        """A record of the topic (contract: `gateway.kafka.state.Apply`)."""
        self._applied[record.partition] = record.offset
        name = text_of(record.key)
        if name is None or not is_valid_name(name):
            self._invalid += 1
            if self._invalid == 1:
                log.warning(
                    "%s-%d: the key at offset %d is no MQTT topic; it and others like it are ignored",
                    self.name, record.partition, record.offset,
                )  # fmt: skip
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
        """The topic's last version is this one."""
        former = self._kept.get(name)
        if former is not None and former.partition != partition and former.timestamp > timestamp:
            return  # of another partitioner's partition, where offsets say nothing
        self._tombstones.pop(name, None)
        entry: Entry | None = None
        if value:
            entry = Entry.of(partition, offset, timestamp, value, headers)
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
            self._bytes -= former.size(name)
        self._kept[name] = entry
        self._bytes += entry.size(name)

    def _remove(self, name: str, entry: Entry) -> None:
        del self._kept[name]
        for stale in self._stale.values():
            stale.discard(name)
        self._names.remove(name)
        self._bytes -= entry.size(name)

    # The topic was deleted and made again. A message that was acknowledged just before that was noticed may have been
    # stored in the former one: what is older was deleted on purpose, that one not.

    def _restarted(self, partition: int) -> None:
        """The partition is read from its beginning once more (contract: `gateway.kafka.state.Restarted`)."""
        self._restarts += 1
        if partition in self._known_anew:
            self._known_anew.remove(partition)
        else:
            self._doubt(partition)
        self._applied.pop(partition, None)

    def _doubt(self, partition: int) -> None:
        """What is kept of a partition is not in the log any more, unless it comes again."""
        for name, ahead in list(self._ahead.items()):
            if ahead[0] == partition:
                del self._ahead[name]
        self._stale[partition] = {name for name, entry in self._kept.items() if entry.partition == partition}

    def _reread(self, partition: int) -> None:
        """All that is in the log has come again (contract: `gateway.kafka.state.Reread`)."""
        since = self._wall_clock() - NOTICED_MS
        for name in self._stale.pop(partition, ()):
            entry = self._kept[name]
            if entry.timestamp < since:
                self._remove(name, entry)
            elif name not in self._writing:
                value, headers = entry.content()
                self._table.write(name.encode(), value, headers, owner=None, partition=self._partition_of(name))

    # What another topic says

    def show(self, record: Received) -> None:
        """The last record of its key in another compacted topic is retained as its MQTT topic; None is a deletion."""
        name = self._rules.mqtt_topic(record.topic, record.key, record.headers)
        if name is not None and is_valid_name(name):
            place = record.partition + _SHOWN, record.offset
            self._change(name, *place, record.timestamp, record.value, record.headers)

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
        """Remove what has expired from memory, in steps [MQTT-3.3.2-5]."""
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
        """Delete from the log what has expired some time ago.

        The tombstone is written by any gateway, for what it has seen. A message that another gateway stores in the
        moment between is deleted with it; nothing that is retained by this one is.
        """
        due: list[tuple[str, int]] = []
        for name, (at, partition) in self._tombstones.items():
            if at > now or len(due) == SWEEP_MOST:
                break
            due.append((name, partition))
        for name, partition in due:
            del self._tombstones[name]
            if name not in self._writing:
                # Nobody waits for it: what is not deleted now is found again at the next start.
                self._table.write(name.encode(), None, owner=None, partition=partition)

    def _plan_tombstone(self, name: str, entry: Entry) -> None:
        assert entry.expires is not None
        self._tombstones[name] = (entry.expires + GRACE_MS, entry.partition)
