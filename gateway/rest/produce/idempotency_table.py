"""The results of requests with an `Idempotency-Key`: a table in Kafka that every gateway has in memory.

ADR 0026 says how it is used. The order of a key's records in the log decides, so all gateways decide the same: the
first attempt counts, and a later one only if it names the attempt that it takes over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from flowcontrol.admission import client_share
from gateway.kafka.contracts import Owner
from gateway.kafka.state import StateTopic, StateTopics
from mapping.record import Received

REQUESTS: Final = "__trivium_requests"
OVERHEAD: Final = 1024
"""Memory that a request counts for in addition to its answer and offsets."""
OFFSET: Final = 100
"""Memory of one partition's offset in `KeptRequest.scan`."""
LIMIT_BYTES: Final = 64 * 1024 * 1024
"""Memory of all kept requests; over it, new keys are refused until old ones expire."""
RETENTION_MARGIN_MS: Final = 3_600_000


class KeptRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The latest state of a key."""

    digest: str  # of the request's content type and body
    attempt: str  # the random id of the attempt
    gateway: str  # the gateway that makes the attempt, by the name in its data directory; "" for one without
    until_ms: int  # the end of the window, when the key expires; epoch milliseconds
    lease_ms: int  # until then the attempt may still store records; epoch milliseconds
    scan: dict[int, int]  # by partition the offset from which to search for records of attempts
    after: str = ""  # the id of the attempt that this one takes over
    status: int = 0  # of the answer; 0 while there is none
    body: str = ""  # of the answer
    client: str = ""  # who is counted for the key, as a hash


class RequestTable:
    """The table. Bind it to the process's state topics before they are started."""

    def __init__(
        self,
        *,
        gateway: str,
        window_s: float,
        max_keys: int,
        max_keys_per_client: int | None = None,
        wall_clock: Callable[[], int],
    ) -> None:
        """Start empty; `apply` fills it. Answers are kept for `window_s`; `wall_clock` returns epoch milliseconds.

        `max_keys_per_client` is as in `client_share`.
        """
        self.gateway = gateway
        self.window_ms = int(window_s * 1000)
        self.bytes = 0
        self.undecodable = 0
        self._max_keys = max_keys
        self.most_of_client = client_share(max_keys, max_keys_per_client)
        self._clients: Counter[str] = Counter()  # keys by client
        self._wall_clock = wall_clock
        self._kept: dict[str, tuple[KeptRequest, int]] = {}  # with the partition, in order of expiry
        self._topic: StateTopic | None = None
        self._decoder = msgspec.json.Decoder(KeptRequest)

    def bind(self, state: StateTopics) -> None:
        """Open the table's topic."""
        retention_ms = self.window_ms + RETENTION_MARGIN_MS
        self._topic = state.open(REQUESTS, self.apply, self.restarted, retention_ms=retention_ms)

    def find(self, name: str) -> KeptRequest | None:
        """Return the state of a key that has not expired, else None."""
        self._forget_old()
        known = self._kept.get(name)
        return None if known is None or known[0].until_ms <= self._wall_clock() else known[0]

    @property
    def full(self) -> bool:
        """Whether no more keys can be kept now."""
        self._forget_old()
        return len(self._kept) >= self._max_keys or self.bytes >= LIMIT_BYTES

    def is_greedy(self, client: str) -> bool:
        """Whether a client has used up its share of the keys."""
        self._forget_old()
        return self._clients[client] >= self.most_of_client

    @property
    def count(self) -> int:
        """The number of keys."""
        return len(self._kept)

    def write(self, name: str, kept: KeptRequest, owner: Owner | None) -> None:
        """Write a key's state to the topic and settle `owner`. It takes effect when `apply` reads it."""
        assert self._topic is not None, "not bound to the state topics"
        self._topic.write(name.encode(), msgspec.json.encode(kept), owner=owner)

    def apply(self, record: Received) -> None:
        """Apply a record of the topic, unless an earlier attempt counts (`StateTopics.open`)."""
        if record.key is None or record.value is None:
            return
        name = record.key.decode(errors="replace")
        try:
            new = self._decoder.decode(record.value)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.undecodable += 1  # not ours
            return
        known = self._kept.get(name)
        if known is not None and known[0].until_ms > record.timestamp and not _follows(new, known[0]):
            return
        self._drop(name)
        if new.until_ms > self._wall_clock():
            self._kept[name] = (new, record.partition)
            self.bytes += _size(new)
            self._clients[new.client] += 1

    def restarted(self, partition: int) -> None:
        """Drop the keys of a partition, which is read again from its beginning (`StateTopics.open`)."""
        for name in [name for name, (_, held) in self._kept.items() if held == partition]:
            self._drop(name)

    def _forget_old(self) -> None:
        now = self._wall_clock()
        while self._kept:
            name = next(iter(self._kept))
            if self._kept[name][0].until_ms > now:
                return
            self._drop(name)

    def _drop(self, name: str) -> None:
        known = self._kept.pop(name, None)
        if known is not None:
            self.bytes -= _size(known[0])
            client = known[0].client
            self._clients[client] -= 1
            if not self._clients[client]:
                del self._clients[client]


def _follows(new: KeptRequest, known: KeptRequest) -> bool:
    """Whether a new state may replace the known one."""
    if known.status:
        return False
    return known.attempt in {new.attempt, new.after}


def _size(kept: KeptRequest) -> int:
    return OVERHEAD + len(kept.body) + OFFSET * len(kept.scan)
