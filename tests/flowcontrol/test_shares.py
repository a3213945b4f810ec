"""No sender may have more in flight than is free: the resulting shares of greedy and modest senders."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flowcontrol.budget import RESERVE, Budget, BudgetError, ConnectionBudget
from flowcontrol.window import LinkShare, Window

LIMIT = 80_000
MOST = LIMIT - LIMIT // RESERVE
RECORDS = 1000


class Senders(RuleBasedStateMachine):
    """Connections that send to two topics of one process while their gates are open, and answers in any order."""

    def __init__(self):
        super().__init__()
        self.process = Budget(LIMIT, RECORDS)
        self.topics = [Budget(LIMIT // 2, RECORDS, self.process) for _ in range(2)]
        self.connections = [ConnectionBudget(LIMIT // 4, RECORDS) for _ in range(5)]
        self.told = [[] for _ in self.connections]
        for connection, told in zip(self.connections, self.told, strict=True):
            connection.gate.subscribe(told.append)
        self.flying = []

    @rule(number=st.integers(0, 4), topic=st.integers(0, 1), size=st.integers(0, 6000), records=st.integers(1, 300))
    def send(self, number, topic, size, records):
        connection, source = self.connections[number], self.topics[topic]
        if connection.gate.is_open:
            source.take(size, records)
            connection.take(size, records, source)
            self.flying.append((connection, source, size, records))
            over = not source.allows(connection.bytes, connection.records)
            if over:
                assert not connection.gate.is_open

    @rule(data=st.data())
    @precondition(lambda self: self.flying)
    def answer(self, data):
        connection, source, size, records = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        source.give(size, records)
        connection.give(size, records)

    @rule(topic=st.integers(0, 1), size=st.integers(0, 20_000))
    def promise_and_take_back(self, topic, size):
        self.topics[topic].promise(size)
        self.topics[topic].promise(-size)

    @invariant()
    def counts_are_exact(self):
        for budget in (*self.topics, *self.connections):
            mine = [one for one in self.flying if budget in one[:2]]
            assert budget.bytes == sum(size for _, _, size, _ in mine)
            assert budget.records == sum(records for _, _, _, records in mine)
        assert self.process.bytes == sum(topic.bytes for topic in self.topics)
        assert self.process.promised == sum(topic.promised for topic in self.topics) == 0

    @invariant()
    def who_has_nothing_on_the_way_is_open(self):
        for connection in self.connections:
            assert connection.records or connection.gate.is_open
            assert connection.gate.is_open or connection.bytes or connection.records

    @invariant()
    def who_waits_is_known_where_it_waits(self):
        waiting = [connection for connection in self.connections if connection.waits_for is not None]
        assert all(not connection.gate.is_open for connection in waiting)
        assert sum(budget.waiting for budget in (self.process, *self.topics)) == len(waiting)

    @invariant()
    def each_change_is_told_once(self):
        for told in self.told:
            assert told == [bool(number % 2) for number in range(len(told))]

    def teardown(self):
        for connection, source, size, records in self.flying:
            source.give(size, records)
            connection.give(size, records)
        assert all(connection.gate.is_open for connection in self.connections)
        assert not any(budget.waiting for budget in (self.process, *self.topics))


TestSenders = Senders.TestCase
TestSenders.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def fill(connections, source, size):
    """Each takes in turn until all are shut."""
    while any(connection.gate.is_open for connection in connections):
        for connection in connections:
            if connection.gate.is_open:
                source.take(size)
                connection.take(size, 1, source)


@settings(deadline=None)
@given(count=st.integers(1, 20), size=st.integers(100, 500))
def test_the_greedy_have_equal_shares_and_leave_one_for_whoever_comes(count, size):
    topic = Budget(LIMIT, 10**6)
    greedy = [ConnectionBudget(LIMIT, 10**6) for _ in range(count)]
    fill(greedy, topic, size)
    shares = [connection.bytes for connection in greedy]
    assert max(shares) - min(shares) <= size
    assert abs(shares[0] - MOST / (count + 1)) <= 2 * size
    assert topic.free >= MOST / (count + 1) - (count + 1) * size
    modest = ConnectionBudget(LIMIT, 10**6)
    asked = topic.free // 2  # with as much again left free
    topic.take(asked)
    modest.take(asked, 1, topic)
    assert modest.gate.is_open or not asked


@settings(deadline=None, max_examples=20)
@given(first=st.integers(1, 10), later=st.integers(1, 10))
def test_who_came_first_comes_down_to_the_share_of_all(first, later):
    topic = Budget(LIMIT, 10**6)
    early = [ConnectionBudget(LIMIT, 10**6) for _ in range(first)]
    late = [ConnectionBudget(LIMIT, 10**6) for _ in range(later)]
    fill(early, topic, 100)
    for _ in range(2_000):  # records are answered in order, and each connection sends whenever it may
        for connection in (*early, *late):
            if connection.records:
                topic.give(100)
                connection.give(100)
            while connection.gate.is_open:
                topic.take(100)
                connection.take(100, 1, topic)
    shares = [connection.bytes for connection in (*early, *late)]
    assert sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares)) > 0.98, shares


def test_a_topic_that_is_used_up_leaves_those_of_another_alone():
    process = Budget(2 * LIMIT, 10**6)
    slow, quick = (Budget(LIMIT, 10**6, process) for _ in range(2))
    greedy = [ConnectionBudget(LIMIT, 10**6) for _ in range(7)]
    fill(greedy, slow, 100)
    assert all(connection.waits_for is slow for connection in greedy)
    other = ConnectionBudget(LIMIT, 10**6)
    quick.take(MOST // 2)
    other.take(MOST // 2, 1, quick)
    assert other.gate.is_open


def test_who_has_nothing_on_the_way_goes_on_although_all_is_used_up():
    topic = Budget(LIMIT, 10**6)
    topic.take(MOST + 1)
    sensor = ConnectionBudget(LIMIT, 10**6)
    for _ in range(3):
        topic.take(10)
        sensor.take(10, 1, topic)
        assert not sensor.gate.is_open
        topic.give(10)
        sensor.give(10)
        assert sensor.gate.is_open


def test_its_own_limit_stops_a_connection_as_well():
    topic = Budget(LIMIT, 10**6)
    connection = ConnectionBudget(1000, 10)
    topic.take(1000)
    connection.take(1000, 1, topic)
    assert (connection.gate.is_open, connection.waits_for, topic.waiting) == (False, None, 0)
    connection.give(499, 0)
    assert not connection.gate.is_open
    connection.give(1, 0)
    assert connection.gate.is_open


def test_a_promise_counts_like_what_is_on_the_way():
    process = Budget(LIMIT, 10**6)
    topic = Budget(LIMIT, 10**6, process)
    topic.promise(MOST - 100)
    assert (topic.free, process.free) == (100, 100)
    assert topic.allows(100, 1)
    assert not topic.allows(101, 1)
    with pytest.raises(BudgetError):
        topic.promise(-MOST)
    topic.promise(100 - MOST)
    assert (topic.free, process.promised) == (MOST, 0)


class Links(RuleBasedStateMachine):
    """Links of two connections that use their credit whenever they like, and answers in any order."""

    def __init__(self):
        super().__init__()
        self.process = Budget(LIMIT, 10**6)
        self.topics = [Budget(LIMIT, 10**6, self.process) for _ in range(2)]
        self.connections = [ConnectionBudget(LIMIT, 10**6) for _ in range(2)]
        self.links = []
        for number in range(6):
            connection = self.connections[number % 2]
            self.links.append([LinkShare(connection, LIMIT // 2), Window(50), 0, connection])
        for number in range(6):
            self.top_up(number, 0)

    def top_up(self, number, topic):
        share, window, credit, *_ = self.links[number]
        source = self.topics[topic]
        capacity = share.capacity(source, int(window.unsettled * window.mean), links=len(self.links))
        assert 0 <= capacity <= LIMIT // 2
        credit += window.top_up(credit, capacity)
        share.promise(int(credit * window.mean))
        self.links[number][2] = credit

    @rule(number=st.integers(0, 5), topic=st.integers(0, 1), size=st.integers(1, 2000))
    def send(self, number, topic, size):
        _, window, credit, connection, *_ = self.links[number]
        if credit:
            self.links[number][2] -= 1
            window.arrive(size)
            self.topics[topic].take(size)
            connection.take(size, 1, self.topics[topic])
            self.links[number].append((topic, size))
        self.top_up(number, topic)

    @rule(number=st.integers(0, 5))
    def answer(self, number):
        _, window, _, connection, *flying = self.links[number]
        if flying:
            topic, size = flying[0]
            del self.links[number][4]
            window.settle()
            self.topics[topic].give(size)
            connection.give(size)
            self.top_up(number, topic)

    @invariant()
    def promised_is_the_credit_of_active_links(self):
        active = [link for link in self.links if link[0].is_active]
        assert [link for link in self.links if link[1].unsettled] == active
        assert self.process.promised == sum(int(credit * window.mean) for _, window, credit, *_ in active)
        for connection in self.connections:
            assert connection.senders == sum(link[3] is connection for link in active)
        assert self.process.promised == sum(connection.promised for connection in self.connections)

    def teardown(self):
        for link in self.links:
            link[0].end()
        assert self.process.promised == 0
        assert [connection.senders for connection in self.connections] == [0, 0]


TestLinks = Links.TestCase
TestLinks.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_idle_links_take_nothing_from_a_busy_one():
    topic = Budget(LIMIT, 10**6)
    busy = LinkShare(ConnectionBudget(LIMIT, 10**6), LIMIT)
    alone = busy.capacity(topic, 1, links=1)
    for _ in range(500):
        idle = LinkShare(ConnectionBudget(LIMIT, 10**6), LIMIT)
        assert idle.capacity(topic, 0, links=501) == MOST // 502
        idle.promise(MOST // 502)
    assert busy.capacity(topic, 1, links=501) == alone == MOST // 2


def test_links_of_a_connection_share_what_is_its():
    topic = Budget(LIMIT, 10**6)
    connection = ConnectionBudget(LIMIT, 10**6)
    one, other = (LinkShare(connection, LIMIT) for _ in range(2))
    one.capacity(topic, 1, links=2)
    assert other.capacity(topic, 1, links=2) == MOST // 4
    one.promise(MOST // 4)
    assert other.capacity(topic, 1, links=2) == MOST // 4
    one.end()
    assert other.capacity(topic, 1, links=1) == MOST // 2


@pytest.mark.parametrize(
    ("count", "each", "chunk", "least"), [(1, 1, 40, 1), (3, 1, 20, 0.98), (10, 1, 40, 0.98), (10, 3, 30, 0.95)]
)
def test_busy_links_come_to_equal_shares_of_their_connections(count, each, chunk, least):
    """They use all credit immediately, and are answered in the order in which they sent."""
    size = 100
    topic = Budget(LIMIT, 10**6)
    made = []
    for number in range(count):
        connection = ConnectionBudget(LIMIT, 10**6)
        for _ in range(each if number % 2 else 1):
            window = Window(10_000)
            window.mean = size
            made.append((connection, LinkShare(connection, LIMIT), window))
    queue = []

    def go_on(link):
        connection, share, window = link
        while grant := window.top_up(0, share.capacity(topic, window.unsettled * size, links=len(made))):
            share.promise(grant * size)
            for _ in range(grant):
                window.arrive(size)
                topic.take(size)
                connection.take(size, 1, topic)
                queue.append(link)
            share.promise(0)

    for link in made:
        go_on(link)
    answered = dict.fromkeys((connection for connection, *_ in made), 0)
    for turn in range(300):
        done, queue[:] = queue[:chunk], queue[chunk:]
        for connection, _, window in done:
            window.settle()
            topic.give(size)
            connection.give(size)
            answered[connection] += turn >= 50
        for link in dict.fromkeys(done):
            go_on(link)
    shares = list(answered.values())
    assert sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares)) >= least, shares


@pytest.mark.parametrize("limit", [8 << 20, 2 << 20])
def test_sockets_and_links_come_to_equal_shares_of_a_tight_budget(limit):
    """A socket is paused within `piece` of its share: with a whole read of 256 KiB the index was 0.87 at 2 MiB."""
    size, window, answered, piece = 4096, 200, 16, 16 * 1024
    topic = Budget(limit, 10**6)
    sockets = [ConnectionBudget(limit, 10**6) for _ in range(5)]
    links = [ConnectionBudget(limit, 10**6) for _ in range(5)]
    ways = {link: [LinkShare(link, limit), Window(1000, 256), 0] for link in links}  # share, window, credit
    queue = []
    done = dict.fromkeys((*sockets, *links), 0)

    def take(connection, count):
        topic.take(count * size, count)
        connection.take(count * size, count, topic)
        queue.extend([connection] * count)

    def read(socket):
        while socket.gate.is_open and socket.records < window:
            take(socket, min(window - socket.records, piece // size))

    def top_up(link):
        share, found, credit = ways[link]
        found.mean = size
        if topic.gate.is_open:
            capacity = share.capacity(topic, found.unsettled * size, links=len(links))
            credit += found.top_up(credit, capacity)
            share.promise(credit * size)
        ways[link][2] = credit

    def send(link):
        top_up(link)
        count = min(ways[link][2], window - link.records)
        if count > 0:
            ways[link][2] -= count
            ways[link][1].arrive(count * size, count)
            take(link, count)
            top_up(link)

    for turn in range(800):
        for connection in queue[:answered]:
            topic.give(size)
            connection.give(size)
            done[connection] += turn >= 200
            if connection in ways:
                ways[connection][1].settle()
        del queue[:answered]
        for socket, link in zip(sockets, links, strict=True):
            read(socket)
            send(link)
    shares = list(done.values())
    assert sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares)) >= 0.98, shares
