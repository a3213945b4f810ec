"""Incremental fetch sessions (KIP-227) for readers of very many partitions.

aiokafka 0.14, which is pinned, names every partition in every fetch and checks each several times a second: ten percent
of a processor for 5,000 idle partitions. Brokers since Kafka 1.1 remember the partitions that a reader has named, and
answer with those that have news. `SessionFetcher` replaces aiokafka's fetcher; aiokafka processes the fetched data as
before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from io import BytesIO
from typing import Any, Final

import msgspec
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.consumer.fetcher import READ_COMMITTED
from aiokafka.errors import UnknownTopicOrPartitionError
from aiokafka.protocol.fetch import FetchResponse_v11

from gateway.kafka.driver import wire
from gateway.kafka.driver.fetch.fetching import PacedFetcher
from gateway.runtime.failures import failures

NO_SESSION: Final = 0
"""The session id in the answer of a broker that cannot cache another session; the next fetch is a full one."""
FIRST_EPOCH: Final = 0
LAST_EPOCH: Final = 2**31 - 1
ANSWER_S: Final = 1.0
"""How long beyond the wait time of a fetch its broker is still assumed to be reachable."""
GATHER_BYTES: Final = 1024 * 1024
"""A gathering fetch is answered as soon as the broker has this many bytes."""
BETWEEN_S: Final = 0.1
"""How long after an answer without a next fetch in flight the answer still counts as the broker's latest state."""


class FetchSession:
    """What one broker remembers of our fetches; independent of time and of the connection.

    A fetch consists of `changes` and `forgotten`; `sent` notes that it was sent, `answered` its answer. After an error
    or a missing answer `reset` makes the next fetch a full one. Another set of partitions needs another object, since
    an answer for this one may be in flight.
    """

    __slots__ = ("_known", "epoch", "id")

    def __init__(self, session: int = NO_SESSION) -> None:
        """`session` is the id of a former session, which the broker then closes."""
        self.id = session
        self.epoch = FIRST_EPOCH
        self._known: dict[TopicPartition, int] = {}

    def reset(self) -> None:
        """Make the next fetch a full one, with which the broker closes the former session."""
        self.epoch = FIRST_EPOCH
        self._known.clear()

    @property
    def is_new(self) -> bool:
        """Whether the next fetch is a full one: it names every partition."""
        return self.epoch == FIRST_EPOCH

    def changes(self, positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Return those of `positions` that differ from what the broker remembers."""
        known = self._known
        return {place: offset for place, offset in positions.items() if known.get(place) != offset}

    def forgotten(self, places: Iterable[TopicPartition]) -> list[TopicPartition]:
        """Return those of `places` that the broker would continue to read, to be removed from the session."""
        return [place for place in places if place in self._known]

    def sent(self, changes: Mapping[TopicPartition, int], forgotten: Iterable[TopicPartition]) -> None:
        """Note that a fetch with these was sent."""
        self._known.update(changes)
        for place in forgotten:
            del self._known[place]

    def answered(self, error: int, session: int) -> None:
        """Note the session's error code and id in the broker's answer."""
        if error or session == NO_SESSION:
            self.id = NO_SESSION
            self.reset()
            return
        self.id = session
        self.epoch = 1 if self.epoch == LAST_EPOCH else self.epoch + 1

    def position(self, place: TopicPartition) -> int | None:
        """Return the offset from which the broker was asked to read a partition, or None."""
        return self._known.get(place)


class _Answer(msgspec.Struct, eq=False):
    """Decodes an answer for aiokafka's connection and keeps it for `SessionFetcher`."""

    response: FetchResponse_v11 | None = None

    def decode(self, frame: BytesIO) -> FetchResponse_v11:
        self.response = FetchResponse_v11.decode(frame)
        return self.response


class _Fetch(wire.EncodedRequest):
    """A fetch in flight, with a session (KIP-227, version 7) and nearer replicas (KIP-392, version 11)."""

    API_KEY = 1
    API_VERSION = 11
    RESPONSE_TYPE: Any = None  # set for each instance

    def __init__(self, body: bytes, session: FetchSession) -> None:
        super().__init__(body)
        self.RESPONSE_TYPE = self.answer = _Answer()
        self.session = session

    @property
    def topics(self) -> list[tuple[str, list[tuple[int, int | None, int]]]]:
        """The offset from which each partition in the answer was read; aiokafka looks up the answered ones here."""
        position, response = self.session.position, self.answer.response
        return [
            (topic, [(number, position(TopicPartition(topic, number)), 0) for number, *_ in partitions])
            for topic, partitions in (response.topics if response is not None else ())
        ]


class SessionFetcher(PacedFetcher):
    """aiokafka's fetcher with fetch sessions, for a manual assignment in which every partition is sought immediately.

    For a fetch it checks only the partitions that had news, were sought or have unread records; it checks all of them
    only after a change of the assignment or of the leaders.
    """

    def __init__(self, *arguments: Any, on_missing: Callable[[], None], **settings: Any) -> None:
        """`on_missing` is called when a broker answers that it does not have a partition; the rest as aiokafka's."""
        self._sessions: dict[int, FetchSession] = {}  # by node
        self._places: dict[int, list[TopicPartition]] = {}  # by leader
        self._leaders: dict[TopicPartition, int] = {}
        # by leader, the partitions whose position may differ from the one that the broker knows
        self._moved: dict[int, set[TopicPartition]] = {}
        # the assignment, the metadata and `NearerReplicas.moves` from which the above was made
        self._planned: tuple[Any, Any, int] = (None, None, 0)
        self._answered: dict[int, float] = {}  # by node, the time of its last answer (loop time)
        # partitions that were in an answer; a caller that has read one to its end may remove it
        self.news: set[TopicPartition] = set()
        self.fetches = self.named = 0  # totals: fetches sent, and partitions named in them
        # fetches that are sent before this time (the loop's) wait until then for more records
        self.gather_until = 0.0
        self._gathering: set[int] = set()  # nodes with such a fetch in flight
        self.leaderless = 0  # partitions without a leader, by the last metadata
        self._on_missing = on_missing
        super().__init__(*arguments, **settings)

    def seek_to(self, tp: TopicPartition, offset: int) -> None:
        """Move the position, and name the partition in the next fetch."""
        super().seek_to(tp, offset)
        self._note(tp)

    def unknown(self) -> list[TopicPartition]:
        """Return the partitions that may have more records than their brokers have answered with so far.

        A partition is up to date while a fetch waits at its broker, which would answer with any new record.
        """
        now = asyncio.get_running_loop().time()
        held = self._fetch_max_wait_ms / 1000 + ANSWER_S
        unknown: list[TopicPartition] = []
        for node, places in self._places.items():
            age = now - self._answered.get(node, float("-inf"))
            waits = node in self._in_flight and node not in self._gathering
            if self._sessions[node].is_new or age > (held if waits else BETWEEN_S):
                unknown += places
        return unknown

    def _note(self, place: TopicPartition) -> None:
        leader = self._leaders.get(place)
        if leader is not None:
            self._moved[leader].add(place)

    def _get_actions_per_node(self, assignment: Any) -> tuple[list[Any], dict[int, Any], float, bool, list[Any]]:
        """Return the next fetches, no resets, the longest wait, whether leaders are lacking, nothing to resume."""
        metadata = self._client.cluster._partitions  # a new object with each metadata update
        planned, copies = self._planned, self._preferred_read_replica
        if planned[0] is not assignment or planned[1] is not metadata or planned[2] != copies.moves:
            self._plan(assignment)
            self._planned = (assignment, metadata, copies.moves)
        pauses: dict[int, float] = {}
        for place, unread in self._records.items():
            leader = self._leaders.get(place)
            if leader is not None:
                self._moved[leader].add(place)
                pause = unread.calculate_backoff()
                if pause:
                    pauses[leader] = max(pause, pauses.get(leader, 0.0))
        fetches = [
            (node, self._fetch(assignment, node))
            for node in self._places
            if node not in self._in_flight and node not in pauses
        ]
        wait = min(pauses.values()) if pauses else self._fetcher_timeout
        lacking = bool(self.leaderless) and self.may_request_leaders(assignment)
        return [fetch for fetch in fetches if fetch[1] is not None], {}, wait, lacking, []

    def _plan(self, assignment: Any) -> None:
        """Assign the partitions to brokers; if that or the assignment has changed, start new sessions."""
        places: dict[int, list[TopicPartition]] = {}
        self.leaderless = 0
        for place in assignment.tps:
            leader = self._select_read_replica(place)  # the leader or a nearer replica
            if leader is None or leader == wire.NO_LEADER:
                self.leaderless += 1
            else:
                places.setdefault(leader, []).append(place)
        if self._planned[0] is assignment and places == self._places:
            return
        self._places = places
        self._leaders = {place: leader for leader, led in places.items() for place in led}
        self._moved = {leader: set() for leader in places}
        before, self._sessions = self._sessions, {}
        for leader in places:
            self._sessions[leader] = FetchSession(before[leader].id if leader in before else NO_SESSION)

    def _fetch(self, assignment: Any, node: int) -> _Fetch | None:
        """Return the next fetch for a node; None while all its partitions have unread records."""
        session = self._sessions[node]
        looked_at: Collection[TopicPartition] = self._places[node] if session.is_new else self._moved[node]
        unread = {place for place in looked_at if place in self._records}
        positions = {
            place: state.position
            for place in looked_at
            if place not in unread and (state := assignment.state_value(place)).has_valid_position
        }
        if session.is_new and not positions:
            return None
        changes, forgotten = session.changes(positions), session.forgotten(unread)
        self._moved[node] = unread
        gather_ms = round(1000 * (self.gather_until - asyncio.get_running_loop().time()))
        if gather_ms > 0:
            self._gathering.add(node)
        else:
            self._gathering.discard(node)
        fetch = _Fetch(
            wire.fetch_body(
                changes,
                forgotten,
                session=(session.id, session.epoch),
                wait_ms=gather_ms if gather_ms > 0 else self._fetch_max_wait_ms,
                least=GATHER_BYTES if gather_ms > 0 else self._fetch_min_bytes,
                most=self._fetch_max_bytes,
                most_each=self._max_partition_fetch_bytes,
                committed=self._isolation_level == READ_COMMITTED,
                rack=self._client_rack or "",
            ),
            session,
        )
        session.sent(changes, forgotten)
        self.fetches += 1
        self.named += len(changes) + len(forgotten)
        return fetch

    async def _proc_fetch_request(self, assignment: Any, node_id: int, request: _Fetch) -> bool:
        """Send a fetch and keep the fetched records. Returns whether a waiting reader has to be woken."""
        try:
            return bool(await super()._proc_fetch_request(assignment, node_id, request))
        finally:
            response = request.answer.response
            if response is None:
                request.session.reset()
            else:
                request.session.answered(response.error_code, response.session_id)
                self._answered[node_id] = asyncio.get_running_loop().time()
                unknown = False
                for topic, partitions in response.topics:
                    for number, error, *_ in partitions:
                        place = TopicPartition(topic, number)
                        self._note(place)
                        self.news.add(place)
                        unknown = unknown or error == UnknownTopicOrPartitionError.errno
                if unknown:
                    failures.guard("metadata", self._on_missing)


def session_fetcher(consumer: AIOKafkaConsumer) -> SessionFetcher:
    """Return the fetcher of a started consumer that was created to use sessions (`kafka_consumer.log_consumer`)."""
    fetcher = consumer._fetcher
    assert isinstance(fetcher, SessionFetcher)
    return fetcher
