"""A subscription of a live WebSocket: a topic from any position, or a share of a consumer group's records."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final, Protocol

from gateway.rest.consume.start_positions import find_span
from gateway.rest.server.request_login import forbidden
from gateway.rest.services import RestServices
from gateway.rest.streams.feeds import Feeds, FeedSubscriber, Form
from gateway.rest.streams.group_subscriber import GroupSubscriber, is_refused
from gateway.security.rights.authorization import Grant
from gateway.views.flow import FlowWindow, shown
from gateway.views.pauses import NO_CREDIT, Pause
from gateway.views.pauses import UNSETTLED as TOO_MUCH
from mapping.record import Received
from mapping.rest.outgoing import RecordFilter, view_line
from mapping.tenants import Names
from protocols.rest.errors import RestError, unprocessable
from protocols.rest.media import Format
from protocols.rest.positions import BEGINNING, END, format_position
from protocols.rest.streams.live_connection import text_frame
from protocols.rest.streams.live_messages import (
    LARGEST_CREDIT,
    LiveSubscribe,
    delivery_message,
    gap_message,
    record_message,
    subscribed,
)

UNSETTLED: Final = 10_000  # records of one subscription that its client has neither acknowledged nor released


@functools.lru_cache(maxsize=1024)
def live_form(embedded: Format, name: str, names: Names) -> Form:
    """Return what encodes records as frames, shared by a tenant's connections with this name for a subscription."""

    def frame(record: Received, position: str) -> bytes:
        return text_frame(record_message(name, view_line(names.shown(record), embedded), position))

    return frame


class MessageStream(Protocol):
    """The connection of a subscription. It is a Protocol because a `LiveSession` makes its subscriptions itself."""

    @property
    def share(self) -> str:
        """What the client is counted by in limits that clients share."""

    @property
    def has_capacity(self) -> bool:
        """Whether one more record can be sent."""

    def send(self, payload: bytes) -> None:
        """Send a message soon."""

    def send_frame(self, frame: bytes) -> None:
        """Send a record's frame soon."""

    @property
    def subject(self) -> str:
        """The subject under which pauses are reported."""


class LiveSubscription:
    """A topic's records for one live WebSocket; a `feeds.Sink` and a `group_subscriber.Receiver`."""

    def __init__(
        self, stream: MessageStream, grant: Grant, services: RestServices, feeds: Feeds, message: LiveSubscribe
    ) -> None:
        """Check the Subscribe message; `join` starts to read.

        Raises:
            RestError: 403 if it is not allowed, 422 if it is not valid.
        """
        self.name = message.id
        self._stream = stream
        self._grant = grant
        self._services = services
        self._feeds = feeds
        self._message = message
        self._credit = message.credit
        if self._credit is not None and not 0 <= self._credit <= LARGEST_CREDIT:
            raise unprocessable(f"The credit {self._credit} is out of range")
        self._chosen = RecordFilter(message.key, message.header)
        self._source: FeedSubscriber | GroupSubscriber | None = None
        self._unsettled: dict[int, tuple[GroupSubscriber, Received, int]] = {}  # by delivery, with the frame's size
        self._held = 0  # bytes of these frames
        self._delivery = 0
        self._left = False
        self._topic = topic = grant.names.topic(message.topic)
        subscribe = grant.subscribe
        if message.group is None:
            if not subscribe.some(topic):
                raise forbidden(f"read {message.topic}")
            self._wanted = message.wanted()
        else:
            if not subscribe.whole_topic(topic):
                raise forbidden(f"read {message.topic} in a group: that needs the whole topic")
            if message.partition is not None or message.offset is not None or message.timestamp is not None:
                raise unprocessable("A group starts at its committed offsets")
            if message.start not in (None, BEGINNING, END):
                raise unprocessable("A group can only start at the beginning or the end")

    @property
    def is_refused(self) -> bool:
        """Whether the client's current rights do not allow this subscription."""
        return is_refused(self._grant, self._topic, self._message.group)

    async def join(self) -> None:
        """Start to read.

        Raises:
            Refused: As `find_span`, `FeedSubscriber.join` and `GroupSubscriber.join`.
            RestError: As `find_span`.
        """
        message, services, grant = self._message, self._services, self._grant
        source: FeedSubscriber | GroupSubscriber
        if message.group is not None:
            source = GroupSubscriber(self, self._chosen, services)
            await source.join(grant, message.group, self._topic, message.start, self._stream.share)
            position = None
        else:
            span = await find_span(services.lookup, self._topic, self._wanted, END)
            source = FeedSubscriber(
                self._feeds,
                self._topic,
                live_form(message.format, self.name, grant.names),
                self,
                chosen=self._chosen,
                subscribe=grant.subscribe,
                partition=self._wanted.partition,
            )
            await source.join(span.start)
            position = format_position(span.start)
        if self._left:
            source.leave()
            return
        self._source = source
        self._stream.send(subscribed(self.name, position))
        source.wake()

    def leave(self) -> None:
        """Stop reading; unsettled records return to the group."""
        self._left = True
        self._unsettled.clear()
        self._held = 0
        source, self._source = self._source, None
        if source is not None:
            source.leave()

    @property
    def unsettled(self) -> int:
        """The number of a group's records that the client has neither acknowledged nor released."""
        return len(self._unsettled)

    def flow(self) -> FlowWindow:
        """Return its credit and unsettled records, for /flow."""
        unsettled = self.unsettled
        credit = UNSETTLED - unsettled if self._credit is None else self._credit
        paused = None if credit else Pause(TOO_MUCH if self._credit is None else NO_CREDIT)
        return FlowWindow(shown(self.name), False, self._message.topic, credit + unsettled, credit, unsettled, paused)

    # messages of the client

    def grant(self, credit: int) -> None:
        """Allow `credit` more records. Raises RestError 422."""
        if self._credit is None:
            raise unprocessable("This subscription does not use credit")
        if not 0 < credit <= LARGEST_CREDIT - self._credit:
            raise unprocessable(f"The credit {credit} is out of range")
        self._credit += credit
        self.wake()

    def settle(self, deliveries: Sequence[int], failed: bool | None) -> None:
        """Settle deliveries if `failed` is None, else return them to the group.

        Raises:
            RestError: 404 for deliveries that are not open; the others are settled.
        """
        unknown: list[int] = []
        for number in deliveries:
            delivery = self._unsettled.pop(number, None)
            if delivery is None:
                unknown.append(number)
                continue
            source, record, size = delivery
            self._held -= size
            if failed is None:
                source.membership.done(record)
            else:
                source.membership.requeue(record, failed=failed, at_once=not failed)
        if isinstance(self._source, GroupSubscriber):
            self._source.hold(self._held, len(self._unsettled))
        self.wake()
        if unknown:
            shown = ", ".join(map(str, unknown[:8]))
            raise RestError(404, f"{len(unknown)} of these deliveries are not open, such as {shown}")

    def wake(self) -> None:
        """Request records again."""
        if self._source is not None:
            self._source.wake()

    # feeds.Sink

    @property
    def has_capacity(self) -> bool:
        """Whether one more record can be sent; False before the Subscribe message is answered."""
        return self._source is not None and self._credit != 0 and self._stream.has_capacity

    def send(self, data: bytes) -> None:
        """Send the frame of a record."""
        self._spend()
        self._stream.send_frame(data)

    def gap(self, partition: int, lost: int) -> None:
        """Send `gap`: retention has deleted records that the client requested."""
        self._stream.send(gap_message(self.name, partition, lost))

    # group_subscriber.Receiver

    @property
    def ready(self) -> bool:
        """Whether one more record of the group can be sent."""
        return self.has_capacity and len(self._unsettled) < UNSETTLED

    def deliver(self, record: Received) -> None:
        """Send a record of the group under a number that the client uses to settle it."""
        source = self._source
        assert isinstance(source, GroupSubscriber)
        self._spend()
        self._delivery += 1
        line = view_line(self._grant.names.shown(record), self._message.format)
        frame = text_frame(delivery_message(self.name, line, self._delivery, source.membership.attempts(record)))
        self._unsettled[self._delivery] = (source, record, len(frame))
        self._held += len(frame)
        source.hold(self._held, len(self._unsettled))
        self._stream.send_frame(frame)

    @property
    def subject(self) -> str:
        """The subject under which pauses of its connection are reported."""
        return self._stream.subject

    def _spend(self) -> None:
        if self._credit is not None:
            assert self._credit > 0
            self._credit -= 1
