"""Consumer instances: created, polled, committed and deleted by name; abandoned ones are removed.

A waiting poll blocks only other polls of its own consumer: commits, seeks and a delete of that consumer run meanwhile.
Records count as delivered only after the answer was written.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final

import msgspec
import structlog
from aiohttp import web
from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndMetadata

from flowcontrol.admission import Admission, Refusal, client_share
from gateway.kafka.contracts import Refused
from gateway.kafka.groups.member_starts import StartsOfGroups
from gateway.kafka.groups.polled_member import MemberSettings, PolledMember
from gateway.kafka.groups.progress import Chunk
from gateway.kafka.groups.refusals import NotAssignedError
from gateway.kafka.read.arrivals import Arrivals
from gateway.rest.consume.instance import Instance
from gateway.rest.consume.page_size import Shown, fill_page, page_size
from gateway.rest.present import ABANDONED, BY_CLIENT, BY_SERVER, STOPPED
from gateway.rest.server.answers import control_answer, no_content, own_address, records_answer
from gateway.rest.server.call import Call
from gateway.rest.server.client_limits import RequestLimits
from gateway.rest.server.operation_set import OperationSet
from gateway.rest.server.request_login import forbidden
from gateway.rest.services import RestServices
from gateway.security.identity import Identity
from gateway.security.rights.authorization import Grant
from gateway.views.clients import CONNECTION_LOG
from gateway.views.presence import HTTP, Ended, Present
from mapping.rest.outgoing import from_record
from protocols.rest.consuming import (
    CreateConsumer,
    PartitionOffset,
    PollLimits,
    decode_create,
    decode_offsets,
    poll_limits,
)
from protocols.rest.errors import SHUTTING_DOWN, Fault, RestError, busy, not_found, too_many
from protocols.rest.forwarded import base_uri, client_path, group_path, instance_path
from protocols.rest.media import RECORD_TYPES, accepts
from protocols.rest.responses import encode
from telemetry.statistics import counter, gauge

log = structlog.get_logger(__name__)
connection_log = structlog.get_logger(CONNECTION_LOG)

NAME_PREFIX: Final = "kafka-bridge-consumer-"  # Strimzi's
NO_CONSUMER: Final = "The specified consumer instance was not found."
NAME_TAKEN: Final = "A consumer instance with the specified name already exists in the Kafka Bridge."
OTHER_FORMAT: Final = "Consumer format does not match the embedded format requested by the Accept header."
NOT_SUBSCRIBED: Final = "Consumer is not subscribed to any topics or assigned any partitions"
COMMIT_INTERVAL_S: Final = 5.0  # of automatic commits, like Kafka's `auto.commit.interval.ms`
LAST_COMMIT_S: Final = 3.0  # for the commit before a consumer is closed; a deletion takes at most this plus `STOP_S`
STOP_S: Final = 5.0
PREFETCH: Final = 512 * 1024 * 1024  # bytes prefetched by all consumers; a new one gets a share
MOST_PREFETCH: Final = 8 * 1024 * 1024
HEARTBEATS: Final = 20  # a second, of all consumers; a new one gets a share
SHORTEST_HEARTBEAT_S: Final = 3.0  # Kafka's default
LEAST_PREFETCH: Final = 1024 * 1024
REAP_FRACTION: Final = 10  # an abandoned consumer is kept at most a tenth longer than `consumer_idle_s`


class CreatedConsumer(msgspec.Struct, frozen=True, gc=False):
    """The answer to the creation of a consumer."""

    instance_id: str
    base_uri: str


class ConsumersStatistics(msgspec.Struct):
    """Counts of consumer instances, since the start."""

    instances: Annotated[int, gauge("consumers of HTTP clients")] = 0
    polling: Annotated[int, gauge("polls in progress")] = 0
    sleeping: Annotated[int, gauge("polls that sleep until a record is stored")] = 0
    leaderless: Annotated[int, gauge("partitions of HTTP consumers without a leader now")] = 0
    created_total: Annotated[int, counter("consumers created")] = 0
    reaped_total: Annotated[int, counter("abandoned consumers removed")] = 0
    records_total: Annotated[int, counter("records delivered by polls")] = 0


class Consumers(OperationSet):
    """All instances of this process, by group and name."""

    name = "consumers"

    def __init__(self, services: RestServices, client_limits: RequestLimits) -> None:
        config = self._config = services.config
        self._client_limits = client_limits
        self._kafka = services.kafka
        self._names = services.names
        self._spawn = services.spawn
        self._outgoing = services.publisher.budgets.outgoing
        self.clock = services.clock  # monotonic seconds
        self.wall_clock = services.wall_clock  # epoch milliseconds
        self._presence = services.presence
        self._arrivals = Arrivals(services.live_reader, services.lookup)
        self._lookup = services.lookup
        self._starts = StartsOfGroups(services.lookup)
        self._instances: dict[tuple[str, str], Instance | None] = {}  # None: being created
        self._places = Admission(
            config.max_consumers, client_share(config.max_consumers, config.max_consumers_per_client)
        )
        self._deletions: dict[tuple[str, str], tuple[Identity, asyncio.Task[None]]] = {}  # running, with the owner
        self._timer: asyncio.TimerHandle | None = None
        self._draining = False
        self._counts = ConsumersStatistics()
        self._largest = PollLimits(round(config.max_poll_wait_s * 1000), config.poll_max_bytes)
        self._default = PollLimits(config.default_poll_wait_ms, config.poll_max_bytes)
        self.operations = {
            "createConsumer": self.create,
            "deleteConsumer": self.delete,
            "poll": self.poll,
            "commit": self.commit,
        }

    # Life of an instance

    async def create(self, call: Call, group: str) -> web.StreamResponse:
        """`POST /consumers/{groupid}`."""
        return control_answer(encode(await self.add(call, group, decode_create(await call.body()))))

    async def add(self, call: Call, group: str, create: CreateConsumer, under: str = "") -> CreatedConsumer:
        """Create an instance owned by the client; `under` is the path before `/consumers` in its URL.

        Raises:
            Refused: The group belongs to another client, or Kafka does not answer.
            RestError: 409 if the name is taken, 429 if there are too many.
        """
        request, grant = call.request, call.grant
        name = create.name or f"{NAME_PREFIX}{uuid.uuid4()}"
        path = instance_path(client_path(request.headers, under + group_path(grant.names.own(group))), name)
        uri = base_uri(request.headers, path, secure=request.secure, bound=own_address(request))
        key = (group, name)
        if key in self._instances:
            raise RestError(409, NAME_TAKEN, fault=Fault.NAME_TAKEN)
        if sum(1 for other, _ in self._instances if other == group) >= self._config.max_consumers_per_group:
            raise too_many("The group has too many consumers; delete some or try again")
        client = call.connection.share
        refusal = self._places.enter(client)
        if refusal is Refusal.FULL:
            raise too_many("There are too many consumers; delete some or try again")
        if refusal is not None:
            raise too_many(f"You have {self._places.limit_per_client} consumers; delete some or try again")
        self._instances[key] = None
        try:
            await self._names.admit(grant, group)
            member = self._member(group, name, create)
            await member.start()
        except BaseException:
            del self._instances[key]
            self._places.leave(client)
            raise
        instance = Instance(
            group, name, create.embedded, grant=grant, member=member, client=client, now=self.clock(), close=self.close
        )
        self._instances[key] = instance
        if self._draining:  # the shutdown started meanwhile
            await self._close(instance, delivered=False)
            raise busy(SHUTTING_DOWN, close=True)
        self._counts.created_total += 1
        if self._presence is not None:
            present = Present(name, instance.principal, HTTP, call.connection.peer, self.wall_clock())
            self._presence.online(instance.identifier, instance, present)
        connection_log.info("consumer created", group=group, name=name, principal=grant.identity.name)
        return CreatedConsumer(name, uri)

    def _member(self, group: str, name: str, create: CreateConsumer) -> PolledMember:
        count = len(self._instances)
        default = self._config.consumer
        settings = MemberSettings(
            group=group,
            client_id=name,
            auto_offset_reset=create.auto_offset_reset or default.auto_offset_reset,
            fetch_min_bytes=default.fetch_min_bytes if create.fetch_min_bytes is None else create.fetch_min_bytes,
            fetch_bytes=max(LEAST_PREFETCH, min(MOST_PREFETCH, PREFETCH // count)),
            isolation_level=create.isolation_level or default.isolation_level,
            session_timeout_s=default.session_timeout_s,
            # at most a third of the session timeout: two may be lost
            heartbeat_s=min(default.session_timeout_s / 3, max(SHORTEST_HEARTBEAT_S, count / HEARTBEATS)),
            request_timeout_ms=create.request_timeout_ms,
            idle_s=self._config.consumer_idle_s,
        )
        return PolledMember(
            settings,
            self._kafka,
            self._arrivals,
            self._lookup,
            starts=self._starts.of(group),
            auto_commit=default.enable_auto_commit if create.enable_auto_commit is None else create.enable_auto_commit,
            spawn=self._spawn,
            clock=self.clock,
        )

    def find(self, grant: Grant, group: str, name: str) -> Instance:
        """Return an instance of this client; RestError 404 if there is none, 403 if it is another client's."""
        instance = self._instances.get((group, name))
        if instance is None:
            raise not_found(NO_CONSUMER, Fault.CONSUMER)
        if not instance.owner.is_same_client(grant.identity):
            raise forbidden("another client's consumer")
        instance.owner, instance.grant = grant.identity, grant  # a newer token may name other groups
        instance.used = self.clock()
        return instance

    def clients(self) -> list[Instance]:
        """Return all instances, without those being created."""
        return [instance for instance in self._instances.values() if instance is not None]

    def close(self, instance: Instance) -> None:
        """Close an instance on behalf of an operator; does nothing if it is closed."""
        if not instance.closed:
            self._spawn(self._close(instance, delivered=False, ended=BY_SERVER))

    async def delete(self, call: Call, group: str, name: str) -> web.StreamResponse:
        """`DELETE /consumers/{groupid}/instances/{name}`; ends a running poll.

        A repeated request waits for the deletion that is running (Kafka was slow, and the client's connection broke).
        """
        key = (group, name)
        owner, deletion = self._deletions.get(key, (None, None))
        if key in self._instances or deletion is None or owner is None or not owner.is_same_client(call.grant.identity):
            instance = self.find(call.grant, group, name)
            deletion = self._spawn(self._close(instance, delivered=True, ended=BY_CLIENT))
            self._deletions[key] = (instance.owner, deletion)
            deletion.add_done_callback(lambda done: self._deleted(key, done))
        await asyncio.wait((deletion,))  # the consumer is gone even if this fails; the task logs our failures
        return no_content()

    def _deleted(self, key: tuple[str, str], deletion: asyncio.Task[None]) -> None:
        _, last = self._deletions.get(key, (None, None))
        if last is deletion:  # else another consumer of this name is being deleted
            del self._deletions[key]

    def _forget(self, instance: Instance) -> None:
        """Give the instance's name and place back; later calls do nothing."""
        if self._instances.get((instance.group, instance.name)) is instance:
            del self._instances[instance.group, instance.name]
            self._places.leave(instance.client)

    async def _close(self, instance: Instance, *, delivered: bool, ended: Ended = STOPPED) -> None:
        """Remove the instance immediately, then commit its positions and leave the group."""
        self._forget(instance)
        if self._presence is not None:
            self._presence.offline(instance.identifier, instance, ended)
        instance.closed = True
        member = instance.member
        member.interrupt()
        if member.auto_commit and member.is_assigned:
            try:
                async with asyncio.timeout(LAST_COMMIT_S):
                    if delivered:
                        await member.commit_delivered()
                    else:
                        await member.commit_confirmed()
            except (Refused, NotAssignedError, TimeoutError) as error:
                log.warning("offsets not committed before the close", group=instance.group, reason=str(error))
        await member.stop(STOP_S)
        connection_log.info("consumer closed", group=instance.group, name=instance.name)

    # Reading and committing

    async def poll(self, call: Call, group: str, name: str) -> web.StreamResponse:
        """`GET .../records`: the available records, as soon as there are any."""
        return await self.read(call, self.find(call.grant, group, name), call.query, self._default, from_record)

    async def read(
        self, call: Call, instance: Instance, wanted: Mapping[str, int], default: PollLimits, shown: Shown
    ) -> web.StreamResponse:
        """Poll an instance; `default` has the `timeout` and `max_bytes` that are used if the client sends none.

        Raises:
            Refused: Kafka refuses; no record is lost.
            RestError: See the contract.
        """
        media = RECORD_TYPES[instance.embedded]
        if not accepts(call.request.headers.get("Accept"), media):
            raise RestError(406, OTHER_FORMAT, fault=Fault.FORMAT)
        limits = poll_limits(wanted, default, self._largest)
        member = instance.member
        if not member.is_assigned:
            raise RestError(409, NOT_SUBSCRIBED, fault=Fault.NOT_ASSIGNED)
        deadline = self.clock() + limits.timeout_ms / 1000
        instance.users += 1
        self._counts.polling += 1
        try:
            async with asyncio.timeout_at(deadline) as turn:
                await instance.polls.acquire()
                turn.reschedule(None)
        except TimeoutError:
            return records_answer(b"[]", instance.embedded)  # another poll of this consumer is still waiting
        else:
            try:
                return await self._page(call, instance, deadline, limits.max_bytes, shown)
            finally:
                instance.polls.release()
        finally:
            self._counts.polling -= 1
            instance.users -= 1
            instance.used = self.clock()

    async def _page(
        self, call: Call, instance: Instance, deadline: float, max_bytes: int, shown: Shown
    ) -> web.StreamResponse:
        _check_rights(instance)
        pace = self._client_limits.check_reading(call.connection)
        member = instance.member
        member.progress.confirm()
        self._commit_when_due(instance)
        names = call.grant.names
        stuck: dict[TopicPartition, str] = {}
        self._check_open(instance)
        await member.wait(max(0.0, deadline - self.clock()))
        size, most = page_size(self._outgoing, max_bytes), sys.maxsize
        if pace is not None:
            most, size = pace.page(most, size)
        page, chunks = fill_page(member, instance.embedded, size, stuck, shown, names, most=most)
        if stuck and not chunks:  # try the other partitions once
            await member.wait(0.0, stuck)
            page, chunks = fill_page(member, instance.embedded, size, stuck, shown, names, most=most)
        self._check_open(instance)
        _check_rights(instance, chunks)
        if not chunks and stuck:
            # The position stays before the record: the client must read it in another format, or seek past it.
            raise RestError(406, next(iter(stuck.values())), fault=Fault.FORMAT)
        content = page.finish()
        if pace is not None:
            pace.spend(page.count, len(content))
        answer = records_answer(content, instance.embedded)
        instance.unread = call.request.transport
        instance.answered = self.clock()
        try:
            await call.begin(answer)
            await answer.write_eof()  # raises when the client has disconnected: then nothing was delivered
        finally:
            instance.unread = None
        member.progress.deliver(chunks)
        self._counts.records_total += page.count
        return answer

    def _check_open(self, instance: Instance) -> None:
        if self._draining:
            raise busy(SHUTTING_DOWN, close=True)
        if instance.closed:
            raise not_found(NO_CONSUMER, Fault.CONSUMER)

    def _commit_when_due(self, instance: Instance) -> None:
        member = instance.member
        now = self.clock()
        if member.auto_commit and now - instance.last_commit >= COMMIT_INTERVAL_S and member.has_uncommitted:
            instance.last_commit = now
            self._spawn(self._auto_commit(instance))

    async def _auto_commit(self, instance: Instance) -> None:
        try:
            await instance.member.commit_confirmed()
        except (Refused, NotAssignedError) as error:
            log.warning("offsets not committed", group=instance.group, reason=str(error))

    async def commit(self, call: Call, group: str, name: str) -> web.StreamResponse:
        """`POST .../offsets`: commits the offsets in the body, or without a body those of all delivered records."""
        return await self.commit_offsets(call, group, name, lambda body: decode_offsets(body) if body else None)

    async def commit_offsets(
        self, call: Call, group: str, name: str, decode: Callable[[bytes], list[PartitionOffset] | None]
    ) -> web.Response:
        """Commit the offsets that `decode` finds in the body; None means those of all delivered records."""
        instance, topic = self.find(call.grant, group, name), call.grant.names.topic
        _check_rights(instance)
        wanted = decode(await call.body())
        if wanted is None:
            await instance.member.commit_delivered()
        else:
            await instance.member.commit(
                {
                    TopicPartition(topic(entry.topic), entry.partition): OffsetAndMetadata(
                        entry.offset, entry.metadata or ""
                    )
                    for entry in wanted
                }
            )
        return no_content()

    # Housekeeping

    def start(self) -> None:
        """Schedule the next check for abandoned instances."""
        period = self._config.consumer_idle_s / REAP_FRACTION
        self._timer = asyncio.get_running_loop().call_later(period, self._reap)

    def _reap(self) -> None:
        self.start()  # first, so that a failure below does not end the checks
        oldest = self.clock() - self._config.consumer_idle_s
        for instance in self.clients():
            unread = instance.unread if instance.answered < oldest else None
            if unread is not None:  # else a new poll on another connection would wait for this one
                log.info("a poll's answer was not read", group=instance.group, name=instance.name)
                unread.abort()
            if instance.used < oldest and instance.users == (unread is not None):
                self._counts.reaped_total += 1
                self._forget(instance)
                self._spawn(self._close(instance, delivered=False, ended=ABANDONED))

    async def drain(self) -> None:
        """Close all instances and end running polls; from now on none is created or polled."""
        self._draining = True
        if self._timer is not None:
            self._timer.cancel()
        instances = self.clients()
        if instances:
            await asyncio.wait([self._spawn(self._close(instance, delivered=False)) for instance in instances])

    async def stop(self) -> None:
        """Stop watching topics."""
        self._arrivals.stop()

    def statistics(self) -> ConsumersStatistics:
        """Return the counts so far."""
        return msgspec.structs.replace(
            self._counts,
            instances=len(self._instances),
            sleeping=self._arrivals.sleepers,
            leaderless=sum(instance.member.leaderless for instance in self._instances.values() if instance is not None),
        )


def _check_rights(instance: Instance, chunks: Sequence[Chunk] = ()) -> None:
    """Raise RestError 403 if the client may no longer use the group, or may not read a topic of it."""
    grant, member = instance.grant, instance.member
    instance.check_group()
    topics = {chunk.partition.topic for chunk in chunks}
    if instance.pattern is None:  # else topics that it may not read leave it
        topics.update(member.topics)
    for topic in topics:
        if not grant.subscribe.whole_topic(topic):
            raise forbidden(f"subscribe to {grant.names.own(topic)}")
