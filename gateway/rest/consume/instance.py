"""One consumer instance of an HTTP client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from string import printable
from typing import Final
from urllib.parse import quote

from gateway.kafka.groups.polled_member import PolledMember
from gateway.rest.server.request_login import forbidden
from gateway.security.rights.authorization import Grant
from gateway.views.clients import SUBSCRIPTIONS, ClientView, SubscriptionView
from protocols.rest.consuming import TopicPattern
from protocols.rest.media import Format

_PLAIN: Final = printable.replace("/", "").replace("%", "")  # letters of a group's name that an id need not escape


class Instance:
    """One consumer that a client created."""

    socket = None  # its requests may come through any connection
    subject = ""  # it is never paused

    def __init__(
        self,
        group: str,
        name: str,
        embedded: Format,
        *,
        grant: Grant,
        member: PolledMember,
        client: str,
        now: float,
        close: Callable[[Instance], None],
    ) -> None:
        """`client` is what it is counted for, `now` monotonic seconds, `close` closes it on behalf of an operator."""
        self.group = group
        self.name = name
        self.embedded = embedded
        self.owner = grant.identity
        self.grant = grant  # of the client's latest request
        self.member = member
        self.pattern: TopicPattern | None = None  # that selects its topics
        self.polls = asyncio.Lock()  # one poll at a time; nothing else waits for it
        self.used = now
        self.users = 0  # requests in progress; it is not idle while there are any
        self.unread: asyncio.Transport | None = None  # of a poll whose answer is being written
        self.answered = now  # when the writing of that answer started
        self.last_commit = now
        self.wait_ms = 0  # default timeout of a poll, in the dialect that sets it with the consumer
        self.closed = False
        self.client = client
        self._created_s = time.time()
        self._close = close

    # clients.Connected

    @property
    def identifier(self) -> str:
        """Its id for operators, unique for each group and name."""
        return f"http/consumer/{quote(self.group, safe=_PLAIN)}/{self.name}"

    @property
    def principal(self) -> str:
        """The name of the client that created it."""
        return self.owner.name

    def view(self, *, whole: bool) -> ClientView:
        """Return its entry in the list of clients; `whole` adds its topics."""
        view = ClientView(
            id=self.identifier,
            protocol="http",
            kind="consumer",
            principal=self.owner.name,
            since=self._created_s,
        )
        if whole:
            topics = sorted({*self.member.topics, *(place.topic for place in self.member.assignment())})
            view.subscriptions = [SubscriptionView(topic) for topic in topics[:SUBSCRIPTIONS]]
            view.subscriptions_total = len(topics)
        return view

    def kick(self) -> None:
        """Delete it: commit the confirmed positions; later requests for it get 404."""
        self._close(self)

    @property
    def is_refused(self) -> bool:
        """Whether the client may no longer use the group."""
        return self.grant.group("read", self.group) is False

    def check_group(self) -> None:
        """Raise RestError 403 if the client may no longer use the group."""
        if self.is_refused:
            raise forbidden(f"read in the group {self.grant.names.own(self.group)}")
