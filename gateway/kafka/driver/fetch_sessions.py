"""Fetches that name only what has changed (KIP-227), for a reader of very many partitions.

aiokafka 0.14, which is pinned, names every partition in every fetch and looks at each of them some times a second: ten
percent of a processor for 5,000 partitions in which nothing happens. Brokers since Kafka 1.1 remember what a reader has
named before, and answer with what has news. `SessionFetcher` stands in the place of aiokafka's fetcher; what is fetched
is treated by aiokafka as before.
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

from gateway.failures import failures
from gateway.kafka.driver import wire
from gateway.kafka.driver.fetching import PacedFetcher, convert_arrivals

NO_SESSION: Final = 0
"""The id in the answer of a broker that has no place for one more session; the next fetch names everything again."""
FIRST_EPOCH: Final = 0
LAST_EPOCH: Final = 2**31 - 1
ANSWER_S: Final = 1.0
"""How much later than it was told to a broker may answer a fetch, and still be thought to be there."""
GATHER_BYTES: Final = 1024 * 1024
"""So much ends the time in which a fetch gathers."""
BETWEEN_S: Final = 0.1
"""How long after an answer the next fetch may begin, and the answer still be thought to be what there is."""


class FetchSession:
    """What one broker remembers of our fetches: nothing of it depends on time or on the connection.

    A fetch is made of `changes` and `forgotten`, then told by `asked`, and its answer by `answered`. After no answer,
    or an error, the next fetch is a `begin` and names everything. For other partitions it is another object, since an
    answer may be on its way to this one.
    """

    __slots__ = ("_known", "epoch", "id")

    def __init__(self, session: int = NO_SESSION) -> None:
        """`session`: the id of one that the broker may give up."""
        self.id = session
        self.epoch = FIRST_EPOCH
        self._known: dict[TopicPartition, int] = {}

    def begin(self) -> None:
        """The next fetch names everything, and the broker gives up what it remembers."""
        self.epoch = FIRST_EPOCH
        self._known.clear()

    @property
    def is_new(self) -> bool:
        """Whether the next fetch names everything."""
        return self.epoch == FIRST_EPOCH

    def changes(self, positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Those of `positions` that the broker does not have so."""
        known = self._known
        return {place: offset for place, offset in positions.items() if known.get(place) != offset}

    def forgotten(self, places: Iterable[TopicPartition]) -> list[TopicPartition]:
        """Those of `places` that the broker would go on to read."""
        return [place for place in places if place in self._known]

    def asked(self, changes: Mapping[TopicPartition, int], forgotten: Iterable[TopicPartition]) -> None:
        """The broker is sent these."""
        self._known.update(changes)
        for place in forgotten:
            del self._known[place]

    def answered(self, error: int, session: int) -> None:
        """The broker's words about the session: an error code, and its id."""
        if error or session == NO_SESSION:
            self.id = NO_SESSION
            self.begin()
            return
        self.id = session
        self.epoch = 1 if self.epoch == LAST_EPOCH else self.epoch + 1

    def position(self, place: TopicPartition) -> int | None:
        """From where the broker was asked to read; None where it was not."""
        return self._known.get(place)


class _Answer(msgspec.Struct, eq=False):
    """What aiokafka's connection makes of an answer, kept for us beside aiokafka's own use of it."""

    response: FetchResponse_v11 | None = None

    def decode(self, frame: BytesIO) -> FetchResponse_v11:
        self.response = FetchResponse_v11.decode(frame)
        return self.response


class _Fetch(wire.FetchQuestion):
    """A fetch under way."""

    RESPONSE_TYPE: Any = None  # of each its own

    def __init__(self, body: bytes, session: FetchSession) -> None:
        super().__init__(body)
        self.RESPONSE_TYPE = self.answer = _Answer()
        self.session = session

    @property
    def topics(self) -> list[tuple[str, list[tuple[int, int | None, int]]]]:
        """From where each partition in the answer was read: aiokafka looks up in it what has been answered."""
        position, response = self.session.position, self.answer.response
        return [
            (topic, [(number, position(TopicPartition(topic, number)), 0) for number, *_ in partitions])
            for topic, partitions in (response.topics if response is not None else ())
        ]


class SessionFetcher(PacedFetcher):
    """aiokafka's fetcher, for a manual assignment whose partitions are all sought right after it is made.

    What is looked at for a fetch is what had news, was sought, or is not read to its end. Only when the assignment or
    the leaders have changed it is all partitions.
    """

    def __init__(self, *arguments: Any, doubted: Callable[[], None], **settings: Any) -> None:
        """As aiokafka's; `doubted` is called when a broker says that it does not have a partition."""
        self._sessions: dict[int, FetchSession] = {}  # by node
        self._places: dict[int, list[TopicPartition]] = {}  # by leader
        self._leaders: dict[TopicPartition, int] = {}
        self._moved: dict[int, set[TopicPartition]] = {}  # by leader: whose position may not be the broker's
        # the assignment, the metadata, and the moves to other copies that the above is of
        self._planned: tuple[Any, Any, int] = (None, None, 0)
        self._answered: dict[int, float] = {}  # by node, when (loop time)
        # partitions of which something was told; whoever finds one read to its end may take it out
        self.news: set[TopicPartition] = set()
        self.fetches = self.named = 0  # how many were sent, ever; and partitions in them
        # fetches that begin before this time (the loop's) gather what comes until then
        self.gather_until = 0.0
        self._gathering: set[int] = set()  # nodes with such a fetch under way
        self.leaderless = 0  # how many partitions nobody leads, as of the last metadata
        self._doubted = doubted
        super().__init__(*arguments, **settings)

    def seek_to(self, tp: TopicPartition, offset: int) -> None:
        """See aiokafka."""
        super().seek_to(tp, offset)
        self._note(tp)

    def unknown(self) -> list[TopicPartition]:
        """The partitions of which it is not known at this moment whether more is stored than was told.

        It is known of what a fetch waits for at a broker, which would have answered.
        """
        now = asyncio.get_running_loop().time()
        held = self._fetch_max_wait_ms / 1000 + ANSWER_S
        found: list[TopicPartition] = []
        for node, places in self._places.items():
            told = now - self._answered.get(node, float("-inf"))
            waits = node in self._in_flight and node not in self._gathering
            if self._sessions[node].is_new or told > (held if waits else BETWEEN_S):
                found += places
        return found

    def _note(self, place: TopicPartition) -> None:
        leader = self._leaders.get(place)
        if leader is not None:
            self._moved[leader].add(place)

    def _get_actions_per_node(self, assignment: Any) -> tuple[list[Any], dict[int, Any], float, bool, list[Any]]:
        """What to do next: fetches, nothing to be reset, how long to wait at most, whether leaders are lacking."""
        metadata = self._client.cluster._partitions  # another object with each answer
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
        lacking = bool(self.leaderless) and self.may_ask_for_leaders(assignment)
        return [fetch for fetch in fetches if fetch[1] is not None], {}, wait, lacking, []

    def _plan(self, assignment: Any) -> None:
        """Who leads what; where that or the assignment is another, sessions begin anew."""
        places: dict[int, list[TopicPartition]] = {}
        self.leaderless = 0
        for place in assignment.tps:
            leader = self._select_read_replica(place)  # or a nearer copy
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
        """The next fetch of a node; None where all that it leads is waiting to be read."""
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
            wire.fetch_of(
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
        session.asked(changes, forgotten)
        self.fetches += 1
        self.named += len(changes) + len(forgotten)
        return fetch

    async def _proc_fetch_request(self, assignment: Any, node_id: int, request: _Fetch) -> bool:
        """Send a fetch and keep what it brings. Whether somebody has to be woken."""
        try:
            return bool(await super()._proc_fetch_request(assignment, node_id, request))
        finally:
            response = request.answer.response
            if response is None:
                request.session.begin()
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
                    failures.guard("metadata", self._doubted)


async def use_sessions(consumer: AIOKafkaConsumer, doubted: Callable[[], None]) -> SessionFetcher:
    """Let a consumer that was just started fetch so; see `SessionFetcher` for what it must keep to, and `doubted`."""
    before, task = consumer._fetcher, asyncio.current_task()
    assert task is not None
    cancelled = task.cancelling()
    await before.close()  # it swallows a cancellation that is meant for us
    if task.cancelling() > cancelled:
        raise asyncio.CancelledError
    fetcher = consumer._fetcher = SessionFetcher(
        consumer._client,
        consumer._subscription,
        fetch_min_bytes=before._fetch_min_bytes,
        fetch_max_bytes=before._fetch_max_bytes,
        fetch_max_wait_ms=before._fetch_max_wait_ms,
        max_partition_fetch_bytes=before._max_partition_fetch_bytes,
        check_crcs=before._check_crcs,
        fetcher_timeout=before._fetcher_timeout,
        auto_offset_reset="none",
        client_rack=before._client_rack,
        isolation_level="read_committed" if before._isolation_level == READ_COMMITTED else "read_uncommitted",
        doubted=doubted,
    )
    convert_arrivals(consumer)
    return fetcher
