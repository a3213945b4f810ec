"""Reports online and offline clients in the presence topic, and follows other gateways' reports; docs/adr/0083.

There is at most one instance per process. The `PresenceLedger` decides what to write; it is written in batches at the
end of an event loop iteration, and no client waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from typing import Final

import msgspec
import structlog

from gateway.kafka.contracts import Owner, Result
from gateway.kafka.publish.publisher import Publisher
from gateway.kafka.state import StateTopics
from gateway.presence.ledger import TOMBSTONE, PresenceLedger, PresenceStatistics
from gateway.presence.records import DESCRIPTION
from gateway.runtime.fence import Fence
from gateway.runtime.turns import in_turns
from gateway.views.presence import Ended, Present
from mapping.outcomes import Outcome
from mapping.record import GW_OWNER, Received, text_of

log = structlog.get_logger(__name__)

IN_FLIGHT: Final = 5000  # maximum number of unanswered records; beyond it only each client's latest state waits
AGAIN_S: Final = 1.0  # delay before a refused write is repeated
SWEEP_S: Final = 60.0
CLOSING_S: Final = 3.0


class Presence(Owner):
    """Writes and reads the presence topic for one process."""

    def __init__(
        self,
        topic: str,
        owner: str,  # name of this process
        publisher: Publisher,
        state: StateTopics,
        *,
        on_valid: Callable[[Received], None],  # gets each key's valid records
        keep_offline_s: int,
        wall_clock: Callable[[], int],  # epoch milliseconds
        is_alive: Callable[[str], bool],  # this and the next two: see `PresenceLedger`
        is_dead: Callable[[str], bool],
        takes_over: Callable[[str], bool],
    ) -> None:
        """Open the topic in `state`, which is not started yet; writes wait until it is loaded."""
        self.topic = topic
        self.ledger = PresenceLedger(owner, is_alive=is_alive, is_dead=is_dead, takes_over=takes_over)
        self._headers = ((GW_OWNER, owner.encode()), *DESCRIPTION)
        self._fence: Fence = publisher.fence
        self._withdraw = publisher.withdraw
        self._fence.listen(self._frozen)
        self._keep_ms = keep_offline_s * 1000
        self._wall_clock = wall_clock
        self._on_valid = on_valid
        self._state = state
        self._table = state.open(topic, self._apply, self._restarted, readable=True)
        self._in_flight = 0
        self._written = 0
        self._scheduled = False
        self._warned = False

    # for the protocols

    def online(self, key: str, connection: Hashable, present: Present) -> None:
        """Report a client as connected; `key` is `PROTOCOL/NAME`."""
        self.ledger.enter(key, connection, present)
        self._schedule()

    def offline(self, key: str, connection: Hashable, ended: Ended) -> None:
        """Report the end of a connection; does nothing if another gateway's record has caused it."""
        self.ledger.leave(key, connection, ended, self._wall_clock())
        self._schedule()

    # writing

    def _schedule(self) -> None:
        if self.ledger.due and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        self._scheduled = False
        if not self._state.loaded.is_set() or not self._fence.is_open:
            return
        now = self._wall_clock()
        for key in list(islice(self.ledger.due, IN_FLIGHT - self._in_flight)):
            value = self.ledger.take(key, now)
            if value is None:
                continue
            self._in_flight += 1
            self._written += 1
            self._table.write(key.encode(), value or None, self._headers, owner=self, token=key)

    def settle(self, tokens: Sequence[str], offsets: Sequence[int], result: Result) -> None:
        """Take Kafka's result (contract: `gateway.kafka.contracts.Owner`); a stored write is done once read back."""
        self._in_flight -= len(tokens)
        if result.outcome is Outcome.STORED:
            self._warned = False
        else:
            if not self._warned:
                self._warned = True
                log.warning("presence records were not stored, trying again", clients=len(tokens), reason=result.reason)
            asyncio.get_running_loop().call_later(AGAIN_S, self._again, tokens)
        self._schedule()

    def _again(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.ledger.failed(key)
        self._schedule()

    def _frozen(self) -> None:
        """Stop writing after a long freeze, until the records of other gateways are read."""
        self._withdraw(self)
        self._fence.call_when_open(self._thawed)

    def _thawed(self) -> None:
        self.ledger.reconcile_due()
        self._schedule()

    # reading

    def _apply(self, record: Received) -> None:
        """Process a record of the topic (contract: `gateway.kafka.state.Apply`)."""
        key = text_of(record.key)
        if not key or record.value == TOMBSTONE:
            self.ledger.counts.invalid_total += 1
            return
        own = bool(record.headers) and record.headers[0] == self._headers[0]
        if self.ledger.apply(key, record.value, own=own):
            self._on_valid(record)
        self._schedule()

    def _restarted(self, partition: int) -> None:
        """Write the known states to the recreated topic (contract: `gateway.kafka.state.Restarted`)."""
        log.warning("the presence topic was recreated", topic=self.topic, partition=partition)
        self.ledger.restarted(lambda key: self._table.partition_of(key.encode()) == partition)
        self._schedule()

    # other gateways, and periodic work

    def principal_elsewhere(self, key: str) -> str | None:
        """Return the principal connected under a key at another live gateway, or None."""
        return self.ledger.principal_elsewhere(key)

    def report_dead(self) -> None:
        """Report the clients of gateways that have died as offline."""
        in_turns(self._then_write(self.ledger.report_dead()))

    def _then_write(self, steps: Iterator[None]) -> Iterator[None]:
        yield from steps
        self._schedule()

    async def run(self) -> None:
        """Write the states that waited for the topic to be loaded, and delete old ones periodically."""
        await self._state.loaded.wait()
        while True:
            in_turns(self._then_write(self.ledger.sweep(self._wall_clock() - self._keep_ms)))
            await asyncio.sleep(SWEEP_S)

    async def stop(self) -> None:
        """Write the remaining states; connections were closed before."""
        try:
            async with asyncio.timeout(CLOSING_S):
                while self._state.loaded.is_set() and not self.ledger.is_idle:
                    self._schedule()
                    await asyncio.sleep(0.01)
        except TimeoutError:
            log.warning("not all clients' presence was written", clients=len(self.ledger.due))

    def statistics(self) -> PresenceStatistics:
        """Return a snapshot for the metrics."""
        ledger = self.ledger
        return msgspec.structs.replace(
            ledger.counts,
            online=ledger.online,
            known=len(ledger.known),
            waiting=len(ledger.due),
            written_total=self._written,
        )
