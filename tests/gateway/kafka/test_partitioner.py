import json
import random
from pathlib import Path

import pytest

from gateway.kafka.partitioner import CACHED_KEYS, Partitioner, murmur2, partition_of

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "murmur2.json").read_text())


def test_hashes_as_the_java_client_does():
    assert len(VECTORS) == 260
    for vector in VECTORS:
        key = bytes.fromhex(vector["key"])
        assert murmur2(key) == vector["murmur2"]
        assert partition_of(key, 3) == vector["of_3"]
        assert partition_of(key, 7) == vector["of_7"]


def test_remembers_keys_up_to_a_bound():
    partitioner = Partitioner(7, range(7), random.Random(1))
    for number in range(CACHED_KEYS * 2 + 1):
        key = b"%d" % number
        assert partitioner.place(key) == partition_of(key, 7)
        assert partitioner.known[key] == partition_of(key, 7)
        assert len(partitioner.known) <= CACHED_KEYS


def test_sticky_moves_among_partitions_with_a_leader():
    partitioner = Partitioner(5, (1, 3, 4), random.Random(1))
    seen = set()
    for _ in range(50):
        before = partitioner.sticky
        partitioner.move_on((1, 3, 4))
        assert partitioner.sticky != before
        seen.add(partitioner.sticky)
    assert seen == {1, 3, 4}


@pytest.mark.parametrize(("available", "expected"), [((2,), {2}), ((), {0, 1, 2, 3, 4})])
def test_sticky_with_one_leader_and_with_none(available, expected):
    partitioner = Partitioner(5, available, random.Random(1))
    seen = set()
    for _ in range(100):
        partitioner.move_on(available)
        seen.add(partitioner.sticky)
    assert seen == expected
