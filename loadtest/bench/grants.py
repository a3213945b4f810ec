"""Cost of computing clients' grants from access lists with many identities: time and memory.

    python -m loadtest.bench.grants [--counts 10,1000,100000]

Two access lists per number of identities: `fleet` has one rule with variables for all identities, `each` has one rule
per identity and ten rules for everyone. The columns are the seconds to compile the list; the microseconds for the first
grant of each identity (mean, 99th percentile, maximum); the KiB still allocated after all grants were computed and
their connections closed; the bytes of a grant while its connection is open; and the nanoseconds to check a publish to a
topic that the grant has seen before, which is the cost per message.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Final

from gateway.security.identity import Identity
from gateway.security.rights.authorization import AccessList, Grant
from gateway.settings.config import AccessRule

EVERYONES: Final = 10
KNOWN_CALLS: Final = 200_000


def fleet(count: int) -> list[AccessRule]:
    """Create one rule for all identities."""
    return [AccessRule(topic="devices/{name}/#"), AccessRule(action="subscribe", topic="commands/{name}/{client}/+")]


def each(count: int) -> list[AccessRule]:
    """Create a rule for each identity, and some for everyone."""
    own = [AccessRule(principal=_name(number), topic=f"devices/{_name(number)}/#") for number in range(count)]
    return [AccessRule(topic=f"open-{number}/#", action="subscribe") for number in range(EVERYONES)] + own


LISTS: Final[dict[str, Callable[[int], list[AccessRule]]]] = {"fleet": fleet, "each": each}


def _name(number: int) -> str:
    return f"device-{number:06}"


def _grant(access: AccessList, number: int) -> Grant:
    name = _name(number)
    grant = access.for_client(Identity(name, "password"), f"client-{number}")
    assert grant.mqtt_publish(f"devices/{name}/a", "devices", b"a")
    return grant


def bench(make: Callable[[int], list[AccessRule]], count: int) -> tuple[float, ...]:
    """Measure one row of the table."""
    rules = make(count)
    began = time.process_time()
    access = AccessList(rules)
    compiled_s = time.process_time() - began
    took: list[float] = []
    for number in range(count):
        identity, client = Identity(_name(number), "password"), f"client-{number}"
        start = time.process_time()
        access.for_client(identity, client)
        took.append(time.process_time() - start)
    took.sort()
    access = AccessList(rules)
    gc.collect()
    tracemalloc.start()
    for number in range(count):
        _grant(access, number)
    stays = tracemalloc.get_traced_memory()[0]
    held = [_grant(access, number) for number in range(min(count, 10_000))]
    weight = (tracemalloc.get_traced_memory()[0] - stays) / len(held)
    tracemalloc.stop()
    publish, topic = held[0].mqtt_publish, f"devices/{_name(0)}/a"
    start = time.process_time()
    for _ in range(KNOWN_CALLS):
        publish(topic, "devices", b"a")
    known = (time.process_time() - start) / KNOWN_CALLS
    return (
        compiled_s,
        statistics.fmean(took) * 1e6,
        took[len(took) * 99 // 100] * 1e6,
        took[-1] * 1e6,
        stays / 1024,
        weight,
        known * 1e9,
    )


def main() -> None:
    """Run all measurements and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", default="10,1000,100000")
    counts = [int(count) for count in parser.parse_args().counts.split(",")]
    columns = ("compile s", "grant us", "p99 us", "max us", "kept KiB", "grant B", "known ns")
    print(f"{'list':6}{'identities':>12}" + "".join(f"{column:>11}" for column in columns))
    for name, make in LISTS.items():
        for count in counts:
            print(f"{name:6}{count:12,}" + "".join(f"{figure:11.2f}" for figure in bench(make, count)), flush=True)


if __name__ == "__main__":
    main()
