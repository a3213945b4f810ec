"""Ages of delivered records: counted once a fetch, by the reader."""

from __future__ import annotations

from gateway.kafka.read.delays import BOUNDS_S, GROUP, LIVE, Delays
from mapping.record import Received


def record(timestamp: int) -> Received:
    return Received("t", None, b"v", partition=0, offset=0, timestamp=timestamp, headers=())


def test_a_fetch_counts_as_old_as_its_youngest_record() -> None:
    delays = Delays(wall_clock=lambda: 1000.0)
    delays.note(LIVE, [record(900_000), record(999_850)])
    delays.note(LIVE, [record(1_005_000)])  # another machine's clock
    delays.note(GROUP, [])
    found = delays.statistics().delay_s
    assert (sum(found[LIVE].counts), sum(found[GROUP].counts)) == (3, 0)
    assert found[LIVE].counts[BOUNDS_S.index(0.2)] == 2
    assert found[LIVE].counts[0] == 1
    assert abs(found[LIVE].total - 0.3) < 1e-9
