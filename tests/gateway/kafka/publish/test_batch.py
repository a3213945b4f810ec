from aiokafka.record.default_records import DefaultRecordBatch
from hypothesis import given
from hypothesis import strategies as st

from flowcontrol.budget import Budget, ConnectionBudget
from gateway.kafka.contracts import Owner
from gateway.kafka.publish.batch import Batch
from gateway.kafka.publish.batch_format import CODECS


class Person(Owner):
    def __init__(self, budget):
        self.budget = budget


records = st.tuples(
    st.integers(0, 2), st.none() | st.binary(max_size=5), st.none() | st.binary(max_size=20), st.booleans()
)


def append(batch, owner, token, record):
    _, key, value, with_header = record
    size = batch.write(1000 + token, key, value, [("h", b"x"), ("n", None)] if with_header else [])
    if not size:
        return False
    if owner is not batch.owner:
        batch.switch_owner(owner)
    batch.add_token(token)
    batch.count += 1
    batch.bytes += size
    if batch.bytes >= batch.account_at:
        batch.account()
    return True


def content(batch):
    return [
        (record.timestamp, record.key, record.value, list(record.headers))
        for record in DefaultRecordBatch(bytes(batch._build()))
    ]


def told(batches):
    """Return what each owner's `settle` gets when the batches are stored in order, a thousand offsets apart."""
    answers = {}
    for number, batch in enumerate(batches):
        for share in batch.shares.values():
            pairs = zip(share.tokens, share.offsets(1000 * number), strict=True)
            answers.setdefault(id(share.owner), []).extend(pairs)
    return answers


@given(
    st.lists(records, min_size=1, max_size=20), st.sampled_from((1, 40)), st.booleans(), st.sampled_from(list(CODECS))
)
def test_tickets_budgets_and_records_survive_everything(given_records, times, accounts_early, compression):
    given_records = given_records * times  # above 63 records a position takes another byte
    topic = Budget(10**9, 10**9)
    people = [Person(ConnectionBudget(10**9, 10**9)), Person(None), None]
    batch = Batch(65536, topic, CODECS[compression])
    for token, record in enumerate(given_records):
        assert append(batch, people[record[0]], token, record)
        if accounts_early and token % 3 == 0:
            batch.account()
    batch.seal()
    count, size = len(given_records), batch.bytes
    own = [token for token, record in enumerate(given_records) if record[0] == 0]

    def in_balance(*batches):
        assert (topic.bytes, topic.records) == (size, count)
        assert people[0].budget.records == len(own)
        assert sum(part.count for part in batches) == count
        assert sum(part.bytes for part in batches) <= size

    in_balance(batch)
    for owner, pairs in told([batch]).items():
        person = next(person for person in people if id(person) == owner)
        expected = [token for token, record in enumerate(given_records) if people[record[0]] is person]
        assert pairs == [(token, token) for token in expected]  # the token is the position here
    original = content(batch)

    again = batch.rebuild()
    assert content(again) == original
    assert told([again]) == told([batch])
    in_balance(again)

    left, right = again.halves()
    assert [content(left) + content(right), left.count] == [original, count // 2]
    in_balance(left, right)
    tokens = sorted(token for pairs in told([left, right]).values() for token, _ in pairs)
    assert tokens == list(range(count))
    for token, offset in (pair for pairs in told([left, right]).values() for pair in pairs):
        assert offset == (token if token < left.count else 1000 + token - left.count)

    left.release()
    right.release()
    assert (topic.bytes, topic.records) == (0, 0)
    assert (people[0].budget.bytes, people[0].budget.records) == (0, 0)


@given(st.lists(records, min_size=1, max_size=20), st.sampled_from((1, 40)), st.sets(st.integers(0, 1), min_size=1))
def test_what_is_withdrawn_leaves_the_others_as_they_were(given_records, times, withdrawn):
    given_records = given_records * times
    topic = Budget(10**9, 10**9)
    people = [Person(ConnectionBudget(10**9, 10**9)), Person(ConnectionBudget(10**9, 10**9)), None]
    batch = Batch(65536, topic)
    for token, record in enumerate(given_records):
        append(batch, people[record[0]], token, record)
    batch.seal()
    original = content(batch)
    stay = [token for token, record in enumerate(given_records) if record[0] not in withdrawn]
    fresh = batch.rebuild().without({id(people[number]) for number in withdrawn})  # as after a failure
    batch = batch.rebuild()
    rest = batch.without({id(people[number]) for number in withdrawn})
    for left in (fresh, rest):
        assert (left is None) == (not stay)
        if left is not None:
            assert content(left) == [original[token] for token in stay]
            assert sorted(token for share in left.shares.values() for token in share.tokens) == stay
    assert sorted(token for share in batch.shares.values() for token in share.tokens) == sorted(
        set(range(len(given_records))) - set(stay)
    )
    batch.release()
    assert topic.records == len(stay)
    assert all(people[number].budget.bytes == people[number].budget.records == 0 for number in withdrawn)
    if rest is not None:
        rest.release()
    assert (topic.bytes, topic.records) == (0, 0)
    assert all(person.budget.bytes == 0 for person in people[:2])


def test_a_full_batch_says_so_and_the_first_record_always_fits():
    batch = Batch(200, Budget(10**9, 10**9))
    assert append(batch, None, 0, (0, b"k", b"x" * 1000, False))
    assert not append(batch, None, 1, (0, b"k", b"y", False))
    batch.seal()
    assert len(content(batch)) == 1


def test_offsets_that_kafka_did_not_say_are_unknown():
    batch = Batch(65536, Budget(10**9, 10**9))
    for token in range(3):
        append(batch, None, token, (0, None, b"x", False))
    batch.seal()
    (share,) = batch.shares.values()
    assert list(share.offsets(-1)) == [-1, -1, -1]
