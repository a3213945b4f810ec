import json
from pathlib import Path

from gateway.kafka.publish.partitioner import partition_of
from tests.reference import partitions

VECTORS = json.loads((Path(__file__).parents[3] / "vectors" / "murmur2.json").read_text())


def test_hashes_as_the_java_client_does():
    assert len(VECTORS) == 260
    for vector in VECTORS:
        key = bytes.fromhex(vector["key"])
        assert partitions.murmur2(key) == vector["murmur2"]
        for found in (partition_of, partitions.partition_of):
            assert (found(key, 3), found(key, 7)) == (vector["of_3"], vector["of_7"])
