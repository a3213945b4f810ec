"""The order of presence records: the log ends with the true states, for any writes and delays of the gateways."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
from hypothesis import settings, stateful
from hypothesis import strategies as st

from gateway.presence import ledger
from gateway.presence.ledger import TOMBSTONE, PresenceLedger
from gateway.presence.records import decode
from gateway.views.presence import MQTT, Ended, Present, SessionKept

KEY = "mqtt/c"
NAMES = ("a", "b", "c")


class Gateway:
    """One process: its ledger, its writes in flight, and its position in the log."""

    def __init__(self, world: World, name: str, life: int) -> None:
        self.owner = f"{name}/{life}"
        self.name = name
        self.world = world
        self.sent: deque[bytes] = deque()
        self.read = 0
        self.is_alive = True
        self.ledger = PresenceLedger(
            self.owner,
            is_alive=world.is_alive,
            is_dead=lambda owner: not world.is_alive(owner),
            takes_over=self.takes_over,
        )

    def takes_over(self, owner: str) -> bool:
        alive = [one.owner for one in self.world.gateways.values() if one.is_alive]
        return owner not in alive and bool(alive) and self.owner == min(alive)

    def write(self) -> None:
        for key in list(self.ledger.due):
            value = self.ledger.take(key, self.world.now)
            if value is not None:
                self.sent.append(value)

    def arrive(self) -> None:
        """Kafka stores the next record of this gateway."""
        self.world.log.append((self.owner, self.sent.popleft()))

    def follow(self) -> None:
        owner, value = self.world.log[self.read]
        self.read += 1
        self.ledger.apply(KEY, None if value == TOMBSTONE else value, own=owner == self.owner)


class World(stateful.RuleBasedStateMachine):
    """Gateways that write and read the log with delay, and are killed."""

    unique = True

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, bytes]] = []
        self.now = 0
        self.lives = 0
        self.connections = 0
        self.open: dict[int, Gateway] = {}  # who is connected where, by the clients' own view
        self.yielded: list[int] = []  # connections that were closed for another
        self.is_calm = True  # Kafka has taken every record, and nobody was frozen
        self.gateways = {name: Gateway(self, name, 0) for name in NAMES}

    def is_alive(self, owner: str) -> bool:
        return any(one.owner == owner and one.is_alive for one in self.gateways.values())

    @stateful.rule(name=st.sampled_from(NAMES))
    def connect(self, name: str) -> None:
        gateway = self.gateways[name]
        if not gateway.is_alive:
            return
        self.now += 1
        for number, where in list(self.open.items()):
            if self.unique and where is gateway:  # within a gateway the former one is closed first
                gateway.ledger.leave(KEY, number, Ended("takeover"), self.now)
                del self.open[number]
        self.connections += 1
        number = self.connections

        def on_takeover() -> None:
            del self.open[number]
            self.yielded.append(number)

        present = Present("c", "p", MQTT, f"h:{number}", self.now, SessionKept(), on_takeover if self.unique else None)
        self.open[number] = gateway
        gateway.ledger.enter(KEY, number, present)

    @stateful.precondition(lambda self: self.open)
    @stateful.rule(data=st.data())
    def disconnect(self, data: Any) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        gateway = self.open.pop(number)
        self.now += 1
        gateway.ledger.leave(KEY, number, Ended("client"), self.now)

    @stateful.rule(name=st.sampled_from(NAMES))
    def write(self, name: str) -> None:
        self.gateways[name].write()

    @stateful.rule(name=st.sampled_from(NAMES))
    def arrive(self, name: str) -> None:
        if self.gateways[name].sent:
            self.gateways[name].arrive()

    @stateful.rule(name=st.sampled_from(NAMES), stored=st.booleans())
    def refuse(self, name: str, stored: bool) -> None:
        """Have a write time out; Kafka may have stored the record nevertheless."""
        gateway = self.gateways[name]
        if gateway.is_alive and gateway.sent:
            self.is_calm = False
            if stored:
                gateway.sent.append(gateway.sent[0])  # it comes later
            gateway.sent.popleft()
            gateway.ledger.failed(KEY)

    @stateful.rule(name=st.sampled_from(NAMES))
    def follow(self, name: str) -> None:
        gateway = self.gateways[name]
        if gateway.is_alive and gateway.read < len(self.log):
            gateway.follow()

    @stateful.rule(name=st.sampled_from(NAMES), back=st.booleans())
    def kill(self, name: str, back: bool) -> None:
        """Kill a gateway; its writes in flight may still be stored, if the test lets them arrive."""
        gateway = self.gateways[name]
        gateway.is_alive = False
        for number, where in list(self.open.items()):
            if where is gateway:
                del self.open[number]
        if back or not any(one.is_alive for one in self.gateways.values()):
            self.lives += 1
            late = gateway.sent
            self.gateways[name] = Gateway(self, name, self.lives)
            for value in late:  # in the kernel's buffers
                self.log.append((gateway.owner, value))

    @stateful.rule(name=st.sampled_from(NAMES))
    def thaw(self, name: str) -> None:
        """Continue a frozen gateway: unsent writes are withdrawn, then it reads the log to its end."""
        gateway = self.gateways[name]
        if not gateway.is_alive:
            return
        self.is_calm = False
        withdrawn = bool(gateway.sent)
        gateway.sent.clear()
        while gateway.read < len(self.log):
            gateway.follow()
        gateway.ledger.reconcile_due()
        if withdrawn:
            gateway.ledger.failed(KEY)

    @stateful.rule(name=st.sampled_from(NAMES))
    def tidy(self, name: str) -> None:
        gateway = self.gateways[name]
        if gateway.is_alive:
            for _ in gateway.ledger.sweep(self.now - 3):
                pass

    def settle(self) -> None:
        """Let all writes arrive and be read, until no gateway has anything to write."""
        for _ in range(60):
            for gateway in self.gateways.values():
                while gateway.sent:
                    gateway.arrive()
            for gateway in self.gateways.values():
                if gateway.is_alive:
                    while gateway.read < len(self.log):
                        gateway.follow()
                    for steps in (gateway.ledger.report_dead(), gateway.ledger.sweep(-1)):
                        for _ in steps:
                            pass
                    gateway.write()
            if not any(gateway.sent for gateway in self.gateways.values()):
                return
        raise AssertionError("the gateways do not come to an end")

    def teardown(self) -> None:
        self.settle()
        last = decode(self.log[-1][1]) if self.log and self.log[-1][1] != TOMBSTONE else None
        if self.unique:
            assert len(self.open) <= 1, "a client id has two connections"
        if not self.open:
            assert last is None or last.state == "offline"
        else:
            assert last is not None
            assert last.state == "online"
            number = int(last.address.partition(":")[2])
            assert number in self.open
            assert last.gateway == self.open[number].owner
            order = self.told_online()
            if self.is_calm and len(order) == len(set(order)):  # else one had to be told once more, in between
                assert all(order.index(other) < order.index(number) for other in self.yielded)
        epochs = [record.epoch for record in self.right()]
        assert epochs == sorted(epochs)
        if last is not None:
            assert last.epoch == max(epochs)
        for gateway in self.gateways.values():
            if gateway.is_alive:
                assert gateway.ledger.is_idle
                assert not gateway.ledger._local or self.open  # nothing is remembered of who is gone

    def told_online(self) -> list[int]:
        """The connections in the order of the log."""
        records = [decode(value) for _, value in self.log if value != TOMBSTONE]
        return [int(one.address.partition(":")[2]) for one in records if one is not None and one.state == "online"]

    def right(self) -> list[Any]:
        """The records that a reader keeps that compares only epochs."""
        kept: list[Any] = []
        for _, value in self.log:
            record = decode(value) if value != TOMBSTONE else None
            if value == TOMBSTONE:
                kept.clear()
            elif record is not None and (not kept or record.epoch >= kept[-1].epoch):
                kept.append(record)
        return kept


class Several(World):
    """The same for keys with several connections: a key is online while one of them is open."""

    unique = False


TestOneConnection = World.TestCase
TestOneConnection.settings = settings(max_examples=150, stateful_step_count=40)
TestSeveralConnections = Several.TestCase
TestSeveralConnections.settings = settings(max_examples=80, stateful_step_count=40)


def present(principal: str, closed: list[str]) -> Present:
    return Present("c", principal, MQTT, "h:1", 0, on_takeover=lambda: closed.append(principal))


def test_a_client_id_is_not_taken_from_another_principal() -> None:
    """Two principals connect with one client id at the same moment: the first in the log keeps it."""
    closed: list[str] = []
    log: list[tuple[str, bytes]] = []
    both = {
        name: PresenceLedger(name, is_alive=lambda _: True, is_dead=lambda _: False, takes_over=lambda _: False)
        for name in ("a/1", "b/1")
    }
    for owner, principal in (("a/1", "ann"), ("b/1", "bob")):
        both[owner].enter(KEY, object(), present(principal, closed))
        value = both[owner].take(KEY, 0)
        assert value is not None
        log.append((owner, value))
    position = 0
    while position < len(log):
        owner, value = log[position]
        position += 1
        for name, one in both.items():
            one.apply(KEY, value, own=owner == name)
            taken = one.take(KEY, 0) if one.due else None
            if taken is not None:
                log.append((name, taken))
    assert closed == ["bob"]
    last = decode(log[-1][1])
    assert last is not None
    assert (last.state, last.principal, both["b/1"].principal_elsewhere(KEY)) == ("online", "ann", "ann")


def test_while_kafka_takes_nothing_who_comes_and_goes_is_forgotten(monkeypatch: Any) -> None:
    """The number of waiting states is bounded; a client that was reported online is still reported offline."""
    monkeypatch.setattr(ledger, "MAX_DUE", 10)
    one = PresenceLedger("a/1", is_alive=lambda _: True, is_dead=lambda _: False, takes_over=lambda _: False)
    one.enter("mqtt/told", 0, present("p", []))
    value = one.take("mqtt/told", 0)
    one.apply("mqtt/told", value, own=True)
    for number in range(100):
        one.enter(f"mqtt/{number}", number, present("p", []))
        one.leave(f"mqtt/{number}", number, Ended("client"), 1)
    one.leave("mqtt/told", 0, Ended("client"), 2)
    assert len(one.due) <= 12
    assert one.counts.forgotten_total >= 89
    told = decode(one.take("mqtt/told", 2) or b"")
    assert told is not None
    assert (told.state, told.since, told.reason) == ("offline", 2, Ended("client"))


def test_records_that_are_no_gateways_are_ignored() -> None:
    one = PresenceLedger("a/1", is_alive=lambda _: True, is_dead=lambda _: False, takes_over=lambda _: False)
    closed: list[str] = []
    one.enter(KEY, 0, present("p", closed))
    one.apply(KEY, one.take(KEY, 0), own=True)
    good = msgspec.json.decode(one.known[KEY].value)
    wrong = ({"epoch": -1}, {"epoch": 1 << 60}, {"state": "here"}, {"since": "now"})
    deep = b'{"x":' * 10_000
    for bad in (
        b"{",
        b"[]",
        b"\xff",
        deep,
        b'{"state":"online"}',
        *(msgspec.json.encode({**good, **field}) for field in wrong),
    ):
        assert not one.apply(KEY, bad, own=False)
    assert one.counts.invalid_total == 9
    assert not closed
    assert one.is_idle
