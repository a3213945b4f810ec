"""Ownership of consumer groups: a group belongs to the principal that used its name first, while Kafka knows the group.

    await names.admit(grant, "billing")              # before anything joins the group for a client
    await names.end(grant, "billing", "orders")      # ends a subscription; deletes the group if the client owns it

Clients of all protocols name groups (AMQP addresses, container ids and link names; MQTT share names; HTTP paths). A
compacted table in Kafka (`__trivium_groups`) stores each owner. If two clients claim a name at the same time, at any
gateways, the claim that is first in the log wins. The access list's group rules take precedence (`authorization`). A
group with the name of a topic is that topic's queue and is open to everyone who may subscribe to the topic, unless the
name was claimed before the topic was there by somebody who may subscribe to it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Final
from weakref import WeakValueDictionary

import msgspec
import structlog

from gateway.kafka.cluster.cluster_admin import DEAD
from gateway.kafka.cluster.topics import Topics
from gateway.kafka.contracts import Refused
from gateway.kafka.groups.membership import Groups
from gateway.kafka.state import PendingWrite, StateTopics
from gateway.security.identity import ANONYMOUS_NAME
from gateway.security.rights.authorization import Grant
from mapping.outcomes import Outcome
from mapping.record import Received
from telemetry.statistics import counter, gauge

log = structlog.get_logger(__name__)

TOPIC: Final = "__trivium_groups"
READY_S: Final = 10.0  # how long a client waits for Kafka's answer about a name
SWEEP_S: Final = 6 * 3600.0  # between two sweeps for groups that Kafka has deleted
YOUNG_MS: Final = 24 * 3_600_000  # younger claims and uses are kept: the group may not exist yet
NAME_LIMIT: Final = 320  # characters: HTTP's 255 and a tenant's prefix
NAMES_PER_PRINCIPAL: Final = 20_000
NAMES: Final = 200_000  # in total: about 100 MB at some 500 bytes each


class Owned(msgspec.Struct, frozen=True, omit_defaults=True):
    """The stored record of one group name."""

    principal: str  # the owner
    claim: str  # the random id of the claim
    since_ms: int  # epoch milliseconds
    made: bool = False  # the group did not exist before, so the owner may delete it
    whole: bool = True  # whether the owner could subscribe to a topic of this name: only then its queue is the owner's
    selection: str = ""  # what the durable subscription of this name selects, as its client has given it; "" unknown


class GroupNamesStatistics(msgspec.Struct):
    """The names in the table, and counts since the start."""

    names: Annotated[int, gauge("consumer groups with an owner")] = 0
    claimed_total: Annotated[int, counter("group names claimed")] = 0
    refused_total: Annotated[int, counter("uses of group names refused")] = 0
    forgotten_total: Annotated[int, counter("group names released")] = 0
    undecodable_total: Annotated[int, counter("undecodable records in the table of owners, which are ignored")] = 0


class GroupNames:
    """The owners of consumer groups. Create it before the process's state topics are started."""

    def __init__(
        self,
        state: StateTopics,
        groups: Groups,
        topics: Topics,
        *,
        anonymous: bool,
        wall_clock: Callable[[], int],
        random_id: Callable[[], str],
    ) -> None:
        """Open the table in `state`, which loads it.

        If `anonymous` is false, groups owned by anonymous clients count as unowned. `wall_clock` returns epoch
        milliseconds, `random_id` the id of a claim.
        """
        self._groups = groups
        self._topics = topics
        self._anonymous = anonymous
        self._wall_clock = wall_clock
        self._random_id = random_id
        self._state = state
        self._table = state.open(TOPIC, self.apply, self.restarted)
        self._owned: dict[str, Owned] = {}
        self._counts: Counter[str] = Counter()  # names owned by each principal
        self._used_ms: dict[str, int] = {}  # last use of each name in the table
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._decoder = msgspec.json.Decoder(Owned)
        self._statistics = GroupNamesStatistics()
        self.released: list[Callable[[str], None]] = []  # called with each group that Kafka has deleted

    # the table

    def apply(self, record: Received) -> None:
        """Apply a record of the table. The first claim of a name counts until the name is released."""
        group = (record.key or b"").decode(errors="replace")
        if record.value is None:
            self._drop(group)
            return
        try:
            owned = self._decoder.decode(record.value)
        except (ValueError, RecursionError):  # msgspec's errors, or text that is not UTF-8
            self._statistics.undecodable_total += 1  # not ours
            return
        owner = self._find(group)
        if owner is None:
            self._drop(group)
            self._owned[group] = owned
            self._counts[owned.principal] += 1
        elif owner.claim == owned.claim:
            self._owned[group] = owned  # its selection has changed

    def restarted(self, partition: int) -> None:
        """Write a partition's entries from memory to the topic again, after the topic was re-created."""
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

    def _write(self, group: str, owned: Owned | None, written: PendingWrite | None = None) -> None:
        self._table.write(group.encode(), None if owned is None else msgspec.json.encode(owned), owner=written)

    # calls on behalf of clients

    async def admit(self, grant: Grant, group: str, topic: str | None = None) -> None:
        """Authorize a client to join a group and to commit for it. An unowned name becomes the client's.

        `topic` is the topic that the client reads in the group and is authorized to read, or None if not known yet.

        Raises:
            Refused: DENIED if another principal owns the group; BUSY if Kafka does not answer or the client has too
                many names; UNFIT for a name that is too long to be remembered.
        """
        if len(group) > NAME_LIMIT:
            raise Refused(Outcome.UNFIT, f"the name of a group has at most {NAME_LIMIT} characters")
        said = grant.group("read", group)  # also False for a name outside the client's namespace
        if said is False:
            raise self._denied(group)
        try:
            async with asyncio.timeout(READY_S):
                await self._state.loaded.wait()
                if said is None and self._is_queue(group, topic):
                    if not grant.subscribe.whole_topic(group):
                        raise self._denied(group)
                    return
                owned = await self._owner(group, grant)
        except TimeoutError:
            raise Refused(Outcome.BUSY, "Kafka does not answer about the group's owner") from None
        if said is None and owned.principal != grant.identity.name:
            raise self._denied(group)
        if group in self._owned:
            self._used_ms[group] = self._wall_clock()

    async def select(self, group: str, selection: str) -> None:
        """Begin a durable subscription anew if it now selects other messages (JMS 2.0, 8.3.3); call `admit` first.

        `selection` describes topic and filters. A group whose name has no owner in the table keeps its messages.

        Raises:
            Refused: UNFIT if the subscription has receivers; BUSY if Kafka does not answer.
        """
        owned = self._find(group)
        if owned is None or owned.selection == selection:
            return
        if owned.selection:
            topics = {partition.topic for partition in await self._groups.admin.committed(group)}
            if any([not await self._groups.delete(group, topic) for topic in topics]):
                raise Refused(Outcome.UNFIT, "the subscription has receivers with another selector or topic")
        self._owned[group] = owned = msgspec.structs.replace(owned, selection=selection)
        self._write(group, owned)

    async def end(self, grant: Grant, group: str, topic: str) -> bool:
        """End a subscription: delete its group if the client owns the group or a rule allows it.

        Returns False if the group was kept: the client may not delete it, it has members, or it covers other topics
        too. Raises Refused if Kafka does not answer or forbids the deletion.
        """
        said = grant.group("delete", group)
        if said is None:
            owned = self._find(group)
            said = owned is not None and owned.made and owned.principal == grant.identity.name
            said = said and not self._is_queue(group, topic)
            said = said and (group != topic or group not in self._topics.names)
        if not said or not await self._groups.delete(group, topic):
            return False
        self._give_up(group)
        return True

    def _is_queue(self, group: str, topic: str | None) -> bool:
        """Whether the group is the queue of the topic of its name, for a client that reads `topic` in it.

        A claim from before the topic was there binds: else a group could be taken by making a topic of its name. But
        the claim of somebody who may not subscribe to the topic does not bind the topic's own readers.
        """
        if group != topic and group not in self._topics.names:
            return False
        owned = self._find(group)
        return owned is None or (group == topic and not owned.whole)

    def _give_up(self, group: str) -> None:
        """Release a name immediately. A later claim is written to the log behind this release."""
        if group in self._owned:
            self._write(group, None)
            self._drop(group)
        for callback in self.released:
            callback(group)

    def _denied(self, group: str) -> Refused:
        self._statistics.refused_total += 1
        return Refused(Outcome.DENIED, f"not authorized for the group {group!r}")

    async def _owner(self, group: str, grant: Grant) -> Owned:
        """Return the owner of a name; claim the name for the client if it has none. The table must be loaded."""
        owned = self._find(group)
        if owned is not None:
            return owned
        lock = self._locks.get(group)
        if lock is None:
            lock = self._locks[group] = asyncio.Lock()
        async with lock:
            owned = self._find(group)
            return owned if owned is not None else await self._claim(group, grant)

    async def _claim(self, group: str, grant: Grant) -> Owned:
        principal = grant.identity.name
        if len(self._owned) >= NAMES or self._counts[principal] >= NAMES_PER_PRINCIPAL:
            raise Refused(Outcome.BUSY, "too many group names are in use")
        made = (await self._groups.admin.group(group)).state == DEAD
        whole = grant.subscribe.whole_topic(group)
        mine = Owned(principal, self._random_id(), self._wall_clock(), made, whole)
        written = PendingWrite()
        self._write(group, mine, written)
        if (await written.done).outcome is not Outcome.STORED:
            raise Refused(Outcome.BUSY, "the group's owner could not be stored")
        await self._state.read_to_end(TOPIC, group.encode())
        first = self._find(group)
        if first is None:
            raise Refused(Outcome.BUSY, "the owners of groups are being reloaded")
        if first.claim != mine.claim:
            self._write(group, first)  # compaction must keep the winner's record, not ours
        else:
            self._statistics.claimed_total += 1
        return first

    # housekeeping

    async def run(self) -> None:
        """Release the names of groups that Kafka has deleted, every `SWEEP_S`. Runs until cancelled."""
        await self._state.loaded.wait()
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.sweep()

    async def sweep(self) -> None:
        """Release the names of groups that no longer exist in Kafka and were not used for a day."""
        before = self._wall_clock() - YOUNG_MS

        def is_old(name: str) -> bool:
            owned = self._owned.get(name)
            return owned is not None and max(owned.since_ms, self._used_ms.get(name, 0)) < before

        old = [name for name in self._owned if is_old(name)]
        if not old:
            return
        try:
            there = frozenset(await self._groups.admin.groups())
        except Refused as refused:
            log.info("group names are not swept", reason=refused.reason)
            return
        for name in old:
            if name not in there and is_old(name):
                self._statistics.forgotten_total += 1
                self._give_up(name)

    def statistics(self) -> GroupNamesStatistics:
        """Return the current counts."""
        return msgspec.structs.replace(self._statistics, names=len(self._owned))
