"""Whose a consumer group is: the principal that used its name first, as long as Kafka knows the group.

    await names.admit(grant, "billing")              # before anything joins the group for a client
    await names.end(grant, "billing", "orders")      # a subscription's end: deletes what is the client's own

Names of groups come from clients of all protocols (addresses, container ids and link names of AMQP, share names of
MQTT, paths of HTTP). A table in Kafka (`__trivium_groups`, compacted) says whose they are; of two that claim a name at
once, at whichever gateways, the first in the log has it. The access list's rules about groups go before
(`authorization`), and a group that has a topic's name is that topic's queue: it belongs to all who may subscribe to the
topic.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Final
from weakref import WeakValueDictionary

import msgspec
import structlog

from gateway.kafka.cluster.topics import Topics
from gateway.kafka.contracts import Refused
from gateway.kafka.groups.membership import Groups
from gateway.kafka.state import StateTopic, StateTopics, Written
from gateway.security.authorization import Grant
from gateway.security.identity import ANONYMOUS_NAME
from gateway.statistics import counter, gauge
from mapping.outcomes import Outcome
from mapping.record import Received

log = structlog.get_logger(__name__)

TOPIC: Final = "__trivium_groups"
READY_S: Final = 10.0  # a client waits so long for Kafka's answer about a name
SWEEP_S: Final = 6 * 3600.0  # between two looks at which groups Kafka has forgotten
YOUNG_MS: Final = 24 * 3_600_000  # a name that was claimed or used since then stays: its group may yet have to come
NAMES_PER_PRINCIPAL: Final = 20_000
NAMES: Final = 200_000  # of all; one is some 500 bytes, so these are about 100 MB


class Owned(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is stored of a name."""

    principal: str  # whose it is
    claim: str  # the random id of the claim
    since_ms: int  # epoch milliseconds
    made: bool = False  # Kafka did not know the group before, so that it is the principal's to delete


class GroupNamesStatistics(msgspec.Struct):
    """Names that are kept now; and since the start."""

    names: Annotated[int, gauge("consumer groups with an owner")] = 0
    claimed_total: Annotated[int, counter("names claimed")] = 0
    refused_total: Annotated[int, counter("uses of a name refused")] = 0
    forgotten_total: Annotated[int, counter("names given up")] = 0
    undecodable_total: Annotated[int, counter("records of their table that cannot be read; they are ignored")] = 0


class GroupNames:
    """The owners of consumer groups; `bind` it to the process's state topics before these are started."""

    def __init__(
        self,
        groups: Groups,
        topics: Topics,
        *,
        anonymous: bool,
        wall_clock: Callable[[], int],
        random_id: Callable[[], str],
    ) -> None:
        """An empty table, which the state topics load.

        Where anonymous clients are not allowed (any more), the groups that they owned have no owner. `wall_clock` gives
        epoch milliseconds, `random_id` the id of a claim.
        """
        self._groups = groups
        self._topics = topics
        self._anonymous = anonymous
        self._wall_clock = wall_clock
        self._random_id = random_id
        self._state: StateTopics | None = None
        self._table: StateTopic | None = None
        self._owned: dict[str, Owned] = {}
        self._counts: Counter[str] = Counter()  # names, by principal
        self._used_ms: dict[str, int] = {}  # of names that are in the table
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._decoder = msgspec.json.Decoder(Owned)
        self._statistics = GroupNamesStatistics()

    # the table

    def bind(self, state: StateTopics) -> None:
        """Open the topic."""
        self._state = state
        self._table = state.open(TOPIC, self.apply, self.restarted)

    def apply(self, record: Received) -> None:
        """Take a record of the table over: the first claim counts until the name is given up."""
        group = (record.key or b"").decode(errors="replace")
        if record.value is None:
            self._drop(group)
            return
        try:
            owned = self._decoder.decode(record.value)
        except msgspec.MsgspecError:
            self._statistics.undecodable_total += 1  # not ours
            return
        if self._find(group) is None:
            self._drop(group)
            self._owned[group] = owned
            self._counts[owned.principal] += 1

    def restarted(self, partition: int) -> None:
        """Write what the table in memory has of a partition to its topic, which was made anew."""
        assert self._table is not None, "it is not bound"
        for group, owned in self._owned.items():
            if self._table.partition_of(group.encode()) == partition:
                self._write(group, owned)

    def _drop(self, group: str) -> None:
        owned = self._owned.pop(group, None)
        self._used_ms.pop(group, None)
        if owned is not None:
            self._counts[owned.principal] -= 1
            if not self._counts[owned.principal]:
                del self._counts[owned.principal]

    def _find(self, group: str) -> Owned | None:
        owned = self._owned.get(group)
        if owned is not None and owned.principal == ANONYMOUS_NAME and not self._anonymous:
            return None
        return owned

    def _write(self, group: str, owned: Owned | None, written: Written | None = None) -> None:
        assert self._table is not None, "it is not bound"
        self._table.write(group.encode(), None if owned is None else msgspec.json.encode(owned), owner=written)

    # what clients ask

    async def admit(self, grant: Grant, group: str, topic: str | None = None) -> None:
        """Allow a client to be a member of a group and to commit for it; a name without an owner becomes its own.

        `topic` is what the client reads in it, and may read; None: not known yet.

        Raises:
            Refused: DENIED: it is somebody else's; BUSY: Kafka does not answer, or the client has too many names.
        """
        said = grant.group("read", group)  # False also for a name that the client cannot mean
        if said is False:
            raise self._denied(group)
        if said is None and (group == topic or group in self._topics.names):
            if not grant.subscribe.whole_topic(group):
                raise self._denied(group)
            return
        principal = grant.identity.name
        try:
            async with asyncio.timeout(READY_S):
                owned = await self._owner(group, principal)
        except TimeoutError:
            raise Refused(Outcome.BUSY, "Kafka does not say whose the group is") from None
        if said is None and owned.principal != principal:
            raise self._denied(group)
        if group in self._owned:
            self._used_ms[group] = self._wall_clock()

    async def end(self, grant: Grant, group: str, topic: str) -> bool:
        """End a subscription: delete its group if that is the client's own, or a rule says so.

        Returns:
            False when the group is left alone: it is not the client's, it has members, or is for other topics too.

        Raises:
            Refused: Kafka does not answer, or forbids it.
        """
        said = grant.group("delete", group)
        if said is None:
            owned = self._find(group)
            said = owned is not None and owned.made and owned.principal == grant.identity.name
            said = said and group not in self._topics.names
        if not said or not await self._groups.delete(group, topic):
            return False
        self._give_up(group)
        return True

    def _give_up(self, group: str) -> None:
        """Free a name at once: a claim that comes now is written behind this."""
        if group in self._owned:
            self._write(group, None)
            self._drop(group)

    def _denied(self, group: str) -> Refused:
        self._statistics.refused_total += 1
        return Refused(Outcome.DENIED, f"the group {group!r} is not this client's")

    async def _owner(self, group: str, principal: str) -> Owned:
        """The owner of a name, after claiming it for `principal` where it has none."""
        owned = self._find(group)
        if owned is not None:
            return owned
        assert self._state is not None, "it is not bound"
        await self._state.loaded.wait()
        lock = self._locks.get(group)
        if lock is None:
            lock = self._locks[group] = asyncio.Lock()
        async with lock:
            owned = self._find(group)
            return owned if owned is not None else await self._claim(group, principal)

    async def _claim(self, group: str, principal: str) -> Owned:
        assert self._state is not None
        if len(self._owned) >= NAMES or self._counts[principal] >= NAMES_PER_PRINCIPAL:
            raise Refused(Outcome.BUSY, "too many names of groups are in use")
        made = not await self._groups.admin.exists(group)
        mine = Owned(principal, self._random_id(), self._wall_clock(), made)
        written = Written()
        self._write(group, mine, written)
        if (await written.done).outcome is not Outcome.STORED:
            raise Refused(Outcome.BUSY, "whose the group is could not be stored")
        await self._state.follow(TOPIC, group.encode())
        first = self._find(group)
        if first is None:
            raise Refused(Outcome.BUSY, "whose the groups are is being read anew")
        if first.claim != mine.claim:
            self._write(group, first)  # ours must not be what compaction leaves of the two
        else:
            self._statistics.claimed_total += 1
        return first

    # housekeeping

    async def run(self) -> None:
        """Give up the names of groups that Kafka has forgotten, for ever."""
        assert self._state is not None
        await self._state.loaded.wait()
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.sweep()

    async def sweep(self) -> None:
        """Give up the names of groups that Kafka knows no more and that nobody has used for a day."""
        before = self._wall_clock() - YOUNG_MS

        def is_old(name: str) -> bool:
            owned = self._owned.get(name)
            return owned is not None and max(owned.since_ms, self._used_ms.get(name, 0)) < before

        old = [name for name in self._owned if is_old(name)]
        if not old:
            return
        try:
            there = frozenset(await self._groups.admin.names())
        except Refused as refused:
            log.info("names of groups are not looked through", reason=refused.reason)
            return
        for name in old:
            if name not in there and is_old(name):
                self._statistics.forgotten_total += 1
                self._give_up(name)

    def statistics(self) -> GroupNamesStatistics:
        """Counts so far."""
        return msgspec.structs.replace(self._statistics, names=len(self._owned))
