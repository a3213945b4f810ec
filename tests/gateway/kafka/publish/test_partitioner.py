import json
from pathlib import Path

from gateway.kafka.publish.partitioner import CACHED_KEYS, Partitioner, murmur2, partition_of

VECTORS = json.loads((Path(__file__).parents[3] / "vectors" / "murmur2.json").read_text())


def test_hashes_as_the_java_client_does():
    assert len(VECTORS) == 260
    for vector in VECTORS:
        key = bytes.fromhex(vector["key"])
        assert murmur2(key) == vector["murmur2"]
        assert partition_of(key, 3) == vector["of_3"]
        assert partition_of(key, 7) == vector["of_7"]


def test_remembers_keys_up_to_a_bound():
    partitioner = Partitioner(7)
    for number in range(CACHED_KEYS * 2 + 1):
        key = b"%d" % number
        assert partitioner.place(key) == partition_of(key, 7)
        assert partitioner.known[key] == partition_of(key, 7)
        assert len(partitioner.known) <= CACHED_KEYS
